"""Made-up data (noise with labels) in the shape of data that are not on this machine."""

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
    """Numbers of samples by client, the shape of a sample, and the task."""

    train: Sequence[int]
    """Training samples of each client."""
    test: Sequence[int]
    """Test samples of each client."""
    sample_shape: tuple[int, ...]
    classes: int
    task: Task = "classification"
    text: Text | None = None
    """Vocabulary and kind of targets if samples are token sequences; None: samples are pixels."""


def made_up_for(
    config: Config,
    clients: int,
    samples: int,
) -> FederatedData | None:
    """Makes up data for the source that `config` names, or returns None if the shape of its samples
    is not known.

    Args:
        config: the run.
        clients: number of clients.
        samples: training samples of each client; each also has a fifth as many test samples.
    """
    shape = shape_of(config.data.source)
    if shape is None:
        return None
    sample_shape, classes = shape
    test_samples = max(1, samples // 5)
    return made_up(
        DataSizes(
            [samples] * clients,
            [test_samples] * clients,
            sample_shape,
            classes,
        )
    )


def made_up(sizes: DataSizes) -> FederatedData:
    """Makes up data of these sizes; equal sizes give equal data."""
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
    """Makes up a training or test part: all clients' samples, and for each client the indices of
    its `counts[i]` samples."""
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
    # the mean and standard deviation of pixels from 0 to 255 are 128 and 74
    return Samples(
        raw,
        labels,
        128 * by_channel,
        74 * by_channel,
    ), np.split(order, np.cumsum(counts)[:-1])
