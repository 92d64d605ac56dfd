"""Epsilon of Gaussian noise, by the package dp-accounting: privacy loss distributions, composed.

A mechanism is one kind of message: a vector whose norm is at most the clip, with Gaussian noise of
`noise` times the clip on each number. Adding or removing what a client (or a sample) contributes
moves the vector by at most one clip; replacing it by another contribution moves the vector by two,
as if the noise had half the size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fl_lightning.foundation.errors import BadInput, check

DELTA = 1e-5
"""The default of every `delta`: usual in the field, and below one over the samples of a small data
set."""
FINEST, SHARE = 1e-4, 1e-4
"""Step of the grid of privacy losses: FINEST, dp-accounting's default, or this SHARE of a large
epsilon."""
COARSE, SAMPLED = 1e-3, 3e-4
"""If batches are sampled, the step is the share SAMPLED of epsilon, at most COARSE. Compared with
steps of 1e-4 (50 drawn settings of up to 3,000 steps) epsilon differs by 1e-3 of it at most."""
LARGE = 1e4
"""Above it a grid of losses would fill the memory, and epsilon is dp-accounting's exact one of the
composed Gaussians; it ignores sampling, which would lower it."""
ORDERS = (*range(2, 65), 96, 128, 256)
"""Orders of Renyi divergences: dp-accounting's whole numbers; the fractions between them take most
of the time."""
LEAST_NOISE = 1e-100
"""Noise below it (ours) has a square of 0 in floating point, and counts as none."""
MOST_NOISE = 1e4
"""The greatest noise that is tried (ours): it leaves nothing of what is sent."""


@dataclass(frozen=True, order=True)
class Mechanism:
    """Messages of one kind.

    Args:
        noise: standard deviation of the noise, in multiples of the clip.
        times: number of messages.
        sampled: probability that a sample is in a message (Poisson sampling); 1: always.
        cohort: (k, n): k of n clients, drawn without replacement, are in each message; (0, 0): all.
    """

    noise: float
    times: int
    sampled: float = 1.0
    cohort: tuple[int, int] = (0, 0)


def sampling_rate(samples: int, batch_size: int) -> float:
    """Return the probability that a sample is in a batch (Poisson sampling); at most 1."""
    return min(1.0, batch_size / samples) if samples else 0.0


def epsilon(
    mechanisms: Sequence[Mechanism],
    delta: float,
    *,
    replace_one: bool = False,
) -> float:
    """Return epsilon at `delta` of all messages together; infinite if one has no noise, or almost
    none.

    If cohorts are drawn without replacement, neighbouring runs are always those in which a client's
    contribution is replaced by another (Renyi divergences; Wang, Balle, Kasiviswanathan, AISTATS
    2019). Their epsilon also holds for runs in which it is removed, since to remove a contribution
    is to replace it by 0.

    Args:
        mechanisms: one for each kind of message.
        delta: the probability with which epsilon may be exceeded.
        replace_one: compare runs in which a client's contribution is replaced by another; else runs
            in which it is added or removed.
    """
    sent = tuple(sorted(m for m in mechanisms if m.times))
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
    with np.errstate(all="ignore"):  # the logarithm of 0, if there is almost no loss
        # an upper bound: sampling is ignored
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
    while True:  # sampling may lower epsilon so far that the grid was too coarse
        accountant = PLDAccountant(relation.ADD_OR_REMOVE_ONE, step)
        accountant.compose(_event(mechanisms, 1.0))
        sampled = float(accountant.get_epsilon(delta))
        if step <= (valid := _grid(sampled)):
            return sampled
        step = valid


def _grid(size: float) -> float:
    """Return the step of the grid for an epsilon of about `size`, of sampled batches."""
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
    make: Callable[[float], Sequence[Mechanism]],
    target: float,
    delta: float,
    key: str,
) -> float:
    """Return the least noise with which the mechanisms `make(noise)` have an epsilon of at most
    `target`, by dp-accounting's calibration.

    Raises:
        BadInput: for `key`, if no noise up to `MOST_NOISE` does.
    """
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    problem = f"no noise up to {MOST_NOISE:g} clips keeps epsilon so small at delta {delta:g}"
    if not target > 0 or epsilon(make(MOST_NOISE), delta) > target:
        raise BadInput(key, target, f"{problem}; raise it")
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
        f"it must lie in (0, {1 / samples:.3g}), one over the {samples} training samples: with a "
        f"greater delta a whole sample may be published"
    )
    check(
        key,
        delta,
        0 < delta < 1 / samples,
        requirement,
    )
