"""Estimate the gain of one silo over training alone, from arrays. Which interval and why:
docs/decisions/0027.

A cycle of folds tests each sample of the silo once, so a model's scores have the shape (C, n): C
cycles, n samples. *Units* are independent of each other: the samples, or groups of dependent
samples such as recordings or persons. Cycles are not independent. A *contribution* is the summand
of one tested sample in the metric, which is the sum over a cycle's samples, times `scale`.
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
"""Factor of every half-width. Resampling a silo does not show how much the gain depends on the
chance in drawing its training set; this factor covers it (simulated: docs/decisions/0027)."""
LEAST, LEAST_OF_CLASS = (
    40,
    {
        "accuracy": 10,
        "balanced_accuracy": 10,
        "auroc": 20,
        "mae": 0,
    },
)
"""Samples of a silo, and samples of its smaller class by metric, below which there is no verdict
(simulated sizes: 20 and 60)."""
LEAST_UNITS = 10
"""Units of a silo with dependent samples (persons, recordings), below which there is no verdict.
Ours: intervals over 5 to 20 recordings cover 94 to 98 % (simulated: docs/decisions/0027), but do
not include the chance in training on so few."""
HEAVY = 0.2
"""Share of the variance of one of `LEAST` units above which errors count as heavy-tailed: an
interval then holds for these samples only. Ours: with 40 normal errors the largest share is above
0.2 in 15 % of simulations, with two degrees of freedom in 85 % (docs/decisions/0027)."""
CAREFUL = 1.4
"""Factor of the half-width that is predicted for more samples, so that 95 of 100 are narrower
(docs/decisions/0027)."""
MADE_UP = 0.5
"""Samples added to each class as if the models differed in them, so that no interval has the width
0."""


@dataclass(frozen=True)
class Scores:
    """Scores of one row on a silo's samples.

    Args:
        right: score of each sample, (C, n): for classification 1 if it is predicted right, else 0;
            for texts the share of positions predicted right; for a regression the absolute error.
        outputs: (C, n, classes) class scores; None for texts and regressions.
    """

    right: Array
    outputs: Array | None = None

    def part(self, cycles: Any, samples: Any) -> Scores:
        """Select cycles and samples by index."""
        outputs = None if self.outputs is None else self.outputs[cycles][:, samples]
        return Scores(self.right[cycles][:, samples], outputs)


@dataclass(frozen=True)
class ScoredSamples:
    """Samples of a silo on which its results are based.

    Args:
        labels: (n,) class numbers; for a regression all 0.
        folds: (C, n) number of the fold that tested each sample.
        units: (n,) number of the unit to which each sample belongs.
    """

    labels: Array
    folds: Array
    units: Array

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, cycles: Any, samples: Any) -> ScoredSamples:
        """Select cycles and samples by index."""
        folds = self.folds[cycles][:, samples]
        return ScoredSamples(self.labels[samples], folds, self.units[samples])


@dataclass(frozen=True)
class Estimate:
    """A silo's gain with its variance, from which the interval of the gain follows."""

    gain: float
    variance: float
    degrees: float
    """Degrees of freedom of the variance."""
    common: float
    """Part of the variance that is due to chance in fitting models: more samples do not reduce
    it."""
    fits: int
    """Number of fitted models: folds times cycles."""
    by_cycles: float
    """B in variance(C') = variance - B (1/C - 1/C'): how fast more cycles narrow the interval."""
    cycles: int
    skew: float = 0.0
    """Third central moment divided by the variance."""

    @property
    def half(self) -> float:
        """Half-width of the 95 % interval."""
        return float(WIDER * stats.t.ppf(1 - LEVEL / 2, self.degrees) * math.sqrt(self.variance))

    @property
    def ends(self) -> tuple[float, float]:
        """Lower and upper end of the interval: the gain plus or minus the half-width, and the end
        on the side of the skew moved outwards.

        Contributions are skewed if few samples make the difference, as between two models that rank
        nearly all pairs right (AUROC). Hall's expansion of t (1992) would shift both ends by the
        same distance; only the outward shift is applied, since the inward one would declare more
        gains.
        """
        t = float(stats.t.ppf(1 - LEVEL / 2, self.degrees))
        shift = (2 * t**2 + 1) / 6 * self.skew
        return self.gain - self.half + min(shift, 0.0), self.gain + self.half + max(shift, 0.0)

    @property
    def training_std(self) -> float:
        """Standard deviation that a single training of one fold gives the gain, with the samples
        fixed."""
        return math.sqrt(self.common * self.fits)

    def half_after(self, cycles: int) -> float:
        """Predict the half-width after `cycles` cycles in all. It is never predicted to fall faster
        than in proportion to 1 / sqrt(cycles)."""
        variance = self.variance - self.by_cycles * (1 / self.cycles - 1 / cycles)
        return self.half * math.sqrt(max(variance / self.variance, self.cycles / cycles))

    def samples_for(self, samples: int, half_width: float) -> int | None:
        """Predict how many units the silo needs so that, with probability 95 %, its half-width is
        at most `half_width`.

        Args:
            samples: number of units that the silo has.
            half_width: the half-width to reach.

        Returns:
            The number, rounded up to two digits; `samples` if the half-width is reached already;
            None if no number suffices: the variance by chance in fitting models (`common`), which
            more samples do not reduce, is too large.
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
        """One-sided p-value of the hypothesis that there is no gain."""
        return float(stats.t.sf(self.gain / (WIDER * math.sqrt(self.variance)), self.degrees))


# ---------------------------------------------------------------- metrics as sums over samples


def contributions(metric: Name, scores: Scores, samples: ScoredSamples) -> Array:
    """Compute each tested sample's contribution to the metric, (C, n); larger is better, and NaN
    means undefined.

    - accuracy, mae: the metric is the mean over samples (mae with a negative sign).
    - balanced_accuracy: the metric is the mean over classes of the means over their samples.
    - auroc: the metric is the mean over classes of the AUROC of a class against the rest; for two
      classes it is the AUROC of the second class. Contributions are placements (DeLong et al.,
      1988). The placement of a positive is the share of negatives ranked below it, that of a
      negative the share of positives ranked above it, both among the samples of one fold, since
      scores of two models cannot be ranked together. Placements of the positives sum up to the
      AUROC, and so do those of the negatives; so all contributions sum up to twice the AUROC.
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


