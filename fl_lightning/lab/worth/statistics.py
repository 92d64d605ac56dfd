"""Gain of one silo over training alone: numbers in, numbers out. Which interval and why:
docs/decisions/0027.

Each cycle of folds tests every sample of the silo once, so a model's scores are (C, n): C cycles, n
samples. What is independent are the samples (or units: recordings, persons), not the cycles. A
*contribution* is what one tested sample adds to the metric; the sum over a cycle's samples, times
`Metric.share`, is the metric.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats
from scipy.special import softmax

Name = Literal["accuracy", "balanced_accuracy", "auroc", "mae"]
Verdict = Literal["gains", "harmed", "no difference that matters", "cannot tell yet"]
WIDER = 1.1
"""Factor of every half-width. No resample of a silo shows how much its training set itself owes to
chance; this pays for it (simulated: docs/decisions/0027)."""
LEVEL = 0.05
"""1 - LEVEL is the level of the intervals; the field's custom."""
LEAST, LEAST_OF_CLASS = 40, {"accuracy": 10, "balanced_accuracy": 10, "auroc": 20, "mae": 0}
"""Samples of a silo, and of the class that has fewer, below which there is no verdict (simulated
sizes: 20 and 60)."""
LEAST_UNITS = 10
"""Persons or recordings of a silo that has several samples of each, below which there is no
verdict. Ours: intervals over 5 to 20 recordings cover 94 to 98 % (simulated:
docs/decisions/0027), but not what so few of them owe to chance in training."""
HEAVY = 0.2
"""Share of the variance that one of 40 or more samples or units makes up, above which errors have a
heavy tail, and an interval holds for these samples alone. Ours: of 40 normal errors it is above 0.2
in 16 %, of errors with two degrees of freedom in 78 % (simulated: docs/decisions/0027)."""
CAREFUL = 1.4
"""Factor of the half-width that is foretold for more samples: 95 of 100 are narrower
(docs/decisions/0027)."""
MADE_UP = 0.5
"""Samples that are added to each class and differ between the models: no interval has the width
0."""


@dataclass(frozen=True)
class Scores:
    """What one model made of a silo's samples, cycle by cycle.

    Args:
        right: (C, n) share of right answers (classification) or absolute error (regression).
        outputs: (C, n, classes) class scores, where they are needed (AUROC).
    """

    right: np.ndarray
    outputs: np.ndarray | None = None


@dataclass(frozen=True)
class Samples:
    """The samples of a silo that count.

    Args:
        labels: (n,) class numbers; of a regression all 0.
        folds: (C, n) the fold that tested each sample in each cycle.
        units: (n,) what is independent: numbers of samples, or of the recordings or persons they
            are of.
    """

    labels: np.ndarray
    folds: np.ndarray
    units: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Estimate:
    """A gain and how well it is known."""

    gain: float
    variance: float
    degrees: float
    common: float
    """The part of the variance that all samples of a fit have in common: what fits owe to luck."""
    fits: int
    by_cycles: float
    """B of variance(C') = variance - B (1 / C - 1 / C')."""
    cycles: int

    @property
    def half(self) -> float:
        """Half of the width of the interval."""
        return float(WIDER * stats.t.ppf(1 - LEVEL / 2, self.degrees) * math.sqrt(self.variance))

    @property
    def between(self) -> float:
        """Standard deviation between trainings: what one training owes to the luck of its fit."""
        return math.sqrt(self.common * self.fits)

    def half_after(self, cycles: int) -> float:
        """The same after as many cycles in all, about; at least what is left where all of it is
        luck of fits."""
        variance = self.variance - self.by_cycles * (1 / self.cycles - 1 / cycles)
        return self.half * math.sqrt(max(variance / self.variance, self.cycles / cycles))

    def samples_for(self, samples: int, half_width: float) -> int | None:
        """How many own samples, or recordings, would bring `half_width` in 95 of 100 cases, rounded
        up.

        More samples leave the luck of fits as it is: `common`. None: no number of samples would do.
        `samples` where the half-width is reached already.

        Args:
            samples: that the silo has.
            half_width: of the interval.
        """
        if half_width >= self.half:
            return samples
        allowed = self.variance * (half_width / (CAREFUL * self.half)) ** 2
        if allowed <= self.common:
            return None
        exact = samples * (self.variance - self.common) / (allowed - self.common)
        step = 10 ** max(0, math.floor(math.log10(exact)) - 1)
        return math.ceil(exact / step) * step

    @property
    def p_of_no_gain(self) -> float:
        """One-sided p of the hypothesis that there is no gain."""
        return float(stats.t.sf(self.gain / (WIDER * math.sqrt(self.variance)), self.degrees))


