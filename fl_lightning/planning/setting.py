"""What a plan starts from: the hardware, the data's sizes, and the cohorts that the seed draws."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fl_lightning.components import Text
from fl_lightning.config import Config
from fl_lightning.core.run import cohort_of
from fl_lightning.data import FederatedData, prepare
from fl_lightning.data.load import shape_of
from fl_lightning.data.part import Samples
from fl_lightning.data.source import Absent
from fl_lightning.metric import Task
from fl_lightning.models.base import inputs, targets

DRAWS = 20
"""Rounds whose cohorts are drawn to see how evenly they fall on the ranks (ours, not tuned)."""


@dataclass(frozen=True)
class Hardware:
    """What the run is to have."""

    accelerator: str
    """cpu, or the kind of accelerator."""
    nodes: int
    devices: int
    """Processes on each node; otherwise GPUs."""
    capacity: float
    """Bytes that a rank may hold: a GPU's memory, or its share of a node's."""

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.nodes * self.devices


@dataclass(frozen=True)
class DataSizes:
    """What a plan must know of the data."""

    train: list[int]
    """Training samples of each client."""
    test: list[int]
    sample_shape: tuple[int, ...]
    classes: int
    raw: int
    """Bytes of all samples as they were read: every process has them."""
    task: Task = "classification"
    data: FederatedData | None = None
    """The data themselves; None: they are not here, and the sizes are assumed."""
    text: Text | None = None
    """What samples are, where they are tokens."""


def sizes_of(config: Config, samples: int) -> DataSizes:
    """Sizes of the data: the real ones, or where they are absent `samples` for each client, a fifth as many for tests.

    Raises:
        BadInput: data that are there cannot be dealt out like this.
    """
    clients = config.clients
    try:
        dealt = config.federation.clients
        data = prepare(replace(config.data, download=False), dealt, config.seed, config.smoke)
    except Absent:
        known = shape_of(config.data.source)
        if known is None:
            raise
        shape, classes = known
        tests = max(1, samples // 5)
        raw = clients * (samples + tests) * (math.prod(shape) + 8)
        return DataSizes([samples] * clients, [tests] * clients, shape, classes, raw)
    sizes = data.train_sizes, data.test_sizes
    return DataSizes(*sizes, data.input_shape, data.num_classes, data.raw_bytes, data.task, data, data.text)


def made_up(sizes: DataSizes) -> FederatedData:
    """Noise with labels, of these sizes."""
    generator = torch.Generator().manual_seed(0)
    pools, shares = [], []
    for counts in (sizes.train, sizes.test):
        raw = torch.randint(256, (sum(counts), *sizes.sample_shape), generator=generator, dtype=torch.uint8)
        raw = raw if sizes.text is None else inputs(len(raw), sizes.sample_shape, sizes.text, generator)
        floats = sizes.task == "regression"
        labels = targets(len(raw), sizes.sample_shape, sizes.classes, sizes.text, floats=floats)
        one = torch.ones(sizes.sample_shape[0], *[1] * (len(sizes.sample_shape) - 1))
        pools.append(Samples(raw, labels, 128 * one, 74 * one))
        shares.append(np.split(np.random.default_rng(0).permutation(len(raw)), np.cumsum(counts)[:-1]))
    none = [np.zeros(0, dtype=np.int64)] * len(sizes.train)
    names, straight = [str(k) for k in range(sizes.classes)], [0.0] * len(none)
    train, test = pools
    parts = shares[0], none, shares[1]
    options: dict[str, Any] = {"made_up": True, "task": sizes.task, "public": train}
    vocabulary = sizes.text.vocabulary if sizes.text else 0
    return FederatedData(train, test, parts, names, straight, **options, vocabulary=vocabulary)


def cohorts(config: Config) -> list[np.ndarray]:
    """The first few cohorts; one, where all of them are everybody."""
    first = np.array(cohort_of(config, 1))
    rounds = min(config.federation.rounds, DRAWS) if len(first) < config.clients else 1
    return [first, *(np.array(cohort_of(config, t)) for t in range(2, rounds + 1))]


def met(config: Config) -> int:
    """Clients that have taken part by the last round (expected)."""
    share = 1 - (1 - len(cohorts(config)[0]) / config.clients) ** config.federation.rounds
    return math.ceil(share * config.clients - 1e-9)