def scale(metric: Name) -> float:
    """Factor that turns the sum of a cycle's `contributions` into the metric: 0.5 for the AUROC,
    which they count twice, else 1."""
    return 0.5 if metric == "auroc" else 1.0


def _auroc(scores: Scores, samples: ScoredSamples) -> Array:
    """Compute contributions to AUROC, (C, n)."""
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
    """Comparisons from which the AUROC of a class is computed: each of its samples (positive) with
    each other sample (negative) that the same fold of the same cycle has tested.

    Args:
        cycle: number of the cycle.
        positive: (p,) indices of the samples of the class.
        negative: (q,) indices of the others.
        above: (p, q): 1 where the positive is ranked above the negative, 0.5 for a tie, else 0.
        weights: two numbers: the factors that turn placements of positives, and of negatives, into
            `contributions`.
    """

    cycle: int
    positive: Array
    negative: Array
    above: Array
    weights: tuple[float, float]


def _pairs(scores: Scores, samples: ScoredSamples) -> Iterator[Pairs]:
    """Yield the pairs of each cycle, fold and class (of two classes, the second only)."""
    assert scores.outputs is not None
    probabilities = softmax(scores.outputs.astype(np.float64), axis=-1)
    classes, counts = np.unique(samples.labels, return_counts=True)
    first = 0 if len(classes) > 2 else 1
    for cycle, folds in enumerate(samples.folds):
        for fold in np.unique(folds):
            tested = np.flatnonzero(folds == fold)
            for k, count in zip(classes[first:], counts[first:], strict=True):
                is_k = samples.labels[tested] == k
                positive, negative = tested[is_k], tested[~is_k]
                of_class = probabilities[cycle, :, k]
                above = np.sign(of_class[positive][:, None] - of_class[negative]) / 2 + 0.5
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
    """Estimate the variance between pairs of units that neither unit of a pair explains.

    A placement is a mean over few samples of the other class and varies with them, too; so the
    placements of positives and those of negatives both contain this variance, and the variance of
    an AUROC's gain would count it twice. For more than two classes this is about half of it.
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
    """Sum the rows of each unit."""
    order = np.argsort(units, kind="stable")
    begins = np.unique(units[order], return_index=True)[1]
    sums: Array = np.add.reduceat(table[order], begins)
    return sums


def value(metric: Name, scores: Scores, samples: ScoredSamples) -> float:
    """Compute the metric, mean over cycles (for mae the error itself); NaN if undefined."""
    summands = contributions(metric, scores, samples)
    with np.errstate(invalid="ignore"):
        total = float(scale(metric) * _over_cycles(summands).sum())
    return -total if metric == "mae" else total


def by_fold(metric: Name, scores: Scores, samples: ScoredSamples) -> Array:
    """Compute the metric on each fold of each cycle, (C, folds): larger is better, NaN is
    undefined."""
    table = np.full((len(samples.folds), int(samples.folds.max()) + 1), np.nan)
    for cycle, folds in enumerate(samples.folds):
        for fold in np.unique(folds):
            tested = folds == fold
            summands = contributions(
                metric, scores.part([cycle], tested), samples.part([cycle], tested)
            )
            table[cycle, fold] = scale(metric) * summands.sum()
    return table


# ---------------------------------------------------------------- one silo


def estimate(
    metric: Name,
    alone: Scores,
    federated: Scores,
    samples: ScoredSamples,
) -> Estimate | None:
    """Estimate the gain of `federated` over `alone`; None if the metric is undefined.

    The variance is V_s + a + V_x:

    - V_s, from the choice of samples: variance of the sum of the units' contributions, class by
      class.
    - a, for small silos: `MADE_UP` samples are added to each class as if the two models differed in
      them, so that the variance is not 0 where they agree in all real samples.
    - V_x, from the chance in training: variance between the fitted models' results, less the part
      that the samples which each has tested explain.

    Degrees of freedom follow Satterthwaite.
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
        cycle_variances = []
        for cycle in range(cycles):
            cycle_variance, *_ = _variance(
                metric,
                alone.part([cycle], every),
                federated.part([cycle], every),
                samples.part([cycle], every),
            )
            cycle_variances.append(cycle_variance)
        by_cycles = max(0.0, (float(np.mean(cycle_variances)) - variance) / (1 - 1 / cycles))
    gain = float(scale(metric) * _over_cycles(difference).sum())
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
    """Compute each tested sample's contribution to the gain, (C, n)."""
    return contributions(metric, federated, samples) - contributions(metric, alone, samples)


