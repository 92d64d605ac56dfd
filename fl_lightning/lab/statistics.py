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
"""Paired differences between two methods: of each seed, in each setting, of each client (the last
axis; before it there may be one of many studies, which share the draws of a bootstrap)."""


def seed_means(differences: Differences) -> np.ndarray:
    """Of each seed: the mean over settings of the means over clients, (..., seeds)."""
    means = [
        np.mean([clients.mean(axis=-1) for clients in settings], axis=0) for settings in differences
    ]
    return np.stack(means, axis=-1)


def alike(differences: Differences) -> bool:
    """Whether the mean differences of all seeds are the same (`EQUAL`)."""
    return bool(np.ptp(seed_means(differences)) <= EQUAL)


def interval(
    differences: Differences, level: float = LEVEL, resamples: int = RESAMPLES
) -> tuple[float, float, Literal["t", "bootstrap"]] | None:
    """The 1 - `level` interval of the mean difference of new seeds, and how it came about.

    None of one seed, and of seeds that differ alike: without a spread it would claim certainty.

    Seeds are what is independent: below `FEW` of them Student's t over their means, else the outer
    ends of that and of the hierarchical bootstrap (but where all but a seed or two are alike: then
    it has no end). Alone, t covers skewed seeds too rarely (88 to 93 %), and the bootstrap 91 to 94
    %; the outer ends 92 to 97 % (docs/decisions/0023).
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
    """The lower one of the lower ends of Student's t and of the bootstrap, and the upper one of the
    upper ends."""
    (a, b), (c, d) = students(differences, level), bootstrap(differences, level, resamples)
    return np.minimum(a, c), np.maximum(b, d)


def students(differences: Differences, level: float = LEVEL) -> tuple[Any, Any]:
    """Student's t over the means of seeds."""
    means = seed_means(differences)
    middle, half = (
        means.mean(axis=-1),
        stats.t.ppf(1 - level / 2, means.shape[-1] - 1) * stats.sem(means, axis=-1),
    )
    return middle - half, middle + half


def bootstrap(
    differences: Differences, level: float = LEVEL, resamples: int = RESAMPLES
) -> tuple[Any, Any]:
    """Hierarchical bootstrap-t: seeds are drawn with replacement, then clients within each of them.

    Studentised by the spread over seeds (Davison and Hinkley, 1997, section 5.2.1). Each call draws
    the same.
    """
    means = seed_means(differences)
    middle, error = means.mean(axis=-1), stats.sem(means, axis=-1)
    drawn = resampled(differences, resamples, np.random.default_rng(0))
    # all draws of one seed whose clients are alike
    with np.errstate(divide="ignore", invalid="ignore"):
        t = (drawn.mean(axis=-1) - middle[..., None]) / stats.sem(drawn, axis=-1)
    low, high = np.quantile(t, [level / 2, 1 - level / 2], axis=-1, method="inverted_cdf")
    return middle - high * error, middle - low * error


