"""Noise with labels, in the shape of data that are not here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fl_lightning.configuration.components import Text
from fl_lightning.configuration.config import Config
from fl_lightning.data import FederatedData
from fl_lightning.data.load import shape_of
from fl_lightning.data.part import Samples
from fl_lightning.foundation.metric import Task
from fl_lightning.models.base import inputs, targets


@dataclass(frozen=True)
class DataSizes:
    """Numbers of samples by client, and the shape of one."""

    train: Sequence[int]
    """Training samples of each client."""
    test: Sequence[int]
    sample_shape: tuple[int, ...]
    classes: int
    task: Task = "classification"
    text: Text | None = None
    """How samples are read, where they are tokens."""


def in_shape_of(
    config: Config,
    clients: int,
    samples: int,
) -> FederatedData | None:
    """Made-up data for `config`: `samples` training samples a client and a fifth as many for tests.

    None where the shape of the source's samples is not known.
    """
    shape = shape_of(config.data.source)
    if shape is None:
        return None
    sample_shape, classes = shape
    tests = max(1, samples // 5)
    return made_up(
        DataSizes(
            [samples] * clients,
            [tests] * clients,
            sample_shape,
            classes,
        )
    )


def made_up(sizes: DataSizes) -> FederatedData:
    """Data of these sizes; equal at every call."""
    generator = torch.Generator().manual_seed(0)
    train, train_shares = _part(sizes, sizes.train, generator)
    test, test_shares = _part(sizes, sizes.test, generator)
    no_validation = [np.zeros(0, dtype=np.int64)] * len(sizes.train)
    options: dict[str, Any] = {
        "made_up": True,
        "task": sizes.task,
        "public": train,
        "vocabulary": sizes.text.vocabulary if sizes.text else 0,
    }
    return FederatedData(
        train,
        test,
        (train_shares, no_validation, test_shares),
        [str(k) for k in range(sizes.classes)],
        [0.0] * len(sizes.train),
        **options,
    )


def _part(
    sizes: DataSizes, counts: Sequence[int], generator: torch.Generator
) -> tuple[Samples, list[np.ndarray]]:
    """The samples of all clients, `counts[i]` of client i, and the indices of each client's."""
    total, shape = sum(counts), sizes.sample_shape
    if sizes.text is None:
        raw = torch.randint(
            256,
            (total, *shape),
            generator=generator,
            dtype=torch.uint8,
        )
    else:
        raw = inputs(total, shape, sizes.text, generator)
    is_regression = sizes.task == "regression"
    labels = targets(
        total,
        shape,
        sizes.classes,
        sizes.text,
        floats=is_regression,
    )
    by_channel = torch.ones(shape[0], *[1] * (len(shape) - 1))
    order = np.random.default_rng(0).permutation(total)
    # Mean and deviation of pixels from 0 to 255.
    return Samples(
        raw,
        labels,
        128 * by_channel,
        74 * by_channel,
    ), np.split(order, np.cumsum(counts)[:-1])