# ---------------------------------------------------------------- metrics as sums over samples


def contributions(metric: Name, scores: Scores, samples: Samples) -> np.ndarray:
    """What each tested sample adds to the metric, (C, n); NaN where it is not defined. More is
    better.

    Accuracy and mae are means over samples, balanced accuracy is the mean over classes of such.
    AUROC (one against the rest, mean over classes; of two classes that of the second) is made of
    placements within a fold, since scores of two models cannot be ranked together: of a positive
    the share of negatives below it, of a negative the share of positives above it (DeLong et al.,
    1988). Both sum up to the AUROC, so contributions sum up to twice that.
    """
    n = len(samples)
    if metric == "mae":
        return -scores.right / n
    if metric == "accuracy":
        return scores.right / n
    classes, counts = np.unique(samples.labels, return_counts=True)
    if metric == "balanced_accuracy":
        weight = 1 / (counts[np.searchsorted(classes, samples.labels)] * len(classes))
        return scores.right * weight
    return _auroc(scores, samples, classes, counts)


def share(metric: Name) -> float:
    """What the sum of a cycle's contributions is multiplied by: `contributions`."""
    return 0.5 if metric == "auroc" else 1.0


def _auroc(scores: Scores, samples: Samples, classes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    assert scores.outputs is not None
    labels, n = samples.labels, len(samples)
    if len(classes) < 2:
        return np.full(samples.folds.shape, np.nan)
    chances = softmax(scores.outputs.astype(np.float64), axis=-1)
    ones = classes if len(classes) > 2 else classes[1:]
    total = np.zeros(samples.folds.shape)
    for cycle, folds in enumerate(samples.folds):
        for k in ones:
            size = int(counts[np.searchsorted(classes, k)])
            for fold in np.unique(folds):
                here = np.flatnonzero(folds == fold)
                positive, negative = here[labels[here] == k], here[labels[here] != k]
                if not len(positive) or not len(negative):
                    total[cycle, here] = np.nan
                    continue
                above = (
                    np.sign(chances[cycle, positive, k][:, None] - chances[cycle, negative, k]) / 2
                    + 0.5
                )
                total[cycle, positive] += above.mean(1) / (size * len(ones))
                total[cycle, negative] += above.mean(0) / ((n - size) * len(ones))
    return total


def value(metric: Name, parts: np.ndarray) -> float:
    """The metric of these `contributions`, mean over cycles; of mae the error itself. NaN where it
    is not defined."""
    with np.errstate(invalid="ignore"):
        total = float(share(metric) * _over_cycles(parts).sum())
    return -total if metric == "mae" else total


def by_merit(metric: Name, parts: np.ndarray) -> float:
    """The metric of these `contributions`, greater where it is better."""
    value_of = value(metric, parts)
    return -value_of if metric == "mae" else value_of


def by_fold(metric: Name, scores: Scores, samples: Samples) -> np.ndarray:
    """The metric (more is better) on each fold of each cycle, (C, folds); NaN where it is not
    defined."""
    table = np.full((len(samples.folds), int(samples.folds.max()) + 1), np.nan)
    for cycle, folds in enumerate(samples.folds):
        for fold in np.unique(folds):
            here = folds == fold
            part = Samples(
                samples.labels[here], np.zeros((1, int(here.sum())), np.int64), samples.units[here]
            )
            outputs = None if scores.outputs is None else scores.outputs[cycle : cycle + 1, here]
            only = Scores(scores.right[cycle : cycle + 1, here], outputs)
            table[cycle, fold] = share(metric) * contributions(metric, only, part).sum()
    return table


# ---------------------------------------------------------------- one silo


def estimate(
    metric: Name, alone: np.ndarray, federated: np.ndarray, samples: Samples
) -> Estimate | None:
    """The gain of `federated` over `alone`, both `contributions`; None where the metric is not
    defined.

    The variance is V_s + a + V_x: V_s that of the mean over units of what their samples contribute,
    class by class; a what `MADE_UP` samples would add; V_x that of fits, as far as it exceeds what
    their samples explain. Satterthwaite gives the degrees of freedom.
    """
    difference = federated - alone
    if np.isnan(_over_cycles(difference)).any() or len(samples) < 2:
        return None
    cycles = len(difference)
    variance, degrees, common = _variance(metric, difference, samples)
    single = [
        _variance(
            metric,
            difference[c : c + 1],
            Samples(samples.labels, samples.folds[c : c + 1], samples.units),
        )[0]
        for c in range(cycles)
    ]
    slope = max(0.0, (float(np.mean(single)) - variance) / (1 - 1 / cycles)) if cycles > 1 else 0.0
    fits = sum(len(np.unique(folds)) for folds in samples.folds)
    gain = float(share(metric) * _over_cycles(difference).sum())
    return Estimate(gain, variance, degrees, common, fits, slope, cycles)


def _variance(metric: Name, difference: np.ndarray, samples: Samples) -> tuple[float, float, float]:
    """Variance of the gain, its degrees of freedom, and the part of it that all samples of a fit
    have in common."""
    strata = np.zeros(len(samples), np.int64) if metric in ("accuracy", "mae") else samples.labels
    cycles = len(difference)
    kinds, stratum = np.unique(strata, return_inverse=True)
    _, unit = np.unique(samples.units, return_inverse=True)
    missing = np.isnan(difference)
    mean = _over_cycles(difference)
    centre = np.bincount(stratum, mean) / np.bincount(stratum)
    each = np.where(missing, 0.0, difference - centre[stratum])
    sampled, below = 0.0, 0.0
    for k in range(len(kinds)):
        own = stratum == k
        sums = np.bincount(unit[own], mean[own] - centre[k])
        count = len(np.unique(unit[own]))
        factor = count / max(count - 1, 1)
        part = factor * float(np.square(sums).sum())
        # a recording alone tells nothing: the whole of it might differ
        made_up = int(own.sum()) if count == 1 else 1
        part += MADE_UP * factor * (made_up * _largest(metric, difference, samples, own)) ** 2
        sampled += part
        below += part**2 / max(count - 1, 1)
    fits, within = 0.0, 0.0
    for cycle in range(cycles):
        # contributions to AUROC sum up to twice a fit's
        by_fold = share(metric) * np.bincount(samples.folds[cycle], each[cycle])
        fits += float(np.square(by_fold).sum())
        pairs = samples.folds[cycle] * (int(unit.max()) + 1) + unit
        within += float(np.square(np.bincount(pairs, each[cycle])).sum())
    common = max(0.0, (fits - within) / cycles**2)
    number = sum(len(np.unique(folds)) for folds in samples.folds)
    variance = sampled + common
    return variance, variance**2 / (below + common**2 / max(number - 1, 1)), common


def _largest(metric: Name, difference: np.ndarray, samples: Samples, own: np.ndarray) -> float:
    """What one sample of a class, `own` (n,), can contribute to the difference; of errors and
    placements, which are hardly ever that far apart, the most that was seen."""
    if metric in ("mae", "auroc"):
        # equal models: hardly any width, but one
        least = 1e-12 if metric == "mae" else 1 / (int(own.sum()) * len(samples))
        return max(float(np.nanmax(np.abs(difference[:, own]))), least)
    if metric == "accuracy":
        return 1 / len(samples)
    return 1 / (int(own.sum()) * len(np.unique(samples.labels)))


def _over_cycles(parts: np.ndarray) -> np.ndarray:
    """Mean over the cycles that have a value, (n,); NaN without any."""
    there = ~np.isnan(parts)
    with np.errstate(invalid="ignore"):
        mean: np.ndarray = np.where(there, parts, 0.0).sum(0) / there.sum(0)
    return mean


def heavy(parts: np.ndarray, samples: Samples, share: float = HEAVY) -> bool:
    """Whether a sample or unit makes up more than this share of the variance of `parts` (C, n)."""
    mean = _over_cycles(parts)
    unit = np.unique(samples.units, return_inverse=True)[1]
    sums = np.square(np.bincount(unit, mean - mean.mean()))
    most = share * max(1.0, LEAST / len(sums))
    return bool(sums.max() > most * sums.sum() > 0)


def too_few(
    metric: Name, labels: np.ndarray, size: int | None = None, units: int = 0, kind: str = "units"
) -> str:
    """Why a silo with these labels gets no verdict; empty where it does.

    Of accuracy the class that has fewer is all but the largest; of metrics by class the smallest.

    Args:
        metric: that gains are of.
        labels: (n,) class numbers.
        size: number of samples, where some are tested repeatedly.
        units: that the samples are of; 0: each stands for itself.
        kind: what these are called.
    """
    n, least = size or len(labels), LEAST_OF_CLASS[metric]
    _, counts = np.unique(labels, return_counts=True)
    if n < LEAST:
        return f"it has {n} samples, and a verdict takes {LEAST}"
    if 0 < units < LEAST_UNITS:
        return f"its {n} samples are of {units} {kind}, and a verdict takes {LEAST_UNITS}"
    if metric != "mae" and len(counts) == 1:
        return "all its samples are of one class"
    rare = n - int(counts.max()) if metric == "accuracy" else int(counts.min())
    if rare < least:
        where = "outside its largest class" if metric == "accuracy" else "of its smallest class"
        return f"it has {rare} samples {where}, and a verdict takes {least}"
    return ""


def verdict(low: float, high: float, margin: float) -> Verdict:
    """What an interval says. The margin comes first, or large silos would gain a tenth of a
    point."""
    if -margin < low and high < margin:
        return "no difference that matters"
    return "gains" if low > 0 else "harmed" if high < 0 else "cannot tell yet"


# --------------------------------------------------------- choice of the method, and the consortium


def chosen(tables: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, int]:
    """The method for each fold of each cycle, (C, folds), and the one that is best over all folds.

    A fold's method is chosen by the *other* folds of its cycle, for all silos at once: the winner
    is never scored where it won. A silo without a value there has no vote.

    Args:
        tables: (methods, silos, C, folds) of `by_fold`.
        sizes: (silos, C, folds) tested samples.
    """
    methods, _, cycles, folds = tables.shape
    picks = np.zeros((cycles, folds), np.int64)
    for cycle in range(cycles):
        for fold in range(folds):
            others = np.arange(folds) != fold
            picks[cycle, fold] = _best(tables[:, :, cycle, others], sizes[:, cycle, others])
    return picks, _best(tables.reshape(methods, len(sizes), -1), sizes.reshape(len(sizes), -1))


def _best(tables: np.ndarray, sizes: np.ndarray) -> int:
    """The method with the best mean over silos of means over folds; the first of equal ones."""
    there = ~np.isnan(tables)
    weights = np.where(there, sizes, 0.0)
    sums, totals = (np.where(there, tables, 0.0) * weights).sum(-1), weights.sum(-1)
    votes = (totals > 0).all(0)
    return int(np.argmax((sums[:, votes] / totals[:, votes]).mean(1))) if votes.any() else 0


def mean_gain(estimates: Sequence[Estimate]) -> tuple[float, float, float]:
    """Mean over silos, and its interval. Errors of silos of one federation are hardly correlated
    (simulated)."""
    gain = float(np.mean([one.gain for one in estimates]))
    half = (
        WIDER
        * stats.norm.ppf(1 - LEVEL / 2)
        * math.sqrt(sum(one.variance for one in estimates))
        / len(estimates)
    )
    return gain, gain - float(half), gain + float(half)


def of_new_silos(gains: Sequence[float]) -> tuple[float, float] | None:
    """Interval of the mean gain of silos that are drawn as these were, by Student's t; None of
    fewer than three."""
    if len(gains) < 3:
        return None
    half = float(stats.t.ppf(1 - LEVEL / 2, len(gains) - 1) * stats.sem(gains))
    return float(np.mean(gains)) - half, float(np.mean(gains)) + half
