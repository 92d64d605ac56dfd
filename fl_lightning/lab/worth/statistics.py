"""Gain of one silo over training alone: numbers in, numbers out. Which interval and why:
docs/decisions/0027.

Each cycle of folds tests every sample of the silo once, so a model's scores are (C, n): C cycles, n
samples. What is independent are the samples (or units: recordings, persons), not the cycles. A
*contribution* is what one tested sample adds to the metric; the sum over a cycle's samples, times
`share`, is the metric.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import stats
from scipy.special import softmax

from fl_lightning.lab.statistics import LEVEL

Name = Literal["accuracy", "balanced_accuracy", "auroc", "mae"]
Array = np.ndarray
Verdict = Literal["gains", "harmed", "no difference that matters", "cannot tell yet"]
WIDER = 1.1
"""Factor of every half-width. No resample of a silo shows how much its training set itself owes to
chance; this pays for it (simulated: docs/decisions/0027)."""
LEAST, LEAST_OF_CLASS = (
    40,
    {
        "accuracy": 10,
        "balanced_accuracy": 10,
        "auroc": 20,
        "mae": 0,
    },
)
"""Samples of a silo, and of the class that has fewer, below which there is no verdict (simulated
sizes: 20 and 60)."""
LEAST_UNITS = 10
"""Persons or recordings of a silo that has several samples of each, below which there is no
verdict. Ours: intervals over 5 to 20 recordings cover 94 to 98 % (simulated:
docs/decisions/0027), but not what so few of them owe to chance in training."""
HEAVY = 0.2
"""Share of the variance that one of `LEAST` samples or units makes up, above which errors have a
heavy tail, and an interval holds for these samples alone. Ours: of 40 normal errors it is above 0.2
in 15 %, of errors with two degrees of freedom in 85 % (simulated: docs/decisions/0027)."""
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

    right: Array
    outputs: Array | None = None

    def part(self, cycles: Any, samples: Any) -> Scores:
        """Those of some cycles and samples, by index."""
        outputs = None if self.outputs is None else self.outputs[cycles][:, samples]
        return Scores(self.right[cycles][:, samples], outputs)


@dataclass(frozen=True)
class ScoredSamples:
    """The samples of a silo that count.

    Args:
        labels: (n,) class numbers; of a regression all 0.
        folds: (C, n) the fold that tested each sample in each cycle.
        units: (n,) what is independent: numbers of samples, or of the recordings or persons they
            are of.
    """

    labels: Array
    folds: Array
    units: Array

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, cycles: Any, samples: Any) -> ScoredSamples:
        """Those of some cycles and samples, by index."""
        folds = self.folds[cycles][:, samples]
        return ScoredSamples(self.labels[samples], folds, self.units[samples])


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
    """How fast more cycles narrow the interval: B in variance(C') = variance - B (1/C - 1/C')."""
    cycles: int
    skew: float = 0.0
    """Third central moment over the variance."""

    @property
    def half(self) -> float:
        """Half of the width of the interval."""
        return float(WIDER * stats.t.ppf(1 - LEVEL / 2, self.degrees) * math.sqrt(self.variance))

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval.

        It reaches further on the side to which samples are skewed, by what Hall's expansion of t
        shifts both ends (1992): of models that rank nearly all pairs right, few and rare samples
        make the difference. The other end stays, or more gains would be named.
        """
        t = float(stats.t.ppf(1 - LEVEL / 2, self.degrees))
        shift = (2 * t**2 + 1) / 6 * self.skew
        return self.gain - self.half + min(shift, 0.0), self.gain + self.half + max(shift, 0.0)

    @property
    def between(self) -> float:
        """Standard deviation between trainings: what one training owes to the luck of its fit."""
        return math.sqrt(self.common * self.fits)

    def half_after(self, cycles: int) -> float:
        """Half of the width after so many cycles in all, about; it falls at most as the root of
        their number, as where all of it is luck of fits."""
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
        variance = self.variance * (half_width / (CAREFUL * self.half)) ** 2
        if variance <= self.common:
            return None
        exact = samples * (self.variance - self.common) / (variance - self.common)
        step = 10 ** max(0, math.floor(math.log10(exact)) - 1)
        return math.ceil(exact / step) * step

    @property
    def p_of_no_gain(self) -> float:
        """One-sided p of the hypothesis that there is no gain."""
        return float(stats.t.sf(self.gain / (WIDER * math.sqrt(self.variance)), self.degrees))


