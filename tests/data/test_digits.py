import numpy as np

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import digits


def test_all_digits_split_alike_in_every_run():
    one, two = digits.load(DataConfig()), digits.load(DataConfig())
    assert len(one.train.labels) + len(one.test.labels) == 1797
    assert len(one.test.labels) == 359  # a fifth
    everything = np.arange(len(one.test.labels))
    assert np.array_equal(one.test.read(everything), two.test.read(everything))
    shares = [np.bincount(pool.labels) / len(pool.labels) for pool in (one.train, one.test)]
    assert np.abs(shares[0] - shares[1]).max() < 0.003