def _fits(samples: ScoredSamples) -> int:
    """Count the models that tested the samples: one for each fold of each cycle."""
    return sum(len(np.unique(folds)) for folds in samples.folds)


def _variance(
    metric: Name,
    alone: Scores,
    federated: Scores,
    samples: ScoredSamples,
) -> tuple[float, float, float, float]:
    """Estimate the variance of the gain; returns `variance`, `degrees`, `common` and `skew` of
    `Estimate`."""
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
    for k, class_mean in enumerate(centre):
        members = stratum == k
        sums = np.bincount(unit[members], mean[members] - class_mean)
        count = len(np.unique(unit[members]))
        freedom.append(max(count - 1, 1))
        factor = count / freedom[-1]
        # a single unit shows no variance: assume that the models differ in all its samples
        differing = int(members.sum()) if count == 1 else 1
        largest = differing * _largest_contribution(
            metric,
            difference,
            samples,
            members,
            count,
        )
        v_units.append(factor * float(np.square(sums).sum()))
        made_up.append(MADE_UP * factor * largest**2)
        cubes += float((sums**3).sum())
    kept, twice = 1.0, 0.0
    if metric == "auroc" and any(v_units):
        twice = _counted_twice(alone, federated, samples)
        kept = max(sum(v_units) - twice, *v_units) / sum(v_units)
    v_strata = kept * np.array(v_units) + made_up

    # V_x: squared sums over a fit's samples, less the part that its units explain
    residuals = np.where(np.isnan(difference), 0.0, difference - centre[stratum])
    fit_squares, unit_squares = 0.0, 0.0
    for folds, values in zip(samples.folds, residuals, strict=True):
        by_fit = scale(metric) * np.bincount(folds, values)
        by_unit = np.bincount(folds * (int(unit.max()) + 1) + unit, values)
        fit_squares += float(np.square(by_fit).sum())
        unit_squares += float(np.square(by_unit).sum())
    v_fits = max(0.0, (fit_squares - unit_squares) / len(difference) ** 2 + twice)

    # Satterthwaite: sum of squares over degrees of freedom
    variance = float(v_strata.sum()) + v_fits
    squares = float(np.sum(v_strata**2 / freedom)) + v_fits**2 / max(_fits(samples) - 1, 1)
    skew = cubes / variance if metric == "auroc" else 0.0
    return variance, variance**2 / squares, v_fits, skew