# ---------------------------------------------------------------- metrics as sums over samples


def contributions(metric: Name, scores: Scores, samples: ScoredSamples) -> Array:
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
    return _auroc(scores, samples)


def share(metric: Name) -> float:
    """What the sum of a cycle's contributions is multiplied by: `contributions`."""
    return 0.5 if metric == "auroc" else 1.0


def _auroc(scores: Scores, samples: ScoredSamples) -> Array:
    """Placements of each sample within its fold, (C, n), by each class against the rest; of two
    classes the second's."""
    total = np.zeros(samples.folds.shape)
    if len(np.unique(samples.labels)) < 2:
        return total + np.nan
    for pairs in _pairs(scores, samples):
        if not pairs.above.size:
            total[pairs.cycle, [*pairs.positive, *pairs.negative]] = np.nan
            continue
        total[pairs.cycle, pairs.positive] += pairs.above.mean(1) * pairs.weights[0]
        total[pairs.cycle, pairs.negative] += pairs.above.mean(0) * pairs.weights[1]
    return total


@dataclass(frozen=True)
class Pairs:
    """The samples of a class and all others that a fold of a cycle tested, by number, and whether
    each of the first is ranked above each of the others, (positive, negative).

    `weights`: what a placement of each side is multiplied by in `contributions`.
    """

    cycle: int
    positive: Array
    negative: Array
    above: Array
    weights: tuple[float, float]


def _pairs(scores: Scores, samples: ScoredSamples) -> Iterator[Pairs]:
    """Of each cycle, fold and class that counts (of two the second)."""
    assert scores.outputs is not None
    chances = softmax(scores.outputs.astype(np.float64), axis=-1)
    classes, counts = np.unique(samples.labels, return_counts=True)
    first = 0 if len(classes) > 2 else 1
    for cycle, folds in enumerate(samples.folds):
        for fold in np.unique(folds):
            tested = np.flatnonzero(folds == fold)
            for k, count in zip(classes[first:], counts[first:], strict=True):
                is_k = samples.labels[tested] == k
                positive, negative = tested[is_k], tested[~is_k]
                chance = chances[cycle, :, k]
                above = np.sign(chance[positive][:, None] - chance[negative]) / 2 + 0.5
                ones = len(classes) - first
                weights = 1 / (count * ones), 1 / ((len(samples) - count) * ones)
                yield Pairs(
                    cycle,
                    positive,
                    negative,
                    above,
                    weights,
                )


def _counted_twice(alone: Scores, federated: Scores, samples: ScoredSamples) -> float:
    """What the variance of an AUROC's gain has twice where it is that of placements: what pairs of
    units owe to neither of the two.

    A placement is a mean over few samples of the other class, and varies with them, too. Of more
    than two classes about half of it.
    """
    total = 0.0
    for ours, theirs in zip(_pairs(federated, samples), _pairs(alone, samples), strict=True):
        difference = ours.above - theirs.above
        positive, negative = ours.weights
        weight = (positive / difference.shape[1] + negative / difference.shape[0]) / 2
        by_unit = weight * (difference - difference.mean())
        for members in (ours.positive, ours.negative):
            by_unit = _by_unit(by_unit, samples.units[members]).T
        total += float(np.square(by_unit).sum())
    return total / len(samples.folds) ** 2


def _by_unit(table: Array, units: Array) -> Array:
    """Sums of the rows that are of one unit."""
    order = np.argsort(units, kind="stable")
    begins = np.unique(units[order], return_index=True)[1]
    sums: Array = np.add.reduceat(table[order], begins)
    return sums


def value(metric: Name, scores: Scores, samples: ScoredSamples) -> float:
    """The metric, mean over cycles; of mae the error itself. NaN where it is not defined."""
    parts = contributions(metric, scores, samples)
    with np.errstate(invalid="ignore"):
        total = float(share(metric) * _over_cycles(parts).sum())
    return -total if metric == "mae" else total


def by_fold(metric: Name, scores: Scores, samples: ScoredSamples) -> Array:
    """The metric (more is better) on each fold of each cycle, (C, folds); NaN where it is not
    defined."""
    table = np.full((len(samples.folds), int(samples.folds.max()) + 1), np.nan)
    for cycle, folds in enumerate(samples.folds):
        for fold in np.unique(folds):
            tested = folds == fold
            parts = contributions(
                metric, scores.part([cycle], tested), samples.part([cycle], tested)
            )
            table[cycle, fold] = share(metric) * parts.sum()
    return table


