"""Statistics of paired comparisons between methods, on plain numbers. docs/decisions/0023 says why
these intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from scipy import stats

LEVEL = 0.05
"""Significance level of tests; intervals are of 1 - LEVEL. The field's custom."""
MIN_PAIRS = 6
"""Fewest pairs for a test: of 5 pairs, Wilcoxon's two-sided p is never below 2 / 2**5 = 0.0625."""
FEW = 5
"""Seeds below which an interval is Student's t alone: too few for a bootstrap
(docs/decisions/0023)."""
EQUAL = 5e-7
"""Scores in 0..1, or differences of scores, that are at most this far apart count as equal. Scores
come from float32: a quotient is off by at most 3e-8, a score of several quotients by a few times
that, and so are means."""
ONE_SIDED = 1.645
"""Standard errors beyond which about 5 % of independent errors lie, on one side, if test samples
are many. The field's custom."""
RESAMPLES = 9_999
"""Resamples of a bootstrap. Davison and Hinkley (1997) ask for 1,000 or more at 95 %; these take
well under a second."""

Differences = Sequence[Sequence[np.ndarray]]
"""Paired differences between two methods, [seed][setting] -> array of shape (..., clients). Leading
axes are studies that share the draws of a bootstrap."""


def seed_means(differences: Differences) -> np.ndarray:
    """The mean difference of each seed, shape (..., seeds): the mean over settings of the means
    over clients."""
    means = []
    for settings in differences:
        of_settings = [clients.mean(axis=-1) for clients in settings]
        means.append(np.mean(of_settings, axis=0))
    return np.stack(means, axis=-1)


def have_equal_means(differences: Differences) -> bool:
    """Whether the mean differences of all seeds are equal within `EQUAL`."""
    spread = np.ptp(seed_means(differences))
    return bool(spread <= EQUAL)


def interval(
    differences: Differences, level: float = LEVEL, resamples: int = RESAMPLES
) -> tuple[float, float, Literal["t", "bootstrap"]] | None:
    """The confidence interval of the mean difference that new seeds would have, and its kind.

    Returns None for one seed, and if all seeds have the same difference: without a spread the
    interval would claim certainty.

    Seeds are the independent units. With fewer than `FEW` seeds, the interval is Student's t over
    the seeds' means. With `FEW` or more, it is the smallest interval that contains both Student's t
    and the hierarchical bootstrap; if the bootstrap is infinite, which happens when all but one or
    two seeds are equal, it is Student's t. With skewed seeds, 95 % intervals of t alone contain the
    true mean in 88 to 93 % of cases, of the bootstrap alone in 91 to 94 %, and of both together in
    92 to 97 % (docs/decisions/0023).

    Args:
        differences: paired differences of two methods, [seed][setting].
        level: significance level: the confidence is 1 - `level`.
        resamples: resamples of the bootstrap.
    """
    if len(differences) < 2 or have_equal_means(differences):
        return None
    if len(differences) >= FEW:
        low, high = map(float, outer(differences, level, resamples))
        if math.isfinite(low) and math.isfinite(high):
            return low, high, "bootstrap"
    low, high = map(float, t_interval(differences, level))
    return low, high, "t"


def outer(
    differences: Differences, level: float = LEVEL, resamples: int = RESAMPLES
) -> tuple[Any, Any]:
    """The smallest interval that contains Student's t interval and the bootstrap interval: its
    lower and its upper end, each of shape (...)."""
    lows, highs = zip(
        t_interval(differences, level),
        bootstrap(differences, level, resamples),
        strict=True,
    )
    return np.minimum(*lows), np.maximum(*highs)


def t_interval(differences: Differences, level: float = LEVEL) -> tuple[Any, Any]:
    """Student's t interval of the mean over seeds."""
    return _t_interval_of_mean(seed_means(differences), level)


def _t_interval_of_mean(means: np.ndarray, level: float = LEVEL) -> tuple[Any, Any]:
    """Student's t interval of the mean over the last axis of `means`."""
    center = means.mean(axis=-1)
    quantile = stats.t.ppf(1 - level / 2, means.shape[-1] - 1)
    reach = quantile * stats.sem(means, axis=-1)
    return center - reach, center + reach


