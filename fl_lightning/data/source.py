"""What every source of data hands over: a training and a test pool, read on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from fl_lightning.configuration.config import DataConfig, check
from fl_lightning.configuration.tables import Absent as Absent
from fl_lightning.configuration.tables import at_root as at_root
from fl_lightning.data.columns import Columns, Preprocessing
from fl_lightning.data.sampling import split
from fl_lightning.data.units import by_unit
from fl_lightning.foundation.rng import numpy_rng

TEST_SHARE = 0.2
"""Test share of data that come without a test part."""


@dataclass(frozen=True)
class Pool:
    """Labelled samples whose images are read only when they are used."""

    labels: np.ndarray
    """Class numbers from 0, int64 [n], or targets of a regression, float32 [n]; of texts also next
    tokens, int64 [n, T]."""
    read: Callable[[np.ndarray], np.ndarray]
    """Indices [m] to raw samples, uint8 or float32, [m, channels, height, width] or [m, features];
    tokens int64 [m, T]."""
    groups: np.ndarray | None = None
    """Number of each sample's group from 0, int64 [n], where the data have groups."""
    spans: np.ndarray | None = None
    """Of windows of recordings: number of the recording, first sample and the one after the last,
    int64 [n, 3]. Shares of them that are to be judged by are cut in time (data/windows.py)."""
    units: np.ndarray | None = None
    """Number of the person, specimen or document that each sample is of, int64 [n]: no unit lies in
    two parts of a split."""
    rows: np.ndarray | None = None
    """Number of each sample, int64 [n]: its place in the pool that parts are taken of; None: its
    place in this one."""
    lines: np.ndarray | None = None
    """Number of each sample's row in the user's table, from 0, int64 [n]; None: there is none."""
    mark: Callable[[np.ndarray], Sequence[bytes]] | None = None
    """Indices [m] to what tells each sample from others, where reading all of them would take long
    (data/identity.py); None: they are told by what `read` gives."""

    @classmethod
    def of(
        cls,
        samples: np.ndarray,
        labels: np.ndarray,
    ) -> Pool:
        """A pool that lies in memory."""
        labels = labels if labels.dtype == np.float32 else labels.astype(np.int64)
        return cls(labels, lambda index: np.ascontiguousarray(samples[index]))

    @property
    def strata(self) -> np.ndarray:
        """What partitions deal by, int64 [n]: class numbers; targets and next tokens are all of one
        class."""
        targets = np.issubdtype(self.labels.dtype, np.floating) or self.labels.ndim > 1
        return np.zeros(len(self.labels), np.int64) if targets else self.labels

    @property
    def numbers(self) -> np.ndarray:
        """`rows`, int64 [n]."""
        return np.arange(len(self.labels)) if self.rows is None else self.rows

    @property
    def independent(self) -> np.ndarray:
        """Number of what is independent: of the unit, the recording, or the sample; int64 [n]."""
        if self.units is not None:
            return self.units
        return self.numbers if self.spans is None else self.spans[:, 0]

    def part(self, index: np.ndarray) -> Pool:
        """The samples at `index` as a pool of their own."""
        own_mark = self.mark
        return Pool(
            self.labels[index],
            lambda inner: self.read(index[inner]),
            None if self.groups is None else self.groups[index],
            None if self.spans is None else self.spans[index],
            None if self.units is None else self.units[index],
            self.numbers[index],
            None if self.lines is None else self.lines[index],
            None if own_mark is None else lambda inner: own_mark(index[inner]),
        )

    def read_all(self) -> np.ndarray:
        """All raw samples, [n, ...]."""
        return self.read(np.arange(len(self.labels)))

    def beside(self, other: Pool) -> Pool:
        """The samples of both, those of `other` behind."""

        def read(index: np.ndarray) -> np.ndarray:
            ours = index < len(self.labels)
            if ours.all() or not ours.any():
                return self.read(index) if ours.all() else other.read(index - len(self.labels))
            first = self.read(index[ours])
            second = other.read(index[~ours] - len(self.labels))
            samples = np.empty((len(index), *first.shape[1:]), first.dtype)
            samples[ours] = first
            samples[~ours] = second
            return samples

        marks = self.mark, other.mark

        def mark(index: np.ndarray) -> list[bytes]:
            ours = index < len(self.labels)
            places = np.where(ours, index, index - len(self.labels))
            each = zip(
                places,
                np.where(ours, 0, 1).tolist(),
                strict=True,
            )
            return [marks[number](np.array([place]))[0] for place, number in each]  # type: ignore[misc]

        ours = self.groups, self.spans, self.units, self.lines
        theirs = other.groups, other.spans, other.units, other.lines
        groups, spans, units, lines = (
            None if a is None or b is None else np.concatenate([a, b])
            for a, b in zip(ours, theirs, strict=True)
        )
        return Pool(
            np.concatenate([self.labels, other.labels]),
            read,
            groups,
            spans,
            units,
            lines=lines,
            mark=None if None in marks else mark,
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

    train: Pool
    test: Pool
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
    train: np.ndarray
    """Indices into the training samples, as `validation`."""
    validation: np.ndarray
    test: np.ndarray
    """Indices into the test samples."""
    angle: float


def check_class_names(
    key: str,
    value: object,
    names: list[object],
    classes: int,
) -> None:
    """Raise `BadInput` for `key` unless `names` are different texts, one for each class."""
    other = next((name for name in names if not isinstance(name, str)), None)
    check(
        key,
        value,
        other is None,
        f"the class name {other!r} is no text: class_names must hold texts",
    )
    check(
        key,
        value,
        len(names) >= classes,
        f"class_names has {len(names)} names for {classes} classes",
    )
    check(
        key,
        value,
        len({*names}) == len(names),
        "class_names has a name twice",
    )


def source_of(
    data: DataConfig,
    train: Pool,
    test: Pool | None,
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
    return Source(train, test, class_names, list(group_names))