# ---------------------------------------------------------------- one silo


def estimate(
    metric: Name,
    alone: Scores,
    federated: Scores,
    samples: ScoredSamples,
) -> Estimate | None:
    """The gain of `federated` over `alone`; None where the metric is not defined.

    The variance is V_s + a + V_x: V_s that of the mean over units of what their samples contribute,
    class by class; a what `MADE_UP` samples would add; V_x that of fits, as far as it exceeds what
    their samples explain. Satterthwaite gives the degrees of freedom.
    """
    difference = _difference(
        metric,
        alone,
        federated,
        samples,
    )
    if np.isnan(_over_cycles(difference)).any() or len(samples) < 2:
        return None
    cycles, every = len(difference), slice(None)
    variance, degrees, common, skew = _variance(
        metric,
        alone,
        federated,
        samples,
    )
    by_cycles = 0.0
    if cycles > 1:
        single = []
        for cycle in range(cycles):
            of_cycle = _variance(
                metric,
                alone.part([cycle], every),
                federated.part([cycle], every),
                samples.part([cycle], every),
            )
            single.append(of_cycle[0])
        by_cycles = max(0.0, (float(np.mean(single)) - variance) / (1 - 1 / cycles))
    gain = float(share(metric) * _over_cycles(difference).sum())
    return Estimate(
        gain,
        variance,
        degrees,
        common,
        _fits(samples),
        by_cycles,
        cycles,
        skew,
    )


def _difference(
    metric: Name,
    alone: Scores,
    federated: Scores,
    samples: ScoredSamples,
) -> Array:
    """What each tested sample adds to the gain, (C, n)."""
    ours, theirs = (contributions(metric, scores, samples) for scores in (federated, alone))
    return ours - theirs


def _fits(samples: ScoredSamples) -> int:
    """Models that tested the samples: one for each fold of each cycle."""
    return sum(len(np.unique(folds)) for folds in samples.folds)


def _variance(
    metric: Name,
    alone: Scores,
    federated: Scores,
    samples: ScoredSamples,
) -> tuple[float, float, float, float]:
    """Variance of the gain, its degrees of freedom, the part of it that all samples of a fit have
    in common, and of AUROC its third central moment over the variance."""
    difference = _difference(
        metric,
        alone,
        federated,
        samples,
    )
    mean = _over_cycles(difference)
    strata = samples.labels
    if metric in ("accuracy", "mae"):
        strata = np.zeros_like(strata)
    _, stratum = np.unique(strata, return_inverse=True)
    _, unit = np.unique(samples.units, return_inverse=True)
    centre = np.bincount(stratum, mean) / np.bincount(stratum)

    # V_s and a by class
    v_units, made_up, freedom, cubes = [], [], [], 0.0
    for k, middle in enumerate(centre):
        members = stratum == k
        sums = np.bincount(unit[members], mean[members] - middle)
        count = len(np.unique(unit[members]))
        freedom.append(max(count - 1, 1))
        factor = count / freedom[-1]
        # a single unit has no variance of its own: assume that all its samples could differ
        could_differ = int(members.sum()) if count == 1 else 1
        most = could_differ * _largest(
            metric,
            difference,
            samples,
            members,
            count,
        )
        v_units.append(factor * float(np.square(sums).sum()))
        made_up.append(MADE_UP * factor * most**2)
        cubes += float((sums**3).sum())
    kept, twice = 1.0, 0.0
    if metric == "auroc" and any(v_units):
        twice = _counted_twice(alone, federated, samples)
        kept = max(sum(v_units) - twice, *v_units) / sum(v_units)
    v_strata = kept * np.array(v_units) + made_up

    # V_x: squares of the sums over a fit's samples, less those that its units explain alone
    rest = np.where(np.isnan(difference), 0.0, difference - centre[stratum])
    of_fits, of_units = 0.0, 0.0
    for folds, values in zip(samples.folds, rest, strict=True):
        # contributions to AUROC sum up to twice a fit's
        by_fit = share(metric) * np.bincount(folds, values)
        by_unit = np.bincount(folds * (int(unit.max()) + 1) + unit, values)
        of_fits += float(np.square(by_fit).sum())
        of_units += float(np.square(by_unit).sum())
    v_fits = max(0.0, (of_fits - of_units) / len(difference) ** 2 + twice)

    # Satterthwaite's sum of squares over degrees of freedom
    variance = float(v_strata.sum()) + v_fits
    squares = float(np.sum(v_strata**2 / freedom)) + v_fits**2 / max(_fits(samples) - 1, 1)
    skew = cubes / variance if metric == "auroc" else 0.0
    return variance, variance**2 / squares, v_fits, skew