def bootstrap(
    differences: Differences, level: float = LEVEL, resamples: int = RESAMPLES
) -> tuple[Any, Any]:
    """Hierarchical bootstrap-t interval: seeds are drawn with replacement, then clients within each
    drawn seed.

    Studentised by the spread over seeds (Davison and Hinkley, 1997, section 5.2.1). The draws are
    the same in each call.
    """
    means = seed_means(differences)
    center = means.mean(axis=-1)
    error = stats.sem(means, axis=-1)
    drawn = resampled(differences, resamples, np.random.default_rng(0))
    distances = drawn.mean(axis=-1) - center[..., None]
    # 0 / 0 if only one seed was drawn and its clients are equal
    with np.errstate(divide="ignore", invalid="ignore"):
        t = distances / stats.sem(drawn, axis=-1)
    tails = [level / 2, 1 - level / 2]
    low, high = np.quantile(t, tails, axis=-1, method="inverted_cdf")
    return center - high * error, center - low * error


def resampled(
    differences: Differences,
    resamples: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Means over drawn clients for each drawn seed, shape (..., resamples, seeds). Clients are
    drawn anew each time a seed is drawn."""
    count = len(differences)
    seeds = rng.integers(count, size=(resamples, count))
    *studies, _ = differences[0][0].shape
    means = np.empty((*studies, *seeds.shape))
    for seed, settings in enumerate(differences):
        places = seeds == seed
        times = int(places.sum())
        drawn = [_drawn_means(clients, times, rng) for clients in settings]
        means[..., places] = np.mean(drawn, axis=0)
    return means


def _drawn_means(
    clients: np.ndarray,
    times: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Means over clients drawn with replacement, `times` times, shape (..., times)."""
    count = clients.shape[-1]
    shares = np.full(count, 1 / count)
    counts = rng.multinomial(count, shares, size=times)
    return np.asarray(clients @ counts.T / count)


def interval_of_mean(values: np.ndarray) -> tuple[float, float] | None:
    """Student's t interval of the mean of `values`; None for fewer than two values, or if all are
    equal."""
    if len(values) < 2 or np.ptp(values) <= EQUAL:
        return None
    low, high = _t_interval_of_mean(values)
    return float(low), float(high)


def welch_interval(
    ours: Sequence[float],
    mean: float,
    std: float | None,
    count: int,
) -> tuple[float, float]:
    """Welch's interval for the difference of two means: the mean of `ours` minus `mean`.

    Args:
        ours: two or more values.
        mean: the mean of `count` other values.
        std: the standard deviation of the other values; None if unknown: then the deviation and the
            degrees of freedom of `ours` are taken.
        count: number of the other values.
    """
    number = len(ours)
    spread = float(np.std(ours, ddof=1))
    other_spread = spread if std is None else std
    variance, other_variance = spread**2 / number, other_spread**2 / count
    error = math.sqrt(variance + other_variance)
    freedom: float = number - 1
    weight = variance**2 / freedom
    if count > 1:
        weight += other_variance**2 / (count - 1)
    if std is not None and weight:
        freedom = error**4 / weight
    reach = float(stats.t.ppf(1 - LEVEL / 2, freedom)) * error
    difference = float(np.mean(ours)) - mean
    return difference - reach, difference + reach


def noise_threshold(
    ours: np.ndarray,
    alone: np.ndarray,
    tested: np.ndarray,
) -> np.ndarray:
    """The greatest difference of two accuracies on the same test samples that chance may explain,
    one-sided at 5 %.

    The variance is that of two independent proportions, (a (1 - a) + b (1 - b)) / n: an upper bound
    if both models are wrong about the same samples. A difference of one sample is never beyond it.
    With few samples, and independent errors of the two models, more than 5 % of differences are
    beyond it: up to 10.9 % with 3 samples, 10.2 with 7, 7.5 with 8 to 30. The variation between
    trainings is left out.

    Args:
        ours: accuracies in 0..1.
        alone: accuracies of training alone.
        tested: number of test samples; 0 gives `EQUAL`.
    """
    samples = np.where(tested > 0, tested, np.inf)
    variance = ours * (1 - ours) + alone * (1 - alone)
    reach = ONE_SIDED * np.sqrt(variance / samples)
    return np.maximum(reach, 1 / samples) + EQUAL


# ---------------------------------------------------------------- tests


def levelled(values: Any) -> np.ndarray:
    """Make values that count as equal the same number, so that their ranks tie: each group of
    values with gaps of at most `EQUAL` is set to its least value.

    Rounding would not do: it moves two close values apart if they lie on either side of a limit.

    Args:
        values: shape (n,).

    Returns:
        The values, shape (n,), in the order given.
    """
    levels = np.array(values, dtype=float)
    order = np.argsort(levels, kind="stable")
    ascending = levels[order]
    begins = np.diff(ascending, prepend=-np.inf) > EQUAL
    group = np.cumsum(begins) - 1
    levels[order] = ascending[begins][group]
    return levels


def _signed(differences: Sequence[float]) -> np.ndarray:
    """The differences, with absolute values that count as equal, or as 0, made the same number
    (`levelled`)."""
    signs = np.sign(differences)
    sizes = np.abs(differences)
    return np.asarray(signs * levelled([0.0, *sizes])[1:])


def wilcoxon(differences: Sequence[float]) -> float:
    """Two-sided p of Wilcoxon's signed-rank test, without pairs that are equal; exact if scipy
    computes it exactly."""
    signed = _signed(differences)
    unequal = signed[signed != 0]
    return float(stats.wilcoxon(unequal).pvalue) if len(unequal) else 1.0


def t_test_over_seeds(differences: Differences) -> float:
    """Two-sided p of Student's t test on the seeds' mean differences, of two seeds or more.

    If all seeds have the same difference, p is that of the sign test, 2 / 2^n, or 1 for a
    difference of 0.
    """
    means = seed_means(differences)
    if have_equal_means(differences):
        is_unequal = abs(means.mean()) > EQUAL
        return 2 / 2 ** len(means) if is_unequal else 1.0
    return float(stats.ttest_1samp(means, 0).pvalue)


def holm(p: Sequence[float]) -> list[float]:
    """The p values corrected for multiple tests (Holm, 1979), in the order of `p`."""
    values = np.asarray(p, dtype=float)
    order = np.argsort(values, kind="stable")
    factors = np.arange(len(values), 0, -1)
    steps = np.maximum.accumulate(values[order] * factors)
    corrected = np.empty(len(values))
    corrected[order] = np.minimum(1.0, steps)
    return [float(value) for value in corrected]


def pairs_needed(comparisons: int) -> int:
    """The fewest pairs with which Wilcoxon's p, corrected for the number of comparisons, can reach
    `LEVEL`.

    The least p of n pairs is 2 / 2**n.
    """
    factor = max(1, comparisons)
    pairs = math.ceil(1 + math.log2(factor / LEVEL))
    return max(MIN_PAIRS, pairs)


def tally(differences: Sequence[float]) -> tuple[int, int, int]:
    """Numbers of wins, ties and losses: of differences above, at and below 0."""
    signed = _signed(differences)
    wins, losses = int((signed > 0).sum()), int((signed < 0).sum())
    return wins, len(signed) - wins - losses, losses


def friedman(scores: np.ndarray) -> tuple[float, float, np.ndarray]:
    """Friedman's chi-square and p over settings, and the mean rank of each method (1 is best; ties
    share a rank).

    Args:
        scores: shape (settings, methods), higher is better.
    """
    scores = np.apply_along_axis(levelled, 1, scores)
    ranks = stats.rankdata(-scores, axis=1).mean(axis=0)
    spreads = np.ptp(scores, axis=1)
    if spreads.max() == 0:  # all methods are equal, and the statistic is 0 / 0
        return 0.0, 1.0, ranks
    test = stats.friedmanchisquare(*scores.T)
    return float(test.statistic), float(test.pvalue), ranks


def pairwise(scores: np.ndarray) -> np.ndarray:
    """Wilcoxon's p between all pairs of methods over settings, Holm-corrected, shape (methods,
    methods); 1 on the diagonal.

    Unlike Nemenyi's test on mean ranks, the test of two methods does not depend on which other
    methods are compared, except for Holm's correction (Benavoli, Corani, Mangili, JMLR 2016).
    """
    methods = scores.shape[1]
    rows, columns = np.triu_indices(methods, k=1)
    differences = scores[:, rows] - scores[:, columns]
    table = np.eye(methods)
    table[rows, columns] = holm([wilcoxon(pair) for pair in differences.T])
    return np.maximum(table, table.T)


def cliques(ranks: np.ndarray, p: np.ndarray) -> list[list[int]]:
    """The largest groups of methods with neighbouring ranks, best first, in which no two methods
    differ at `LEVEL`."""
    order = np.argsort(ranks, kind="stable").tolist()
    groups: list[list[int]] = []
    last_end = 0  # place after the last group's last method
    for first in range(len(order)):
        group = order[first : first + 1]
        for method in order[first + 1 :]:
            if not (p[method, group] > LEVEL).all():
                break
            group.append(method)
        if len(group) > 1 and first + len(group) > last_end:
            groups.append(group)
        last_end = max(last_end, first + len(group))
    return groups
