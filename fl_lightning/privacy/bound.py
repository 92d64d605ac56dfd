"""A lower bound of epsilon, with a confidence, from guesses of coins that a mechanism should hide.

Steinke, Nasr, Jagielski: Privacy Auditing with One (1) Training Run. NeurIPS 2023. Each of m
canaries is in or out by a fair coin of its own; who sees what leaves the mechanism guesses r of the
coins. With epsilon and delta, no guesser is right more often than randomised response with
e^epsilon to 1, but for a share of delta (their Theorem 5.2).
"""

import math

CONFIDENCE = 0.95
"""Of bounds and intervals: the field's habit."""
LARGEST = 50.0
"""Beyond it (ours) no number of guesses reaches."""


def lower_bound(
    canaries: int,
    guesses: int,
    right: int,
    delta: float,
) -> float:
    """Return the largest epsilon that `right` of `guesses` refute with `CONFIDENCE`; 0: none.

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
    """Return the greatest probability of v or more right guesses,
    P[B >= v] + 2 m delta max_i P[v > B >= v - i] / i."""
    from scipy.stats import binom

    share = 1 / (1 + math.exp(-epsilon))
    below = [
        float(binom.cdf(k, r, share)) for k in range(-1, v)
    ]  # P[B <= k] for k from -1 to v - 1
    beyond = max(((below[-1] - below[v - i]) / i for i in range(1, v + 1)), default=0.0)
    return min(1.0, float(binom.sf(v - 1, r, share)) + 2 * m * delta * beyond)


def share_right(guesses: int, right: int) -> tuple[float, float]:
    """Return Clopper and Pearson's interval of the share of right guesses."""
    from scipy.stats import binomtest

    interval = binomtest(right, guesses).proportion_ci(CONFIDENCE, "exact")
    return float(interval.low), float(interval.high)
