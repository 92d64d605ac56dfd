"""Epsilon of Gaussian noise, by the package dp-accounting: privacy loss distributions, composed.

A mechanism is one kind of message: a vector whose norm is at most the clip, with Gaussian noise of
`noise` times the clip on each number. Adding or removing what a client (or a sample) contributes
moves the vector by one clip at most; putting another contribution in its place moves it by two,
which counts as noise of half the size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fl_lightning.foundation.errors import BadInput

DELTA = 1e-5
"""The default of every `delta`: the field's habit, below one over the samples of a small data
set."""
FINEST, SHARE = 1e-4, 1e-4
"""Steps of the grid of privacy losses: dp-accounting's default, and where epsilon is large this
share of it."""
COARSE, SAMPLED = 1e-3, 3e-4
"""Where batches are sampled: this share of epsilon, at most so much. Against steps of 1e-4 (50
drawn settings of up to 3,000 steps) epsilon differs by 1e-3 of it at most."""
LARGE = 1e4
"""Beyond it a grid of losses would fill the memory: dp-accounting's exact epsilon of the composed
Gaussians is given, of which sampling would take a part away."""
ORDERS = (*range(2, 65), 96, 128, 256)
"""Of Renyi divergences: dp-accounting's whole numbers; the fractions between them take most of the
time."""
LEAST_NOISE = 1e-100
"""Below it (ours) its square is 0 to a computer."""
MOST_NOISE = 1e4
"""Beyond it (ours) nothing is left of what is sent."""


@dataclass(frozen=True)
class Mechanism:
    """Messages of one kind: noise in units of the clip, and how many there are.

    Args:
        sampled: probability with which a sample is in a message (Poisson sampling); 1: always.
        cohort: each message is of so many of so many clients, drawn without replacement; (0, 0): of
            all.
    """

    noise: float
    times: int
    sampled: float = 1.0
    cohort: tuple[int, int] = (0, 0)


def sampling_rate(samples: int, batch_size: int) -> float:
    """Return the probability that a sample is in a batch (Poisson sampling)."""
    return min(1.0, batch_size / samples) if samples else 0.0


def epsilon(
    mechanisms: Sequence[Mechanism],
    delta: float,
    *,
    replace_one: bool = False,
) -> float:
    """Epsilon at `delta` of all messages together; infinite where one has no noise, or next to
    none.

    `replace_one`: of putting another contribution in a client's place; else of adding or removing
    it. Cohorts drawn without replacement are accounted for replacing alone, by Renyi divergences
    (Wang, Balle, Kasiviswanathan, AISTATS 2019): a contribution of 0 is another contribution, and
    so the same epsilon holds for removing it.
    """
    sent = tuple(
        sorted(
            (m for m in mechanisms if m.times),
            key=lambda m: (m.noise, m.times, m.sampled, m.cohort),
        )
    )
    if not sent:
        return 0.0
    if any(m.noise < LEAST_NOISE for m in sent):
        return math.inf
    return _epsilon(sent, delta, replace_one)


@lru_cache(maxsize=4096)
def _epsilon(
    mechanisms: tuple[Mechanism, ...],
    delta: float,
    replace_one: bool,
) -> float:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    relation = dp_accounting.NeighboringRelation
    drawn = any(m.cohort[0] for m in mechanisms)
    half = 0.5 if replace_one or drawn else 1.0
    multiplier = 1 / math.sqrt(sum(m.times / (half * m.noise) ** 2 for m in mechanisms))
    with np.errstate(all="ignore"):  # next to no loss: its logarithm is of 0
        # without sampling, which lessens it
        about = float(dp_accounting.get_epsilon_gaussian(multiplier, delta))
    if about > LARGE:
        return about
    if drawn:
        renyi = _renyi()
        renyi.compose(_event(mechanisms, half))
        return float(renyi.get_epsilon(delta))
    accountant = PLDAccountant(relation.ADD_OR_REMOVE_ONE, max(FINEST, SHARE * about))
    if all(m.sampled == 1 for m in mechanisms):
        accountant.compose(_event(mechanisms, half))
        return float(accountant.get_epsilon(delta))
    if replace_one:
        raise ValueError("a sampled mechanism is accounted for adding or removing a sample")
    step = _grid(about)
    while True:  # sampling may take most of epsilon away: then the grid was too coarse
        accountant = PLDAccountant(relation.ADD_OR_REMOVE_ONE, step)
        accountant.compose(_event(mechanisms, 1.0))
        sampled = float(accountant.get_epsilon(delta))
        if step <= (valid := _grid(sampled)):
            return sampled
        step = valid


def _grid(size: float) -> float:
    """Steps of the grid of an epsilon of about this size, of sampled batches."""
    return max(FINEST, min(COARSE, SAMPLED * size), SHARE * size)


def _event(mechanisms: Sequence[Mechanism], half: float) -> Any:
    import dp_accounting as dp

    parts = []
    for m in mechanisms:
        event = dp.GaussianDpEvent(half * m.noise)
        if m.sampled < 1:
            event = dp.PoissonSampledDpEvent(m.sampled, event)
        if m.cohort[0]:
            event = dp.SampledWithoutReplacementDpEvent(
                m.cohort[1],
                m.cohort[0],
                event,
            )
        parts.append(dp.SelfComposedDpEvent(event, m.times))
    return dp.ComposedDpEvent(parts)


def _renyi() -> Any:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    return RdpAccountant(ORDERS, dp_accounting.NeighboringRelation.REPLACE_ONE)


def calibrated(
    make: Callable[[float], Sequence[Mechanism]], target: float, delta: float, key: str
) -> float:
    """The least noise whose mechanisms `make(noise)` keep epsilon at `target`, by dp-accounting's
    calibration.

    Raises:
        BadInput: for `key`, where no noise up to `MOST_NOISE` does.
    """
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    requirement = f"no noise up to {MOST_NOISE:g} clips keeps epsilon so small at delta {delta:g}"
    if not target > 0 or epsilon(make(MOST_NOISE), delta) > target:
        raise BadInput(key, target, requirement)
    sampled = any(m.sampled < 1 for m in make(1.0))
    step = _grid(target) if sampled else max(FINEST, SHARE * target)
    least = 1.0
    while least > 1e-6 and epsilon(make(least), delta) <= target:
        least /= 2
    most = max(1.0, 2 * least)
    while epsilon(make(most), delta) > target:
        most *= 2
    drawn = any(m.cohort[0] for m in make(1.0))
    noise = dp.calibrate_dp_mechanism(
        _renyi if drawn else lambda: PLDAccountant(value_discretization_interval=step),
        lambda noise: _event([m for m in make(noise) if m.times], 0.5 if drawn else 1.0),
        target,
        delta,
        dp.ExplicitBracketInterval(least, most),
        tol=1e-4 * least,
    )
    return float(noise)


def check_delta(
    key: str,
    delta: float,
    samples: int,
) -> None:
    """Raise `BadInput` unless `delta` lies above 0 and below one over the training samples of all
    clients."""
    requirement = (
        f"it must lie in (0, {1 / samples:.3g}), one over the {samples} training samples: a delta "
        f"above that lets"
    )
    if not 0 < delta < 1 / samples:
        raise BadInput(key, delta, f"{requirement} a mechanism publish a whole sample")
