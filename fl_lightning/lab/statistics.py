"""Statistics of paired comparisons: numbers in, numbers out. Which interval and why:
docs/decisions/0023."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from scipy import stats

LEVEL = 0.05
"""Of tests and, as 1 - LEVEL, of intervals. The field's custom."""
MIN_PAIRS = 6
"""Fewer have no test: of 5 pairs, Wilcoxon's two-sided p is never below 2 / 2**5 = 0.0625."""
FEW = 5
"""Seeds below which an interval is Student's: there are too few to draw from
(docs/decisions/0023)."""
EQUAL = 5e-7
"""Scores, in 0..1, and differences of them that lie no further apart are the same. Scores come from
float32: each is off by 3e-8 at most where it is one quotient, by a few times that where it is made
of several, and so are means."""
ONE_SIDED = 1.645
"""Standard errors: about 5 % of independent errors are beyond it where test samples are many. The
field's custom."""
RESAMPLES = 9_999
"""Of a bootstrap. Davison and Hinkley (1997) ask for 1,000 or more at 95 %; these cost well under a
second."""

Differences = Sequence[Sequence[np.ndarray]]
"""Paired differences between two methods, [seed][setting] -> array (..., clients); leading axes are
studies that share the draws of a bootstrap."""


def seed_means(differences: Differences) -> np.ndarray:
    """Of each seed: the mean over settings of the means over clients, (..., seeds)."""
    means = []
    for settings in differences:
        of_settings = [clients.mean(axis=-1) for clients in settings]
        means.append(np.mean(of_settings, axis=0))
    return np.stack(means, axis=-1)


def alike(differences: Differences) -> bool:
    """Whether the mean differences of all seeds are the same (`EQUAL`)."""
    spread = np.ptp(seed_means(differences))
    return bool(spread <= EQUAL)


def interval(
    differences: Differences, level: float = LEVEL, resamples: int = RESAMPLES
) -> tuple[float, float, Literal["t", "bootstrap"]] | None:
    """The 1 - `level` interval of the mean difference of new seeds, and how it came about.

    None for one seed, or if all seeds have the same difference: without a spread it would claim
    certainty.

    Seeds are what is independent. Below `FEW` of them it is Student's t over their means; else the
    outer ends of that and of the hierarchical bootstrap, unless the bootstrap is infinite, as where
    all but a seed or two are equal. Alone, t covers skewed seeds too rarely (88 to 93 %), and the
    bootstrap 91 to 94 %; the outer ends 92 to 97 % (docs/decisions/0023).
    """
    if len(differences) < 2 or alike(differences):
        return None
    if len(differences) >= FEW:
        low, high = map(float, outer(differences, level, resamples))
        if math.isfinite(low) and math.isfinite(high):
            return low, high, "bootstrap"
    low, high = map(float, students(differences, level))
    return low, high, "t"


def outer(
    differences: Differences, level: float = LEVEL, resamples: int = RESAMPLES
) -> tuple[Any, Any]:
    """The outer ends of the intervals of Student's t and of the bootstrap."""
    lows, highs = zip(
        students(differences, level),
        bootstrap(differences, level, resamples),
        strict=True,
    )
    return np.minimum(*lows), np.maximum(*highs)


def students(differences: Differences, level: float = LEVEL) -> tuple[Any, Any]:
    """Student's t over the means of seeds."""
    return _students_of(seed_means(differences), level)


def _students_of(means: np.ndarray, level: float = LEVEL) -> tuple[Any, Any]:
    """Student's interval of the mean of `means`, (..., n)."""
    middle = means.mean(axis=-1)
    quantile = stats.t.ppf(1 - level / 2, means.shape[-1] - 1)
    reach = quantile * stats.sem(means, axis=-1)
    return middle - reach, middle + reach


def bootstrap(
    differences: Differences, level: float = LEVEL, resamples: int = RESAMPLES
) -> tuple[Any, Any]:
    """Hierarchical bootstrap-t: seeds are drawn with replacement, then clients within each of them.

    Studentised by the spread over seeds (Davison and Hinkley, 1997, section 5.2.1). Each call draws
    the same.
    """
    means = seed_means(differences)
    middle = means.mean(axis=-1)
    error = stats.sem(means, axis=-1)
    drawn = resampled(differences, resamples, np.random.default_rng(0))
    distances = drawn.mean(axis=-1) - middle[..., None]
    # all draws of one seed whose clients are alike
    with np.errstate(divide="ignore", invalid="ignore"):
        t = distances / stats.sem(drawn, axis=-1)
    tails = [level / 2, 1 - level / 2]
    low, high = np.quantile(t, tails, axis=-1, method="inverted_cdf")
    return middle - high * error, middle - low * error


