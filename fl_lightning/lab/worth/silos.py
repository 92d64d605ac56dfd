"""A silo, what is known of its gain, and all silos of a consortium."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fl_lightning.lab.worth import LINEAR
from fl_lightning.lab.worth.statistics import Estimate, Name, ScoredSamples, Scores, Verdict


@dataclass(frozen=True)
class SiloFacts:
    """The silos before anything is trained."""

    names: Sequence[str]
    sizes: Sequence[int]
    """Samples of each silo."""
    copies: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """For each sample, by its number: a group number that copies share; not an index."""
    kind: str = ""
    """What several samples may be of: `units`, `recordings`; empty: each stands for itself."""
    counts: Sequence[int] = ()
    """Units of each silo."""
    plain: Sequence[str] = ()
    """Plain models that suit the samples."""
    pools: bool = False
    """Whether the samples are few enough numbers for partial pooling."""
    rare: str = ""
    """Why the runs are judged by AUROC, unless a metric is named; empty: they are not."""
    notes: Sequence[str] = ()
    """What looks wrong."""


@dataclass
class Silo:
    """One silo's samples, and what each row's model made of them."""

    number: int
    name: str
    samples: ScoredSamples
    rows: dict[str, Scores]
    keys: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """(n,) numbers of `samples`."""
    shared: dict[int, int] = field(default_factory=dict)
    """By the number of another silo: how many samples it has, too; they are in no figure, and not
    in `samples`."""
    left_out: int = 0
    """Samples that are in no figure."""
    repeated: int = 0
    """Samples that the silo has more than once."""
    size: int = 0
    """Own samples, each once: those that are shared included, which `samples` lacks."""
    units: int = 0
    """Number of independent units (as recordings) of its samples; 0: each sample is one."""
    kind: str = "units"
    """What the units are called."""

    @property
    def independent(self) -> tuple[int, str]:
        """The sample size that intervals go by, and of what: (12, "recordings")."""
        return (self.units, self.kind) if self.units else (self.size, "samples")


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
    """Why the verdict is "cannot tell yet" whatever the interval says: too few samples, heavy
    errors, or a model trained alone that is as good; else empty."""
    margin: float
    """Differences below it do not matter."""
    alone_kind: str
    """What is best alone, over all folds."""
    sentence: str = ""
    methods: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Of each row `score`, `gain`, `low` and `high`, without regard to the choice among them."""

    @property
    def linear(self) -> float:
        """The score of the silo's own linear model; NaN where none was fitted."""
        return self.methods[LINEAR]["score"] if LINEAR in self.methods else math.nan


@dataclass
class Measured:
    """All silos, and what they have in common."""

    answers: list[Answer]
    metric: Name
    margin: float
    """Mean over silos."""
    method: str
    """Best over all folds: the one to take."""
    picks: Mapping[str, int]
    """How many folds chose each method."""
    cycles: int
    """0: a part of one."""
    consortium: dict[str, Any] = field(default_factory=dict)
