"""A silo, what is known of its gain, and all silos of a consortium."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fl_lightning.lab.worth.statistics import Estimate, Name, Samples, Scores, Verdict


@dataclass(frozen=True)
class Training:
    """Steps of each silo in one training, and the silos whose loss still falls when training alone
    ends."""

    alone: dict[str, int]
    federated: dict[str, int | None]
    """None where the operations of its runs could not be counted, from which its steps follow."""
    falling: list[str]


@dataclass(frozen=True)
class Facts:
    """The silos before anything is trained."""

    names: Sequence[str]
    sizes: Sequence[int]
    """In samples."""
    recordings: Mapping[int, int] = field(default_factory=dict)
    """Of windows, by fingerprint: those of one recording are no independent samples."""
    counts: Sequence[int] = ()
    """Recordings of each silo, where samples are windows."""


@dataclass
class Silo:
    """One silo's samples, and what each row's model made of them."""

    number: int
    name: str
    samples: Samples
    rows: dict[str, Scores]
    keys: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    """(n,) fingerprints of the content of `samples`."""
    shared: dict[int, int] = field(default_factory=dict)
    """Samples that another silo has, too, by its number; they are in no figure, and not in
    `samples`."""
    left_out: int = 0
    """Samples that are in no figure."""
    repeated: int = 0
    """Samples that the silo has more than once."""
    size: int = 0
    """Own samples, those that are shared included."""
    recordings: int = 0
    """Recordings that its samples are windows of: what is independent. 0: they are no windows."""

    @property
    def independent(self) -> tuple[int, str]:
        """How many of them intervals count, and what these are."""
        return (self.recordings, "recordings") if self.recordings else (self.size, "samples")


@dataclass
class Answer:
    """One silo: everything that is known of what it gains."""

    silo: Silo
    alone: float
    federated: float
    estimate: Estimate | None
    low: float
    high: float
    verdict: Verdict
    reason: str
    """Why there can be no verdict; empty where there can."""
    sentence: str = ""
    methods: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of each row `score`, `gain`, `low` and `high`, without regard to the choice among them."""


@dataclass
class Measured:
    """All silos, and what they have in common."""

    answers: list[Answer]
    metric: Name
    margin: float
    method: str
    """Best over all folds: the one to take."""
    picks: dict[str, int]
    """How many folds chose each method."""
    cycles: int
    consortium: dict[str, Any] = field(default_factory=dict)
    training: Training | None = None
    """How long the silos have trained."""
