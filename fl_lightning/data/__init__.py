"""Data: where samples come from, how the clients share them, and how they reach the device."""

from __future__ import annotations

import difflib
import math
from dataclasses import replace

import numpy as np
import torch

from fl_lightning.config import DataConfig
from fl_lightning.data import partition
from fl_lightning.data.federated import ClientData, FederatedData, Part, ResidentPart, Samples
from fl_lightning.data.names import SOURCES
from fl_lightning.data.sampling import stratified
from fl_lightning.data.source import Absent, Pool, Source
from fl_lightning.errors import BadInput
from fl_lightning.rng import numpy_rng

__all__ = ["ClientData", "FederatedData", "Part", "ResidentPart", "prepare"]

SMOKE_TRAIN, SMOKE_TEST = 64, 8
"""Samples per client in a smoke run, about."""


def prepare(data: DataConfig, clients: int, seed: int, smoke: bool = False) -> FederatedData:
    """Load `data.source`, deal it out to `clients` and work out the normalisation.

    Randomness depends on `seed` alone. Raises `BadInput` for data that are absent, malformed or too few. `smoke` takes
    a few samples only, with fewer for each client than `data.min_samples`, and makes them up where the real are absent.
    """
    if smoke:
        data = replace(data, min_samples=min(2, data.min_samples))
    source, made_up = _load(data, clients, smoke)
    if smoke:
        used_train = _few(source.train.labels, SMOKE_TRAIN, clients)
        used_test = _few(source.test.labels, SMOKE_TEST, clients)
    else:
        used_train = _used(source.train.labels, data.fraction, numpy_rng(seed, "data.train"))
        share = data.fraction if data.test_fraction is None else data.test_fraction
        used_test = _used(source.test.labels, share, numpy_rng(seed, "data.test"))
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
    return FederatedData(
        Samples(torch.from_numpy(raw_train), torch.from_numpy(train_labels), mean, std),
        Samples(torch.from_numpy(raw_test), torch.from_numpy(test_labels), mean, std),
        (train_shares, validation, test_shares),
        source.class_names,
        partition.angles(clients) if rotated else [0.0] * clients,
        data.augment,
        data.resident,
        made_up,
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


def _load(data: DataConfig, clients: int, smoke: bool) -> tuple[Source, bool]:
    """The source, and whether it was made up."""
    name = data.source
    if data.root is not None and data.root.endswith(".npz"):
        name = "arrays"
    if name not in SOURCES:
        close = difflib.get_close_matches(name.lower(), SOURCES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise BadInput("data.source", name, f"{hint}`fl-train list sources` names them all")
    try:
        return _read(name, data.root, data.download and not smoke), False
    except Absent:
        if not smoke:
            raise
        return _made_up(name, clients), True


def _read(name: str, root: str | None, download: bool) -> Source:
    # Imported here: scikit-learn and torchvision take seconds to load.
    if name == "digits":
        from fl_lightning.data import digits

        return digits.load()
    if name == "arrays":
        from fl_lightning.data import arrays

        return arrays.load(root)
    if name == "images":
        from fl_lightning.data import images

        return images.load(root)
    from fl_lightning.data import vision

    return vision.load(name, root, download)


def _made_up(name: str, clients: int) -> Source:
    """Noise with labels, of the shape and classes of torchvision's `name` (else 10 classes of 3x32x32)."""
    from fl_lightning.data.vision import RECIPES

    recipe = RECIPES.get(name)
    shape, classes = (recipe.shape, recipe.classes) if recipe else ((3, 32, 32), 10)
    pools = []
    for part, per_client in (("train", SMOKE_TRAIN), ("test", SMOKE_TEST)):
        size = _per_class(classes, per_client, clients) * classes
        noise = numpy_rng(0, f"made up {part}").integers(0, 256, (size, *shape), dtype=np.uint8)
        pools.append(Pool.of(noise, np.arange(size) % classes))
    return Source(pools[0], pools[1], [str(label) for label in range(classes)])


def _per_class(classes: int, per_client: int, clients: int) -> int:
    """Samples of each class that give about `per_client` to each client, and let every client hold every class."""
    return max(math.ceil(per_client * clients / classes), clients)


def _few(labels: np.ndarray, per_client: int, clients: int) -> np.ndarray:
    """Indices of the first few samples of each class."""
    size = _per_class(int(labels.max()) + 1, per_client, clients)
    order = np.argsort(labels, kind="stable")
    first = np.searchsorted(labels[order], labels[order])
    return np.sort(order[np.arange(len(labels)) - first < size])


def _used(labels: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Indices of a stratified share of a pool."""
    if fraction == 1:
        return np.arange(len(labels))
    return stratified(labels, max(1, round(fraction * len(labels))), rng)
