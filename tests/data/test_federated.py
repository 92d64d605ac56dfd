from dataclasses import replace

import numpy as np
import pytest
import torch
from reckoning import seeded

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import FederatedData, prepare
from fl_lightning.data import federated as module
from fl_lightning.data.part import LoadedPart, ResidentPart, TargetPart


def arrays(folder, size=300, shape=(12, 12, 3)):
    rng = np.random.default_rng(0)
    np.savez(
        folder / "a.npz",
        x_train=rng.integers(0, 256, (size, *shape), dtype=np.uint8),
        y_train=np.arange(size) % 5,
        x_test=rng.integers(0, 256, (50, *shape), dtype=np.uint8),
        y_test=np.arange(50) % 5,
    )
    return str(folder / "a.npz")


def draw(seed):
    return seeded(seed)


def collect(part, **options):
    return list(part.batches(7, **options))


@pytest.mark.parametrize("augment", ["none", "flip", "crop_flip"])
@pytest.mark.parametrize("partition", ["dirichlet", "rotated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_loader_and_resident_give_the_same_bits(augment, partition, dtype, tmp_path):
    config = DataConfig(
        root=arrays(tmp_path), partition=partition, augment=augment, validation=0.1, alpha=1.0
    )
    resident = prepare(replace(config, resident="always"), 5, 0)
    loaded = prepare(replace(config, resident="never"), 5, 0)
    for i in range(5):
        one, two = resident.client(i, dtype=dtype), loaded.client(i, dtype=dtype)
        assert isinstance(one.train, ResidentPart)
        assert isinstance(two.train, LoadedPart)
        for name in ("train", "validation", "test"):
            for seeds in (None, 3):
                options = [
                    {}
                    if seeds is None
                    else {"generator": draw(seeds), "augment": draw(4), "whole_last": True}
                    for _ in range(2)
                ]
                left = collect(getattr(one, name), **options[0])
                right = collect(getattr(two, name), **options[1])
                assert len(left) == len(right) > 0
                for (x, y), (u, v) in zip(left, right, strict=True):
                    assert torch.equal(x, u)
                    assert torch.equal(y, v)
                    assert x.dtype == dtype
                    assert y.dtype == torch.int64


def test_no_part_touches_the_global_random_state(tmp_path):
    for resident in ("always", "never"):
        data = prepare(
            DataConfig(root=arrays(tmp_path), augment="crop_flip", resident=resident), 3, 0
        )
        before = torch.get_rng_state()
        collect(data.client(0).train, generator=draw(0), augment=draw(1))
        collect(data.client(0).test)
        assert torch.equal(before, torch.get_rng_state())


def first(part):
    return torch.cat([x for x, _ in part.batches(1000)])


@pytest.mark.parametrize("resident", ["always", "never"])
@pytest.mark.parametrize("augment", ["none", "flip"])
def test_targets_stay_with_their_samples(resident, augment, tmp_path):
    """In any order, in parts, and where inputs are augmented, which they are as without targets."""
    train = (
        prepare(DataConfig(root=arrays(tmp_path), augment=augment, resident=resident), 3, 0)
        .client(1)
        .train
    )
    labels = torch.cat([y for _, y in train.batches(1000)])
    part = TargetPart(train, torch.stack([labels, torch.arange(len(labels))], 1).double())
    for only in (slice(None), slice(1, 3)):
        options = [{"generator": draw(5), "augment": draw(6), "only": only} for _ in range(3)]
        plain, ours, shuffled = (
            list(p.batches(2, **o)) for p, o in zip((train, part, part), options, strict=True)
        )
        assert len(plain) == len(ours) > 1
        for (x, y), (u, target) in zip(plain, ours, strict=True):
            assert torch.equal(x, u) and torch.equal(target[:, 0], y.double())
        places = torch.cat([target[:, 1] for _, target in shuffled])
        assert len(places.unique()) == len(places) and not torch.equal(places, places.sort().values)
    stored = torch.cat([target for _, target in part.batches(7)])
    assert torch.equal(stored[:, 1], torch.arange(len(labels)).double())
    with pytest.raises(ValueError, match="2 targets for"):
        TargetPart(train, torch.zeros(2))


@pytest.mark.parametrize("resident", ["always", "never"])
@pytest.mark.parametrize(
    "samples, batch, whole_last, sizes",
    [
        (9, 4, False, [4, 4, 1]),
        (9, 4, True, [4, 5]),
        (10, 4, True, [4, 4, 2]),
        (8, 4, True, [4, 4]),
        (1, 4, True, [1]),
        (0, 4, True, []),
    ],
)
def test_batch_sizes(resident, samples, batch, whole_last, sizes):
    pool = module.Samples(
        torch.zeros(10, 3), torch.zeros(10, dtype=torch.int64), torch.zeros(3), torch.ones(3)
    )
    index = np.arange(samples)
    data = FederatedData(pool, pool, ([index], [index], [index]), ["0"], [0.0], resident=resident)
    part = data.client(0).train
    assert [
        len(y) for _, y in part.batches(batch, generator=draw(0), whole_last=whole_last)
    ] == sizes
    assert len(part) == samples


def test_auto_residency_asks_how_much_fits(monkeypatch):
    samples = 1797 * 64 * 4
    for free, kind in ((2 * samples, ResidentPart), (2 * samples - 1, LoadedPart)):
        monkeypatch.setattr(module, "free_bytes", lambda device, free=free: free)
        assert isinstance(prepare(DataConfig(), 4, 0).client(0).train, kind)


def test_augmentation_changes_training_data_only(tmp_path):
    data = prepare(DataConfig(root=arrays(tmp_path), augment="flip", validation=0.2), 2, 0).client(
        0
    )
    plain = first(data.train)
    augmented = torch.cat([x for x, _ in data.train.batches(1000, augment=draw(0))])
    flipped = (augmented != plain).flatten(1).any(1)
    assert 0 < flipped.sum() < len(plain)
    assert torch.equal(augmented[flipped], plain[flipped].flip(-1))
    for part in (data.validation, data.test):
        assert torch.equal(
            torch.cat([x for x, _ in part.batches(1000, augment=draw(0))]), first(part)
        )
    assert torch.equal(first(data.train), plain)  # nothing was changed in place