def _largest(
    metric: Name,
    difference: Array,
    samples: ScoredSamples,
    members: Array,
    units: int,
) -> float:
    """The most that one sample of a class, `members` (n,) of so many units, can contribute to the
    difference.

    Of errors, which are hardly ever that far apart, the most that was seen; of placements two ranks
    in a fold, so that models that agree get a half-width of some 4 / pairs: the rule of three, and
    a sample out of place is so for several others.
    """
    count = int(members.sum())
    if metric == "accuracy":
        return 1 / len(samples)
    if metric == "balanced_accuracy":
        return 1 / (count * len(np.unique(samples.labels)))
    if metric == "auroc":
        pairs = count * (len(samples) - count) / len(np.unique(samples.folds[0]))
        return 1 / count if units == 1 else 2 / pairs
    # equal models: hardly any width, but one
    return max(float(np.nanmax(np.abs(difference[:, members]))), 1e-12)


def _over_cycles(parts: Array) -> Array:
    """Mean over the cycles that have a value, (n,); NaN without any."""
    there = ~np.isnan(parts)
    with np.errstate(invalid="ignore"):
        mean: Array = np.where(there, parts, 0.0).sum(0) / there.sum(0)
    return mean


def heavy(alone: Array, federated: Array, samples: ScoredSamples) -> bool:
    """Whether a sample or unit makes up too much of the variance of errors (C, n) trained alone, or
    of their difference.

    Of errors, which are skewed, twice `HEAVY`; of more than `LEAST` less, as the largest share
    falls with three degrees of freedom. From these tails on no single training set tells its luck.
    """
    ratio = LEAST / len(np.unique(samples.units))
    # one of fewer makes up more by chance
    most = HEAVY * max(1.0, ratio)
    of_difference = _largest_share(federated - alone, samples)
    of_errors = _largest_share(alone, samples)
    return of_difference > most or of_errors > 2 * most * min(1.0, ratio) ** (1 / 3)


def _largest_share(parts: Array, samples: ScoredSamples) -> float:
    """The largest part of the variance of `parts` (C, n) that is one unit's; 0 without variance."""
    mean = _over_cycles(parts)
    unit = np.unique(samples.units, return_inverse=True)[1]
    sums = np.square(np.bincount(unit, mean - mean.mean()))
    total = float(sums.sum())
    return float(sums.max()) / total if total else 0.0


def too_few(
    metric: Name, labels: Array, size: int | None = None, units: int = 0, kind: str = "units"
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
    if low > 0:
        return "gains"
    return "harmed" if high < 0 else "cannot tell yet"


# --------------------------------------------------------- choice of the method, and the consortium


def choose_by_other_folds(tables: Array, sizes: Array) -> tuple[Array, int]:
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


def _best(tables: Array, sizes: Array) -> int:
    """The method with the best mean over silos of means over folds; the first of equal ones."""
    weights = np.where(np.isnan(tables), 0.0, sizes)
    totals = weights.sum(-1)
    votes = (totals > 0).all(0)
    if not votes.any():
        return 0
    sums = (np.nan_to_num(tables) * weights).sum(-1)
    means = sums[:, votes] / totals[:, votes]
    return int(means.mean(1).argmax())


def mean_gain(estimates: Sequence[Estimate]) -> tuple[float, float, float]:
    """Mean over silos, and its interval. Errors of silos of one federation are hardly correlated
    (simulated)."""
    gain = float(np.mean([estimate.gain for estimate in estimates]))
    variance = sum(estimate.variance for estimate in estimates)
    half = WIDER * stats.norm.ppf(1 - LEVEL / 2) * math.sqrt(variance) / len(estimates)
    return gain, gain - float(half), gain + float(half)


def of_new_silos(gains: Sequence[float]) -> tuple[float, float] | None:
    """Interval of the mean gain of silos that are drawn as these were, by Student's t; None of
    fewer than three."""
    if len(gains) < 3:
        return None
    mean = float(np.mean(gains))
    half = float(stats.t.ppf(1 - LEVEL / 2, len(gains) - 1) * stats.sem(gains))
    return mean - half, mean + half