def resampled(
    differences: Differences,
    resamples: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Means of drawn seeds over drawn clients, (..., resamples, seeds); clients are drawn anew each
    time that a seed is drawn."""
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
    """The mean of each of `times` draws of all clients with replacement, (..., times)."""
    count = clients.shape[-1]
    shares = np.full(count, 1 / count)
    counts = rng.multinomial(count, shares, size=times)
    return np.asarray(clients @ counts.T / count)


def of_means(values: np.ndarray) -> tuple[float, float] | None:
    """Student's interval of the mean of `values`; None of fewer than two, or of equal ones."""
    if len(values) < 2 or np.ptp(values) <= EQUAL:
        return None
    low, high = _students_of(values)
    return float(low), float(high)


def welch(
    ours: Sequence[float],
    mean: float,
    std: float | None,
    count: int,
) -> tuple[float, float]:
    """Welch's interval for the mean of `ours`, two values or more, less another `mean`.

    Args:
        mean: of `count` values with the standard deviation `std`.
        std: None: not known; then that of `ours` stands in, with the degrees of freedom of `ours`.
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


def noise(
    ours: np.ndarray,
    alone: np.ndarray,
    tested: np.ndarray,
) -> np.ndarray:
    """The difference of two accuracies on the same `tested` samples that chance alone may give,
    one-sided at 5 %; `EQUAL` where no samples are.

    The variance is that of two independent proportions, (a (1 - a) + b (1 - b)) / n: an upper bound
    where both models are wrong about the same samples. One sample is never enough. With few samples
    more than 5 % are beyond it, if the errors of the two models are independent: up to 10.9 % with
    3 samples, 10.2 with 7, 7.5 with 8 to 30. That another training would score otherwise is left
    out.
    """
    samples = np.where(tested > 0, tested, np.inf)
    variance = ours * (1 - ours) + alone * (1 - alone)
    reach = ONE_SIDED * np.sqrt(variance / samples)
    return np.maximum(reach, 1 / samples) + EQUAL


# ---------------------------------------------------------------- tests


def levelled(values: Any) -> np.ndarray:
    """`values`, (n,), with each group of the same ones (`EQUAL`) set to the least of the group.

    Rounding to a grid would separate some near ones, and ranks would not tie.
    """
    levels = np.array(values, dtype=float)
    order = np.argsort(levels, kind="stable")
    ascending = levels[order]
    begins = np.diff(ascending, prepend=-np.inf) > EQUAL
    group = np.cumsum(begins) - 1
    levels[order] = ascending[begins][group]
    return levels


def _signed(differences: Sequence[float]) -> np.ndarray:
    """Differences whose sizes, and 0 among them, are `levelled`."""
    signs = np.sign(differences)
    sizes = np.abs(differences)
    return np.asarray(signs * levelled([0.0, *sizes])[1:])


def wilcoxon(differences: Sequence[float]) -> float:
    """Two-sided p of Wilcoxon's signed ranks, without the pairs that are equal; exact where scipy
    has it exact."""
    signed = _signed(differences)
    unequal = signed[signed != 0]
    return float(stats.wilcoxon(unequal).pvalue) if len(unequal) else 1.0


def over_seeds(differences: Differences) -> float:
    """Two-sided p of Student's t over the means of seeds, at least two.

    Where these are all the same there is no spread to go by: then that of their signs, 2 / 2^n, or
    1 if they are 0.
    """
    means = seed_means(differences)
    if alike(differences):
        differ = abs(means.mean()) > EQUAL
        return 2 / 2 ** len(means) if differ else 1.0
    return float(stats.ttest_1samp(means, 0).pvalue)


def holm(p: Sequence[float]) -> list[float]:
    """p values corrected for their number (Holm, 1979), in the order of `p`."""
    values = np.asarray(p, dtype=float)
    order = np.argsort(values, kind="stable")
    factors = np.arange(len(values), 0, -1)
    steps = np.maximum.accumulate(values[order] * factors)
    corrected = np.empty(len(values))
    corrected[order] = np.minimum(1.0, steps)
    return [float(value) for value in corrected]


def pairs_needed(comparisons: int) -> int:
    """The fewest pairs from which Wilcoxon's p, corrected for so many comparisons, can be at or
    below `LEVEL`.

    The least p of n pairs is 2 / 2**n.
    """
    factor = max(1, comparisons)
    pairs = math.ceil(1 + math.log2(factor / LEVEL))
    return max(MIN_PAIRS, pairs)


def tally(differences: Sequence[float]) -> tuple[int, int, int]:
    """How many differences are above, at and below 0: wins, ties, losses."""
    signed = _signed(differences)
    wins, losses = int((signed > 0).sum()), int((signed < 0).sum())
    return wins, len(signed) - wins - losses, losses


def friedman(scores: np.ndarray) -> tuple[float, float, np.ndarray]:
    """Friedman's chi-square and p over settings, and the mean rank of each method (1 is best; ties
    share theirs).

    Args:
        scores: (settings, methods), higher is better.
    """
    scores = np.apply_along_axis(levelled, 1, scores)
    ranks = stats.rankdata(-scores, axis=1).mean(axis=0)
    spreads = np.ptp(scores, axis=1)
    if spreads.max() == 0:  # nothing differs anywhere, and the statistic is 0 / 0
        return 0.0, 1.0, ranks
    test = stats.friedmanchisquare(*scores.T)
    return float(test.statistic), float(test.pvalue), ranks


def pairwise(scores: np.ndarray) -> np.ndarray:
    """Wilcoxon's p between all methods over settings, Holm-corrected, (methods, methods); 1 on the
    diagonal.

    In place of ranks' differences, which depend on the other methods (Benavoli, Corani, Mangili,
    JMLR 2016).
    """
    methods = scores.shape[1]
    rows, columns = np.triu_indices(methods, k=1)
    differences = scores[:, rows] - scores[:, columns]
    table = np.eye(methods)
    table[rows, columns] = holm([wilcoxon(pair) for pair in differences.T])
    return np.maximum(table, table.T)


def cliques(ranks: np.ndarray, p: np.ndarray) -> list[list[int]]:
    """The largest groups of methods next to each other in rank, best first, of which no two differ
    at `LEVEL`."""
    order = np.argsort(ranks, kind="stable").tolist()
    groups: list[list[int]] = []
    end = 0  # behind the last method of a group
    for first in range(len(order)):
        group = order[first : first + 1]
        for method in order[first + 1 :]:
            if not (p[method, group] > LEVEL).all():
                break
            group.append(method)
        if len(group) > 1 and first + len(group) > end:
            groups.append(group)
        end = max(end, first + len(group))
    return groups