def _largest_contribution(
    metric: Name,
    difference: Array,
    samples: ScoredSamples,
    members: Array,
    units: int,
) -> float:
    """Largest contribution that one sample of a class can make to the gain.

    For mae it is the largest one observed. For AUROC it is two ranks within a fold, so that models
    that agree get a half-width of about 4 / pairs: by the rule of three 3 / pairs, and more since a
    misplaced sample is so in several pairs.

    Args:
        metric: the metric.
        difference: (C, n) contributions to the gain.
        samples: the samples.
        members: (n,) whether each sample is of the class.
        units: number of units in the class.
    """
    count = int(members.sum())
    if metric == "accuracy":
        return 1 / len(samples)
    if metric == "balanced_accuracy":
        return 1 / (count * len(np.unique(samples.labels)))
    if metric == "auroc":
        pairs = count * (len(samples) - count) / len(np.unique(samples.folds[0]))
        return 1 / count if units == 1 else 2 / pairs
    # at least 1e-12: equal models get an interval, too
    return max(float(np.nanmax(np.abs(difference[:, members]))), 1e-12)


def _over_cycles(values: Array) -> Array:
    """Mean over the cycles that have a value, (n,); NaN without any."""
    is_defined = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        mean: Array = np.where(is_defined, values, 0.0).sum(0) / is_defined.sum(0)
    return mean


def one_unit_dominates(alone: Array, federated: Array, samples: ScoredSamples) -> bool:
    """Whether one unit causes so much of a variance that no interval can be trusted: the variance
    of the errors of training alone, or of the differences between these and the errors of federated
    training.

    The limit is a share of the variance. For the difference it is `HEAVY`; with fewer than `LEAST`
    units it is greater, since the largest of few shares is greater by chance. For the errors
    themselves, which are skewed, it is twice that; with more than `LEAST` units it falls with their
    number, as the largest share does for errors of a t distribution with three degrees of freedom.
    If tails are heavier, the result of a single training set tells too little about other training
    sets.

    Args:
        alone: absolute errors of training alone, (C, n).
        federated: absolute errors of federated training, (C, n).
        samples: the tested samples.
    """
    ratio = LEAST / len(np.unique(samples.units))
    limit = HEAVY * max(1.0, ratio)
    in_difference = _largest_share(federated - alone, samples)
    in_errors = _largest_share(alone, samples)
    return in_difference > limit or in_errors > 2 * limit * min(1.0, ratio) ** (1 / 3)


def _largest_share(values: Array, samples: ScoredSamples) -> float:
    """Largest share of one unit in the variance of `values` (C, n); 0 without variance."""
    mean = _over_cycles(values)
    unit = np.unique(samples.units, return_inverse=True)[1]
    sums = np.square(np.bincount(unit, mean - mean.mean()))
    total = float(sums.sum())
    return float(sums.max()) / total if total else 0.0


