"""What every source of data hands over: a training and a test pool, read on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy import ndarray

from fl_lightning.configuration.config import DataConfig, check
from fl_lightning.configuration.tables import Absent as Absent
from fl_lightning.configuration.tables import at_root as at_root
from fl_lightning.data.columns import Columns, Preprocessing
from fl_lightning.data.sampling import split
from fl_lightning.data.units import by_unit
from fl_lightning.foundation import log
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.rng import numpy_rng

OPTIONAL_COLUMNS = ("groups", "spans", "units", "lines")
"""Of a pool, by sample, where the data have them."""
TEST_SHARE = 0.2
"""Test share of data that come without a test part."""


@dataclass(frozen=True)
class Setting:
    """The key of the configuration, and its value, that an error or a printed line is about."""

    key: str
    value: object

    def check(
        self,
        holds: bool,
        requirement: str,
    ) -> None:
        """Raise `BadInput` unless it `holds`."""
        check(self.key, self.value, holds, requirement)

    def error(self, requirement: str) -> BadInput:
        """Returns the error, to be raised."""
        return BadInput(self.key, self.value, requirement)

    def say(self, line: str) -> None:
        """Print a line."""
        log.say(f"{self.key} {self.value}: {line}")


@dataclass(frozen=True)
class SamplePool:
    """Labelled samples whose images are read only when they are used."""

    labels: ndarray
    """Class numbers from 0, int64 [n], or targets of a regression, float32 [n]; of texts also next
    tokens, int64 [n, T]."""
    read: Callable[[ndarray], ndarray]
    """Indices [m] to raw samples, uint8 or float32, [m, channels, height, width] or [m, features];
    tokens int64 [m, T]."""
    groups: ndarray | None = None
    """Number of each sample's group from 0, int64 [n], where the data have groups."""
    spans: ndarray | None = None
    """Of windows of recordings: number of the recording, first sample and the one after the last,
    int64 [n, 3]. Shares of them that are to be judged by are cut in time (data/windows.py)."""
    units: ndarray | None = None
    """Number of the person, specimen or document that each sample is of, int64 [n]: no unit lies in
    two parts of a split."""
    rows: ndarray | None = None
    """Which sample each one is, whatever the split, int64 [n]: its place in the pool that parts are
    taken of; None: its place in this one."""
    lines: ndarray | None = None
    """Number of each sample's row in the user's table, from 0, int64 [n]; None: there is none."""
    mark: Callable[[ndarray], Sequence[bytes]] | None = None
    """Indices [m] to what tells each sample from others, where reading all of them would take long
    (data/identity.py); None: they are told by what `read` gives."""

    @classmethod
    def of(
        cls,
        samples: ndarray,
        labels: ndarray,
    ) -> SamplePool:
        """A pool that lies in memory."""
        labels = labels if labels.dtype == np.float32 else labels.astype(np.int64)
        return cls(labels, lambda index: np.ascontiguousarray(samples[index]))

    @property
    def strata(self) -> ndarray:
        """What partitions deal by, int64 [n]: class numbers; targets and next tokens are all of one
        class."""
        are_targets = np.issubdtype(self.labels.dtype, np.floating)
        are_targets = are_targets or self.labels.ndim > 1
        return np.zeros(len(self.labels), np.int64) if are_targets else self.labels

    @property
    def numbers(self) -> ndarray:
        """Which sample each one is, whatever the split (`rows`), int64 [n]."""
        return np.arange(len(self.labels)) if self.rows is None else self.rows

    @property
    def independent(self) -> ndarray:
        """Number of what is independent: of the unit, the recording, or the sample; int64 [n]."""
        if self.units is not None:
            return self.units
        return self.numbers if self.spans is None else self.spans[:, 0]

    def part(self, index: ndarray) -> SamplePool:
        """The samples at `index` as a pool of their own."""
        columns = {}
        for name in OPTIONAL_COLUMNS:
            values = getattr(self, name)
            columns[name] = None if values is None else values[index]
        mark = self.mark
        return SamplePool(
            self.labels[index],
            lambda inner: self.read(index[inner]),
            rows=self.numbers[index],
            mark=None if mark is None else lambda inner: mark(index[inner]),
            **columns,
        )

    def read_all(self) -> ndarray:
        """All raw samples, [n, ...]."""
        return self.read(np.arange(len(self.labels)))

    def followed_by(self, other: SamplePool) -> SamplePool:
        """Returns one pool of the samples of both, those of `other` last."""
        size = len(self.labels)

        def read(index: ndarray) -> ndarray:
            is_first = index < size
            if is_first.all():
                return self.read(index)
            second = other.read(index[~is_first] - size)
            if not is_first.any():
                return second
            samples = np.empty((len(index), *second.shape[1:]), second.dtype)
            samples[is_first] = self.read(index[is_first])
            samples[~is_first] = second
            return samples

        first_mark = self.mark
        second_mark = other.mark

        def mark(index: ndarray) -> list[bytes]:
            marks: list[bytes] = []
            for place in index:
                if place < size:
                    marks += first_mark(np.array([place]))  # type: ignore[misc]
                else:
                    marks += second_mark(np.array([place - size]))  # type: ignore[misc]
            return marks

        columns = {}
        for name in OPTIONAL_COLUMNS:
            pair = getattr(self, name), getattr(other, name)
            is_absent = any(part is None for part in pair)
            columns[name] = None if is_absent else np.concatenate(pair)
        labels = np.concatenate([self.labels, other.labels])
        has_marks = first_mark is not None and second_mark is not None
        return SamplePool(
            labels,
            read,
            mark=mark if has_marks else None,
            **columns,
        )


