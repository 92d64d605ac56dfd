import dataclasses

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from refusals import refuses
from torch.testing import assert_close

from fl_lightning.configuration import names
from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import digits, normalisation, prepare
from fl_lightning.data.source import Source


def everything(data, part="train"):
    batches = [
        batch for i in range(data.clients) for batch in getattr(data.client(i), part).batches(1000)
    ]
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


@pytest.mark.parametrize("test_seed", [None, 0])
def test_the_seed_moves_shares_and_test_set_unless_that_has_its_own(test_seed):
    one, two = (
        prepare(DataConfig(partition="iid", test_seed=test_seed), 4, seed) for seed in (0, 1)
    )
    assert not torch.equal(everything(one)[0], everything(two)[0])
    images = [{image.numpy().tobytes() for image in data._test.raw} for data in (one, two)]
    assert (images[0] == images[1]) == (test_seed == 0)


def test_normalisation_agrees_with_numpy_far_from_zero():
    raw = np.random.default_rng(0).normal(1e4, 1, (3000, 3, 4, 4)).astype(np.float32)
    mean, std = normalisation(raw)
    exact = raw.astype(np.float64)
    assert_allclose(mean.flatten(), exact.mean((0, 2, 3)), rtol=1e-6)
    assert_allclose(std.flatten(), exact.std((0, 2, 3)), rtol=1e-6)


def test_fraction_takes_a_stratified_share_of_both_pools():
    data = prepare(DataConfig(fraction=0.5), 5, 0)
    assert len(everything(data)[1]) == 719
    labels = everything(data, "test")[1]
    assert len(labels) == 180
    assert np.bincount(labels).min() >= 17  # of about 36 in each class


@pytest.mark.parametrize(
    "options, message",
    [
        ({"source": "MNIST"}, "did you mean mnist"),
        ({"source": "arrays"}, r"an \.npz file"),
        ({"fraction": 0.01}, r"federation\.clients"),
    ],
)
def test_bad_input(options, message):
    with refuses(message):
        prepare(DataConfig(**options), 10, 0)


@pytest.mark.parametrize("partition", [name for name in names.PARTITIONS if name != "natural"])
@pytest.mark.parametrize("source", ["digits", "mnist", "cifar100", "gtsrb", "images", "arrays"])
def test_smoke_runs_on_a_few_samples(source, partition, tmp_path):
    root = None if source == "digits" else str(tmp_path / "none")
    config = DataConfig(
        source=source, root=root, partition=partition, download=True, validation=0.2
    )
    data = prepare(config, 4, 0, smoke=True)
    assert data.made_up == (source != "digits")
    shapes = {"digits": (1, 8, 8), "mnist": (1, 28, 28)}
    assert data.input_shape == shapes.get(source, (3, 32, 32))
    assert data.num_classes == {"cifar100": 100, "gtsrb": 43}.get(source, 10)
    assert 4 * 2 <= sum(data.train_sizes) <= 4 * 100
    assert min(data.train_sizes) >= 2
    assert all(len(data.client(i).test) for i in range(4))


def test_each_clients_own_test_part(tmp_path):
    x = np.arange(60 * 16, dtype=np.uint16).astype(np.float32).reshape(60, 4, 4)
    np.savez(
        tmp_path / "a.npz",
        x_train=x[:48],
        y_train=np.arange(48) % 2,
        x_test=x[48:],
        y_test=np.arange(12) % 2,
    )
    config = DataConfig(
        root=str(tmp_path / "a.npz"),
        partition="iid",
        client_test=0.4,
        validation=1 / 3,
        min_samples=2,
    )
    data = prepare(config, 3, 0)
    # 20 of the pooled 60 each: 0.4 of them are the test part, a third of the other 12 validation.
    sizes = [
        [len(getattr(data.client(i), part)) for part in ("train", "validation", "test")]
        for i in range(3)
    ]
    assert sizes == [[8, 4, 8]] * 3
    # The normalisation is that of what is trained and validated on, and each sample is dealt once.
    known = torch.cat([everything(data)[0], everything(data, "validation")[0]])
    assert known.mean() == pytest.approx(0, abs=1e-5)
    pooled = torch.cat([known, everything(data, "test")[0]]) * data._train.std + data._train.mean
    assert_close(pooled.flatten().sort().values, torch.from_numpy(x).flatten())
    for part in ("train", "validation", "test"):
        x_part, y_part = everything(data, part)
        first = (x_part * data._train.std + data._train.mean)[
            :, 0, 0, 0
        ] / 16  # of sample k it is k
        assert torch.equal(first.round().long() % 2, y_part)
    # The test part has each client's class mix.
    mixes = [
        [np.bincount(torch.cat([y for _, y in part.batches(99)])) for part in (c.train, c.test)]
        for c in map(data.client, range(3))
    ]
    for train, test in mixes:
        assert abs(train[0] / train.sum() - test[0] / test.sum()) <= 2 / 8
    with refuses(r"federation\.clients=13.*at most 12"):
        prepare(config, 13, 0)  # 5 each: 2 to train on, 1 for validation, 2 for the test


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"partition": "hsu"},
        {"partition": "pathological", "classes_per_client": 5},
        {"partition": "lognormal"},
        {"partition": "iid"},
        {"partition": "rotated"},
        {"planted": "labels"},
        {"fraction": 0.9, "test_fraction": 0.5},
        {"client_test": 0.25},
        {"client_test": 0.25, "global_test": True},
        {"global_test": True},
        {"public": "held_back"},
        {"samples_per_client": 60},
    ],
)
def test_scored_on_validation_data_nothing_else_changes_and_no_test_sample_is_read(
    changes, monkeypatch
):
    usual = prepare(DataConfig(validation=0.2, **changes), 5, 0)
    real, held_out = digits.load(DataConfig()), len(everything(usual, "test")[1])
    read = []

    def watched(pool, refused):
        def samples(index):
            assert not refused or not len(index)
            read.append(len(index))
            return pool.read(index)

        return dataclasses.replace(pool, read=samples)

    config = DataConfig(validation=0.2, score_on="validation", **changes)
    seen = Source(
        watched(real.train, False), watched(real.test, not config.pooled), real.class_names
    )
    monkeypatch.setattr(digits, "load", lambda seed: seen)
    data = prepare(config, 5, 0)
    for part, theirs in (("train", "train"), ("validation", "validation"), ("test", "validation")):
        assert all(
            torch.equal(a, b)
            for a, b in zip(everything(data, part), everything(usual, theirs), strict=True)
        )
    assert data.global_test(torch.device("cpu"), torch.float32) is None
    assert data.train_sizes == usual.train_sizes and len(everything(data)[1]) > 0
    if config.pooled:  # the clients' own test parts are of both pools, and are left alone
        assert sum(read) == len(real.train.labels) + len(real.test.labels) - held_out
