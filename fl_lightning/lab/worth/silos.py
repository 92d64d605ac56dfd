"""Classes for a silo, its gain, and the consortium of all silos."""

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
    """Names, sizes and samples of all silos, known before anything is trained."""

    names: Sequence[str]
    sizes: Sequence[int]
    """Number of samples of each silo."""
    copies: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """For each sample of the data set, a number that it shares with its copies only."""
    kind: str = ""
    """Name of the groups of dependent samples, "units" or "recordings"; empty: all samples are
    independent."""
    counts: Sequence[int] = ()
    """Number of such groups in each silo; empty: all samples are independent."""
    plain: Sequence[str] = ()
    """Names of the plain models that suit the samples."""
    pools: bool = False
    """Whether samples have few enough features for the method `partialpooling`."""
    rare: str = ""
    """Note that classes are so uneven that AUROC is the default metric; empty: they are not."""
    notes: Sequence[str] = ()
    """Warnings about the data."""


@dataclass
class Silo:
    """One silo's samples, and the scores of each row on them."""

    number: int
    name: str
    samples: ScoredSamples
    rows: dict[str, Scores]
    keys: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """(n,) numbers of `samples` in the data set."""
    shared: dict[int, int] = field(default_factory=dict)
    """By number of another silo, how many samples both have: `samples` and results lack them."""
    left_out: int = 0
    """Number of samples left out because another silo has them, too."""
    repeated: int = 0
    """Number of samples that the silo has more than once."""
    size: int = 0
    """Number of different samples, with those that were left out."""
    units: int = 0
    """Number of groups of dependent samples (such as recordings); 0: all are independent."""
    kind: str = "units"
    """Name of these groups."""

    @property
    def independent(self) -> tuple[int, str]:
        """Sample size on which the interval depends, and its unit, such as (12, "recordings")."""
        return (self.units, self.kind) if self.units else (self.size, "samples")


@dataclass
class Answer:
    """Result for one silo: its score alone and federated, the gain with its interval, and the
    verdict."""

    silo: Silo
    alone: float
    federated: float
    estimate: Estimate | None
    low: float
    high: float
    verdict: Verdict
    reason: str
    """Reason for "cannot tell yet" other than the interval (too few samples, a few large errors, or
    a row trained alone that is as good); empty: none."""
    margin: float
    """Size of a gain that does not matter."""
    alone_kind: str
    """Name of the row of `ALONE` that is best over all folds."""
    sentence: str = ""
    methods: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """`score`, `gain`, `low` and `high` of each row, not corrected for choosing among rows."""

    @property
    def linear(self) -> float:
        """Score of the silo's own linear model; NaN if none was fitted."""
        return self.methods[LINEAR]["score"] if LINEAR in self.methods else math.nan


@dataclass
class Measured:
    """The results of a call of `worth`: of each silo, and of the consortium of all silos."""

    answers: list[Answer]
    metric: Name
    margin: float
    """Mean of the silos' margins."""
    method: str
    """Name of the row that is best over all silos and folds, which is recommended."""
    picks: Mapping[str, int]
    """Number of folds for which each row was chosen."""
    cycles: int
    """Number of complete cycles; 0: only some folds of the first cycle are complete."""
    consortium: dict[str, Any] = field(default_factory=dict)
    """Part of `worth.json` about all silos together."""
