"""Epsilon against dp-accounting called by hand, and against the exact condition on Gaussian
noise."""

import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from refusals import refuses
from scipy.optimize import brentq
from scipy.stats import norm

from fl_lightning.privacy.accounting import Mechanism, calibrated, check_delta, epsilon

DRAWS = np.random.default_rng(0)
SETTINGS = [
    (
        [
            (float(z), int(n))
            for z, n in zip(DRAWS.uniform(0.7, 6, kinds), DRAWS.integers(1, 12, kinds), strict=True)
        ],
        float(10 ** -DRAWS.uniform(3, 7)),
    )
    for kinds in DRAWS.integers(1, 5, 50)
]
"""Noise and uploads of each kind, and delta: 50 drawn settings."""
NAMES = [f"setting-{'abcdefghij'[k % 10]}" for k in range(50)]


def by_hand(sent, delta, sampled=1.0):
    """dp-accounting, one event after the other."""
    accountant = PLDAccountant()  # its own default: steps of 1e-4
    for z, n in sent:
        event = dp.GaussianDpEvent(z)
        accountant.compose(dp.PoissonSampledDpEvent(sampled, event) if sampled < 1 else event, n)
    return float(accountant.get_epsilon(delta))


def exact(sent, delta):
    """Balle and Wang (ICML 2018), Theorem 8, for the one Gaussian that the composition is."""
    sigma = 1 / math.sqrt(sum(n / z**2 for z, n in sent))

    def gap(e):
        return float(
            norm.cdf(0.5 / sigma - e * sigma)
            - math.exp(e + norm.logcdf(-0.5 / sigma - e * sigma))
            - delta
        )

    return float(brentq(gap, 0, 500)) if gap(0) > 0 else 0.0


@pytest.mark.sampled("a4")
@pytest.mark.parametrize("sent, delta", SETTINGS, ids=NAMES)
def test_epsilon_is_dp_accountings(sent, delta):
    mine = epsilon([Mechanism(z, n) for z, n in sent], delta)
    assert mine == pytest.approx(by_hand(sent, delta), rel=1e-3)


SAMPLED = [
    (float(DRAWS.uniform(0.6, 8)), int(DRAWS.integers(1, 3000)), float(DRAWS.uniform(0.005, 0.5)))
    for _ in range(50)
]


@pytest.mark.sampled("a0", "a1")
@pytest.mark.parametrize("noise, steps, rate", SAMPLED, ids=NAMES)
def test_epsilon_of_sampled_steps_is_dp_accountings(noise, steps, rate):
    mine = epsilon([Mechanism(noise, steps, rate)], 1e-5)
    assert mine == pytest.approx(by_hand([(noise, steps)], 1e-5, rate), rel=1e-3, abs=1e-4)


@pytest.mark.sampled("a0")
@pytest.mark.parametrize("sent, delta", SETTINGS, ids=NAMES)
def test_epsilon_is_exact(sent, delta):
    mine = epsilon([Mechanism(z, n) for z, n in sent], delta)
    assert mine == pytest.approx(exact(sent, delta), rel=1e-3)
    half = [(z / 2, n) for z, n in sent]
    assert epsilon([Mechanism(z, n) for z, n in sent], delta, replace_one=True) == pytest.approx(
        exact(half, delta), rel=1e-3
    )


def test_what_noise_is_not_there_is_infinite_and_what_is_not_sent_is_nothing():
    assert epsilon([Mechanism(0.0, 1)], 1e-5) == math.inf
    for sampled in (1, 0.5):
        assert epsilon([Mechanism(1e-200, 1, sampled)], 1e-5) == math.inf  # its square is 0
    assert epsilon([Mechanism(0.0, 0)], 1e-5) == epsilon([], 1e-5) == 0
    assert epsilon([Mechanism(1e-4, 3)], 1e-5) == pytest.approx(
        dp.get_epsilon_gaussian(1e-4 / 3**0.5, 1e-5)
    )


@pytest.mark.sampled("[8.0]")
@pytest.mark.parametrize("target", [0.1, 1.0, 8.0, 50.0])
def test_the_noise_of_a_target_is_the_least(target):
    def make(noise):
        return [Mechanism(noise, 10), Mechanism(noise, 1)]

    noise = calibrated(make, target, 1e-5, "key")
    assert target * 0.99 < epsilon(make(noise), 1e-5) <= target * (1 + 1e-4)


def test_what_cannot_be_met():
    with refuses("key=1e-09: no noise up to 10000 clips"):
        calibrated(lambda z: [Mechanism(z, 1000)], 1e-9, 1e-5, "key")
    check_delta("key", 1e-5, 1000)
    for delta in (0.0, 1e-3, 0.5):
        with refuses(r"key=.* one over the 1000 training samples"):
            check_delta("key", delta, 1000)
