from __future__ import annotations

import numpy as np

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import digits


def test_all_digits_split_alike_in_every_run() -> None:
    one, two = digits.load(DataConfig()), digits.load(DataConfig())
    assert len(one.train.labels) + len(one.test.labels) == 1797
    assert len(one.test.labels) == 359  # a fifth
    everything = np.arange(len(one.test.labels))
    assert np.array_equal(one.test.read(everything), two.test.read(everything))
    shares = [np.bincount(pool.labels) / len(pool.labels) for pool in (one.train, one.test)]
    assert np.abs(shares[0] - shares[1]).max() < 0.003


def test_images_are_the_real_ones() -> None:
    from sklearn.datasets import load_digits

    source = digits.load(DataConfig())
    images = source.train.read(np.arange(3))
    assert images.shape == (3, 1, 8, 8)
    # The order of the original is kept: each of ours is found there, further on each time, with its
    # label.
    original = load_digits()
    places = [int(np.flatnonzero((original.images == image[0]).all((1, 2)))[0]) for image in images]
    assert places == sorted(places)
    assert original.target[places].tolist() == source.train.labels[:3].tolist()
