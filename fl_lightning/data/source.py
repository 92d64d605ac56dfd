"""Results of every data source: a training and a test pool, whose samples are read on demand."""

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
"""Arrays by sample that a pool may have."""
TEST_SHARE = 0.2
"""Share of the samples that becomes the test part of data without one."""


@dataclass(frozen=True)
class Setting:
    """A configuration key and its value, which errors and printed lines name."""

    key: str
    value: object

    def check(
        self,
        holds: bool,
        requirement: str,
    ) -> None:
        """Raise `BadInput` with the text `requirement`, unless `holds`."""
        check(self.key, self.value, holds, requirement)

    def error(self, requirement: str) -> BadInput:
        """Return the error that names key and value."""
        return BadInput(self.key, self.value, requirement)

    def say(self, line: str) -> None:
        """Print a line that names key and value."""
        log.say(f"{self.key} {self.value}: {line}")


@dataclass(frozen=True)
class SamplePool:
    """Labelled samples that are read when they are used."""

    labels: ndarray
    """Class numbers from 0, int64 [n]; targets of a regression, float32 [n]; or next tokens of
    texts, int64 [n, T]."""
    read: Callable[[ndarray], ndarray]
    """Function from indices [m] to raw samples: uint8 or float32, [m, channels, height, width] or
    [m, features]; or tokens, int64 [m, T]."""
    groups: ndarray | None = None
    """Natural group of each sample, from 0, int64 [n]."""
    spans: ndarray | None = None
    """For windows of recordings: number of the recording, first sample, and the one after the last,
    int64 [n, 3]. Windows are split in time (data/windows.py)."""
    units: ndarray | None = None
    """Unit (person, specimen, document) of each sample, int64 [n]; no unit lies in two parts of a
    split."""
    rows: ndarray | None = None
    """Identity of each sample, whatever the split, int64 [n]: its index in the pool that this part
    was taken from; None: its index in this pool."""
    lines: ndarray | None = None
    """Row of each sample in the user's table, from 0, int64 [n]; None: the data are no table."""
    mark: Callable[[ndarray], Sequence[bytes]] | None = None
    """Function from indices [m] to bytes that identify each sample, if reading all samples takes
    long (data/identity.py); None: the samples themselves identify them."""

    @classmethod
    def of(
        cls,
        samples: ndarray,
        labels: ndarray,
    ) -> SamplePool:
        """Build a pool of samples in memory."""
        labels = labels if labels.dtype == np.float32 else labels.astype(np.int64)
        return cls(labels, lambda index: np.ascontiguousarray(samples[index]))

    @property
    def strata(self) -> ndarray:
        """The class of each sample, by which splits are stratified, int64 [n]; 0 for all samples
        whose labels are regression targets or next tokens."""
        are_targets = np.issubdtype(self.labels.dtype, np.floating)
        are_targets = are_targets or self.labels.ndim > 1
        return np.zeros(len(self.labels), np.int64) if are_targets else self.labels

    @property
    def sample_ids(self) -> ndarray:
        """A number that identifies each sample in every split, int64 [n]: `rows`, or, if they are
        None, the samples' indices in this pool."""
        return np.arange(len(self.labels)) if self.rows is None else self.rows

    @property
    def unit_ids(self) -> ndarray:
        """Number of the independent unit of each sample, int64 [n]: its unit, else its recording,
        else the sample itself."""
        if self.units is not None:
            return self.units
        return self.sample_ids if self.spans is None else self.spans[:, 0]

    def part(self, index: ndarray) -> SamplePool:
        """Return the samples at `index` as a pool."""
        columns = {}
        for name in OPTIONAL_COLUMNS:
            values = getattr(self, name)
            columns[name] = None if values is None else values[index]
        mark = self.mark
        return SamplePool(
            self.labels[index],
            lambda inner: self.read(index[inner]),
            rows=self.sample_ids[index],
            mark=None if mark is None else lambda inner: mark(index[inner]),
            **columns,
        )

    def read_all(self) -> ndarray:
        """Read all raw samples, [n, ...]."""
        return self.read(np.arange(len(self.labels)))

    def followed_by(self, other: SamplePool) -> SamplePool:
        """Join two pools into one, the samples of `other` last."""
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
    """How texts are converted into token numbers."""

    names: list[str]
    """Name of each token, by number."""
    length: int
    """Number of tokens of a sample."""
    keep: Literal["first", "last"] = "first"
    """End of a longer text that is kept."""
    tokenizer: str | None = None
    """Tokenizer of word pieces, as JSON; None if each character is a token."""


@dataclass(frozen=True)
class Reading:
    """The conversion of samples in the user's file into a model's inputs, and the clients'
    names."""

    client_names: list[str] = field(default_factory=list)
    """Names of all clients, including held-out ones; empty if clients have only numbers."""
    columns: Columns | None = None
    """Columns of a table whose samples are features."""
    tokens: Tokens | None = None
    """Conversion of texts."""
    preprocessing: Preprocessing | None = None
    """Fitted imputer and scaler; clients have their numbers among all, including held-out ones."""
    digest: str | None = None
    """Digest of all samples (data/identity.py); None unless every seed reads the same samples
    (`identity.is_seed_independent`)."""


@dataclass(frozen=True)
class Source:
    """A data set: its training and test pools, the names of its classes, and those of its groups if
    it has any.

    If the test part is not to be read (`data.reads_test`), `test` is the training pool.
    """

    train: SamplePool
    test: SamplePool
    class_names: list[str]
    group_names: list[str] = field(default_factory=list)
    domains: list[int] | None = None
    """Domain of each group, if several groups share one."""
    vocabulary: int = 0
    """Number of different tokens, if the samples are texts (int64 [n, length]); 0 for other
    samples."""
    reading: Reading = field(default_factory=Reading)
    """How raw samples become inputs."""


@dataclass(frozen=True)
class HeldOut:
    """A client that takes no part in the run: its number, the indices of its samples, and the
    degrees by which its images are rotated (`angle`)."""

    number: int
    """Number of the client among all, including held-out ones."""
    train: ndarray
    """Indices into the training samples, as are those of `validation`."""
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
    """Build a source. Without a `test` pool a fifth of `train` becomes the test part, drawn from
    `data.test_seed`, stratified by group, or by class without groups."""
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