def resampled(differences: Differences, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Means of drawn seeds over drawn clients, (..., resamples, seeds); of a seed drawn twice
    clients are, too."""
    seeds = rng.integers(len(differences), size=(resamples, len(differences)))
    means = np.empty((*differences[0][0].shape[:-1], *seeds.shape))
    for seed, settings in enumerate(differences):
        places = seeds == seed
        drawn = [_drawn_means(clients, int(places.sum()), rng) for clients in settings]
        means[..., places] = np.mean(drawn, axis=0)
    return means


def _drawn_means(clients: np.ndarray, times: int, rng: np.random.Generator) -> np.ndarray:
    """Means of so many draws with replacement, each of as many clients as there are, (...,
    times)."""
    count = clients.shape[-1]
    counts = rng.multinomial(count, np.full(count, 1 / count), size=times)
    return np.asarray(clients @ counts.T / count)


def of_means(values: np.ndarray) -> tuple[float, float] | None:
    """Student's interval of the mean of `values`; None of fewer than two, or of equal ones."""
    differences = [[np.array([value])] for value in values]
    if len(values) < 2 or alike(differences):
        return None
    low, high = students(differences)
    return float(low), float(high)


def welch(ours: Sequence[float], mean: float, std: float | None, count: int) -> tuple[float, float]:
    """Welch's interval for the mean of `ours`, at least two, less a `mean` over `count` values with
    the standard deviation `std`; None: that of `ours`, whose freedom is then taken."""
    spread = float(np.std(ours, ddof=1))
    parts = [
        (spread**2 / len(ours), len(ours)),
        ((spread if std is None else std) ** 2 / count, count if std is not None else 1),
    ]
    error = math.sqrt(sum(part for part, _ in parts))
    below = sum(part**2 / (number - 1) for part, number in parts if number > 1)
    freedom = (len(ours) - 1) if std is None or not below else error**4 / below
    reach = float(stats.t.ppf(1 - LEVEL / 2, freedom)) * error
    difference = float(np.mean(ours)) - mean
    return difference - reach, difference + reach


def noise(ours: np.ndarray, alone: np.ndarray, tested: np.ndarray) -> np.ndarray:
    """What the difference of two accuracies on the same `tested` samples may be by chance,
    one-sided at 5 %; `EQUAL` where there are none.

    The variance is that of two independent proportions, (a (1 - a) + b (1 - b)) / n: an upper bound
    where both models are wrong about the same samples. One sample is never enough. With few samples
    more than 5 % are beyond it, if the errors of the two models are independent: up to 10.9 % with
    3 samples, 10.2 with 7, 7.5 with 8 to 30. That another training would score otherwise is left
    out.
    """
    samples = np.where(tested > 0, tested, np.inf)
    variance = (ours * (1 - ours) + alone * (1 - alone)) / samples
    return np.maximum(ONE_SIDED * np.sqrt(variance), 1 / samples) + EQUAL


# ---------------------------------------------------------------- tests


def levelled(values: Any) -> np.ndarray:
    """`values`, (n,), where those that are the same (`EQUAL`) are so to the last bit: the least of
    them.

    Rounding would part two that lie on either side of a step, however near they are.
    """
    levels = np.array(values, dtype=float)
    order = np.argsort(levels, kind="stable")
    begins = np.diff(levels[order], prepend=-np.inf) > EQUAL
    levels[order] = levels[order][begins][np.cumsum(begins) - 1]
    return levels


def _signed(differences: Sequence[float]) -> np.ndarray:
    """Differences with sizes levelled, 0 among them."""
    signed = np.asarray(differences, dtype=float)
    return np.asarray(np.sign(signed) * levelled([0.0, *np.abs(signed)])[1:])


def wilcoxon(differences: Sequence[float]) -> float:
    """Two-sided p of Wilcoxon's signed ranks, without the pairs that are equal; exact where scipy
    has it exact."""
    signed = _signed(differences)
    signed = signed[signed != 0]
    return float(stats.wilcoxon(signed).pvalue) if len(signed) else 1.0


def over_seeds(differences: Differences) -> float:
    """Two-sided p of Student's t over the means of seeds, at least two.

    Where these are all the same there is no spread to go by: then that of their signs, 2 / 2^n, or
    1 if they are 0.
    """
    means = seed_means(differences)
    if np.ptp(means) <= EQUAL:
        return 2 / 2 ** len(means) if abs(means.mean()) > EQUAL else 1.0
    return float(stats.ttest_1samp(means, 0).pvalue)


def holm(p: Sequence[float]) -> list[float]:
    """p values corrected for being so many (Holm, 1979): none is below another whose own is
    smaller."""
    order = np.argsort(p, kind="stable")
    steps = np.asarray(p)[order] * np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(steps)) if len(p) else steps
    return [float(value) for value in corrected]


def pairs_needed(comparisons: int, level: float = LEVEL) -> int:
    """The fewest pairs from which Wilcoxon's p, corrected for so many comparisons, can be at or
    below `level`.

    The least p of n pairs is 2 / 2**n.
    """
    return max(MIN_PAIRS, math.ceil(1 + math.log2(max(1, comparisons) / level)))


def tally(differences: Sequence[float]) -> tuple[int, int, int]:
    """How many differences are above, at and below 0: wins, ties, losses."""
    signed = _signed(differences)
    return int((signed > 0).sum()), int((signed == 0).sum()), int((signed < 0).sum())


def friedman(scores: np.ndarray) -> tuple[float, float, np.ndarray]:
    """Friedman's chi-square and p over settings, and the mean rank of each method (1 is best; ties
    share theirs).

    Args:
        scores: (settings, methods), higher is better.
    """
    scores = np.apply_along_axis(levelled, 1, scores)
    ranks = stats.rankdata(-scores, axis=1).mean(axis=0)
    if np.ptp(scores, axis=1).max() == 0:  # nothing differs anywhere, and the statistic is 0 / 0
        return 0.0, 1.0, ranks
    test = stats.friedmanchisquare(*scores.T)
    return float(test.statistic), float(test.pvalue), ranks


def pairwise(scores: np.ndarray) -> np.ndarray:
    """Wilcoxon's p between all methods over settings, Holm-corrected, (methods, methods); 1 on the
    diagonal.

    In place of ranks' differences, which depend on the other methods (Benavoli, Corani, Mangili,
    JMLR 2016).
    """
    rows, columns = np.triu_indices(scores.shape[1], k=1)
    table = np.eye(scores.shape[1])
    table[rows, columns] = holm(
        [wilcoxon(scores[:, i] - scores[:, j]) for i, j in zip(rows, columns, strict=True)]
    )
    return np.maximum(table, table.T)


def cliques(ranks: np.ndarray, p: np.ndarray, level: float = LEVEL) -> list[list[int]]:
    """The largest groups of methods next to each other in rank, best first, of which no two differ
    at `level`."""
    order = [int(k) for k in np.argsort(ranks, kind="stable")]
    groups: list[list[int]] = []
    reached = 0
    for first in range(len(order)):
        last = first + 1
        while last < len(order) and all(
            p[order[last], other] > level for other in order[first:last]
        ):
            last += 1
        if last - first > 1 and last > reached:
            groups.append(order[first:last])
        reached = max(reached, last)
    return groups
