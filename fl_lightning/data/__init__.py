"""Data: where samples come from, how the clients share them, and how they reach the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fl_lightning.config import DataConfig
from fl_lightning.data import partition, public
from fl_lightning.data.federated import ClientData, FederatedData, Part, ResidentPart, Samples
from fl_lightning.data.load import SMOKE_TEST, SMOKE_TRAIN, load, per_class
from fl_lightning.data.sampling import stratified
from fl_lightning.errors import BadInput
from fl_lightning.rng import numpy_rng

__all__ = ["ClientData", "FederatedData", "Part", "ResidentPart", "prepare"]


def prepare(data: DataConfig, clients: int, seed: int, smoke: bool = False) -> FederatedData:
    """Load `data.source`, deal it out to `clients` and work out the normalisation.

    Randomness depends on `seed` alone. Raises `BadInput` for data that are absent, malformed or too few. `smoke` takes
    a few samples only, with fewer for each client than `data.min_samples`, and makes them up where the real are absent.
    """
    if smoke:
        data = replace(data, min_samples=min(2, data.min_samples))
    source, made_up = load(data, clients, smoke)
    if smoke:
        used_train = _few(source.train.labels, SMOKE_TRAIN, clients)
        used_test = _few(source.test.labels, SMOKE_TEST, clients)
    else:
        used_train = _used(source.train.labels, data.fraction, numpy_rng(seed, "data.train"))
        share = data.fraction if data.test_fraction is None else data.test_fraction
        used_test = _used(source.test.labels, share, numpy_rng(seed, "data.test"))
    held_back = None
    if data.public == public.HELD_BACK:
        used_train, held_back = public.hold_back(used_train, data, seed, smoke)
    train_labels, test_labels = source.train.labels[used_train], source.test.labels[used_test]
    train_shares, test_shares = partition.deal(train_labels, test_labels, clients, data, numpy_rng(seed, "partition"))
    holding_rng = numpy_rng(seed, "data.validation")
    train_shares, validation = partition.hold_out(train_shares, train_labels, data.validation, holding_rng)

    raw_train, raw_test = source.train.read(used_train), source.test.read(used_test)
    rotated = data.partition == "rotated"
    if raw_train.ndim == 2 and (rotated or data.augment != "none"):
        key, value = ("data.partition", data.partition) if rotated else ("data.augment", data.augment)
        raise BadInput(key, value, "it needs images, but the samples are plain vectors")
    mean, std = normalisation(raw_train)
    known = None
    if held_back is not None:
        known = source.train.read(held_back)
    elif data.public is not None:
        known, made_up = public.load(data, raw_train, made_up, seed, smoke)
    return FederatedData(
        Samples(torch.from_numpy(raw_train), torch.from_numpy(train_labels), mean, std),
        Samples(torch.from_numpy(raw_test), torch.from_numpy(test_labels), mean, std),
        (train_shares, validation, test_shares),
        source.class_names,
        partition.angles(clients) if rotated else [0.0] * clients,
        data.augment,
        data.resident,
        made_up,
        None if known is None else Samples(torch.from_numpy(known), torch.empty(0, dtype=torch.int64), mean, std),
    )


def normalisation(raw: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each channel (or feature) of `raw`, float32, [channels, 1, 1] or [features].

    A channel that never changes keeps the deviation 1.
    """
    axes = (0, *range(2, raw.ndim))
    # Around the first sample's mean, so that the difference of squares loses no digits; in blocks, to save memory.
    origin = raw[:1].astype(np.float64).mean(axes, keepdims=True)
    total, squares = np.zeros_like(origin), np.zeros_like(origin)
    for start in range(0, len(raw), 1024):
        block = raw[start : start + 1024] - origin
        total += block.sum(axes, keepdims=True)
        squares += np.square(block, out=block).sum(axes, keepdims=True)
    count = raw.size / origin.size
    std = np.sqrt(np.maximum(squares / count - (total / count) ** 2, 0))
    mean = origin + total / count
    return _float32(mean), _float32(np.where(std > 0, std, 1))


def _float32(statistic: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(statistic[0].astype(np.float32))


def _few(labels: np.ndarray, per_client: int, clients: int) -> np.ndarray:
    """Indices of the first few samples of each class."""
    size = per_class(int(labels.max()) + 1, per_client, clients)
    order = np.argsort(labels, kind="stable")
    first = np.searchsorted(labels[order], labels[order])
    return np.sort(order[np.arange(len(labels)) - first < size])


def _used(labels: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Indices of a stratified share of a pool."""
    if fraction == 1:
        return np.arange(len(labels))
    return stratified(labels, max(1, round(fraction * len(labels))), rng)
