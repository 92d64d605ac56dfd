"""A lower bound on epsilon, with a confidence, from guesses of coins that a mechanism should hide.

Steinke, Nasr, Jagielski: Privacy Auditing with One (1) Training Run. NeurIPS 2023. Each of m
canaries is in or out by its own fair coin; an observer of the mechanism's output guesses r of the
coins. With epsilon and delta, no observer guesses right more often than randomised response at odds
e^epsilon to 1, up to a term in delta (their Theorem 5.2).
"""

import math

CONFIDENCE = 0.95
"""Confidence of bounds and intervals: usual in the field."""
LARGEST = 50.0
"""The greatest bound that is searched (ours): no number of guesses gives more."""


def lower_bound(
    canaries: int,
    guesses: int,
    right: int,
    delta: float,
) -> float:
    """Return the lower bound on epsilon: the largest epsilon that is refuted, with `CONFIDENCE`, if
    `right` of `guesses` are right; 0: none is.

    Raises:
        ValueError: more right than guessed, or more guesses than canaries.
    """
    if not 0 <= right <= guesses <= canaries:
        raise ValueError(f"{right} right of {guesses} guesses about {canaries} canaries")
    low = 0.0
    high = LARGEST
    if _chance(canaries, guesses, right, 0.0, delta) > 1 - CONFIDENCE:
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        refuted = _chance(canaries, guesses, right, middle, delta) <= 1 - CONFIDENCE
        low, high = (middle, high) if refuted else (low, middle)
    return low


def _chance(
    m: int,
    r: int,
    v: int,
    epsilon: float,
    delta: float,
) -> float:
    """Return the greatest probability, under (epsilon, delta)-privacy, that at least v of r guesses
    about m canaries are right: P[B >= v] + 2 m delta max_i P[v > B >= v - i] / i."""
    from scipy.stats import binom

    share = 1 / (1 + math.exp(-epsilon))
    below = binom.cdf(range(-1, v), r, share)  # P[B <= k] for k from -1 to v - 1
    beyond = max(((below[-1] - below[v - i]) / i for i in range(1, v + 1)), default=0.0)
    return min(1.0, float(binom.sf(v - 1, r, share)) + 2 * m * delta * beyond)


def share_right(guesses: int, right: int) -> tuple[float, float]:
    """Return the Clopper-Pearson interval of the probability of a right guess."""
    from scipy.stats import binomtest

    interval = binomtest(right, guesses).proportion_ci(CONFIDENCE, "exact")
    return float(interval.low), float(interval.high)