@dataclass(frozen=True)
class Tokens:
    """How a text becomes token numbers."""

    names: list[str]
    """Of the tokens, by number."""
    length: int
    """Tokens of a sample."""
    keep: Literal["first", "last"] = "first"
    """What is kept of a longer text."""
    tokenizer: str | None = None
    """Of word pieces: the tokenizer as JSON; None: a token is a character."""


@dataclass(frozen=True)
class Reading:
    """How raw samples, as a user's file has them, become inputs of a model."""

    client_names: list[str] = field(default_factory=list)
    """Of all clients that the data were dealt to; empty: they have numbers alone."""
    columns: Columns | None = None
    """Of a table whose samples are features."""
    tokens: Tokens | None = None
    """Of texts."""
    preprocessing: Preprocessing | None = None
    """What has been fitted; its clients have the numbers that the data were dealt to."""
    digest: str | None = None
    """Of all that was read (data/identity.py); None: not all of it is here."""


@dataclass(frozen=True)
class Source:
    """A data set: its two pools and the names of its classes, and of its groups where it has any.

    Loaders without `test` do not read the test part: the training pool takes its place.
    """

    train: SamplePool
    test: SamplePool
    class_names: list[str]
    group_names: list[str] = field(default_factory=list)
    domains: list[int] | None = None
    """Number of each group's domain, where several groups share one."""
    vocabulary: int = 0
    """Different tokens, where the samples are texts: token numbers, int64 [n, length]; 0: they are
    no texts."""
    reading: Reading = field(default_factory=Reading)
    """How raw samples become inputs."""


@dataclass(frozen=True)
class HeldOut:
    """A client that takes no part."""

    number: int
    """Among all that the data were dealt to."""
    train: ndarray
    """Indices into the training samples, as `validation`."""
    validation: ndarray
    test: ndarray
    """Indices into the test samples."""
    angle: float


def source_of(
    data: DataConfig,
    train: SamplePool,
    test: SamplePool | None,
    class_names: list[str],
    group_names: Sequence[str] = (),
) -> Source:
    """A source; without a `test` part 80/20 of `train`, stratified by group, else by class
    (`data.split_seed`)."""
    if test is None:
        strata = train.strata if train.groups is None else train.groups
        rng = numpy_rng(data.split_seed, "data.split")
        if train.units is None:
            parts = split(strata, TEST_SHARE, rng)
        else:
            parts = by_unit(train.units, strata, TEST_SHARE, rng)
        train, test = (replace(train.part(part), rows=None) for part in parts)
    return Source(
        train,
        test,
        class_names,
        list(group_names),
    )