def why_too_few(
    metric: Name, labels: Array, size: int | None = None, units: int = 0, kind: str = "units"
) -> str:
    """Say why a silo has too few samples for a verdict; empty if it has enough.

    For accuracy, `LEAST_OF_CLASS` samples must lie outside the largest class; for balanced accuracy
    and AUROC, in the smallest class.

    Args:
        metric: metric in which gains are measured.
        labels: (n,) class numbers.
        size: number of distinct samples, if some occur in `labels` more than once; None: n.
        units: number of groups of dependent samples; 0: all samples are independent.
        kind: name of these groups, such as "persons".
    """
    n, needed = size or len(labels), LEAST_OF_CLASS[metric]
    _, counts = np.unique(labels, return_counts=True)
    if n < LEAST:
        return f"it has {n} samples, and a verdict takes {LEAST}"
    if 0 < units < LEAST_UNITS:
        return f"its {n} samples are of {units} {kind}, and a verdict takes {LEAST_UNITS}"
    if metric != "mae" and len(counts) == 1:
        return "all its samples are of one class"
    fewer = n - int(counts.max()) if metric == "accuracy" else int(counts.min())
    if fewer < needed:
        where = "outside its largest class" if metric == "accuracy" else "of its smallest class"
        return f"it has {fewer} samples {where}, and a verdict takes {needed}"
    return ""


def verdict(low: float, high: float, margin: float) -> Verdict:
    """Turn an interval into a verdict. An interval within the margin is no difference that matters,
    even if it lies above 0: otherwise a large silo would gain by a tenth of a point."""
    if -margin < low and high < margin:
        return "no difference that matters"
    if low > 0:
        return "gains"
    return "harmed" if high < 0 else "cannot tell yet"


# --------------------------------------------------------- choice of the method, and the consortium


def choose_by_other_folds(tables: Array, sizes: Array) -> tuple[Array, int]:
    """Choose a row for each fold of each cycle: the best one on the *other* folds of the cycle, so
    that no row is scored on folds by which it was chosen. The choice is common to all silos; silos
    without a value on the other folds have no part in it.

    Args:
        tables: (rows, silos, C, folds) metric on each fold, as by `by_fold`.
        sizes: (silos, C, folds) numbers of tested samples.

    Returns:
        Indices of the chosen rows (C, folds), and the index of the row that is best over all folds.
    """
    methods, _, cycles, folds = tables.shape
    picks = np.zeros((cycles, folds), np.int64)
    for cycle in range(cycles):
        for fold in range(folds):
            others = np.arange(folds) != fold
            picks[cycle, fold] = _best(tables[:, :, cycle, others], sizes[:, cycle, others])
    return picks, _best(tables.reshape(methods, len(sizes), -1), sizes.reshape(len(sizes), -1))


def _best(tables: Array, sizes: Array) -> int:
    """Index of the row with the best mean over silos of means over folds; the first of equals."""
    weights = np.where(np.isnan(tables), 0.0, sizes)
    totals = weights.sum(-1)
    is_defined = (totals > 0).all(0)
    if not is_defined.any():
        return 0
    sums = (np.nan_to_num(tables) * weights).sum(-1)
    means = sums[:, is_defined] / totals[:, is_defined]
    return int(means.mean(1).argmax())


def mean_gain(estimates: Sequence[Estimate]) -> tuple[float, float, float]:
    """Mean gain over silos, with the lower and upper end of its interval. Gains are treated as
    independent: silos of one federation are hardly correlated (simulated)."""
    gain = float(np.mean([estimate.gain for estimate in estimates]))
    variance = sum(estimate.variance for estimate in estimates)
    half = WIDER * stats.norm.ppf(1 - LEVEL / 2) * math.sqrt(variance) / len(estimates)
    return gain, gain - float(half), gain + float(half)


def mean_of_new_silos(gains: Sequence[float]) -> tuple[float, float] | None:
    """Interval of the mean gain of new silos from the same population, by Student's t; None for
    fewer than three gains."""
    if len(gains) < 3:
        return None
    mean = float(np.mean(gains))
    half = float(stats.t.ppf(1 - LEVEL / 2, len(gains) - 1) * stats.sem(gains))
    return mean - half, mean + half
