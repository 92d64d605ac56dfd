"""What every source of data hands over: a training and a test pool, read on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fl_lightning.data.sampling import split
from fl_lightning.errors import BadInput
from fl_lightning.rng import numpy_rng

TEST_SHARE = 0.2
"""Test share of data that come without a test part."""


class Absent(BadInput):
    """The data are not there (a smoke run may then make some up)."""


@dataclass(frozen=True)
class Pool:
    """Labelled samples whose images are read only when they are used."""

    labels: np.ndarray
    """Class numbers from 0, int64 [n]."""
    read: Callable[[np.ndarray], np.ndarray]
    """Indices [m] to raw samples, uint8 or float32, [m, channels, height, width] or [m, features]."""

    @classmethod
    def of(cls, samples: np.ndarray, labels: np.ndarray) -> Pool:
        """A pool that lies in memory."""
        return cls(labels.astype(np.int64), lambda index: np.ascontiguousarray(samples[index]))

    def part(self, index: np.ndarray) -> Pool:
        """The samples at `index` as a pool of their own."""
        return Pool(self.labels[index], lambda inner: self.read(index[inner]))


@dataclass(frozen=True)
class Source:
    """A data set: its two pools and the names of its classes."""

    train: Pool
    test: Pool
    class_names: list[str]


def split_source(pool: Pool, class_names: list[str]) -> Source:
    """A source of data without a test part: a stratified 80/20 split, the same in every run whatever its seed."""
    train, test = split(pool.labels, TEST_SHARE, numpy_rng(0, "data.split"))
    return Source(pool.part(train), pool.part(test), class_names)
