"""The statistics against scipy, brute force, and figures that can be checked in the head."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from fl_lightning.lab import statistics


def seeds_of(values):
    """Differences of clients in one setting, by seed."""
    return [[np.array(clients)] for clients in values]


def test_few_seeds_have_students_interval():
    means = [0.01, 0.03, 0.02, -0.01]
    low, high, kind = statistics.interval(seeds_of([[m - 0.5, m + 0.5] for m in means]))
    wanted = stats.ttest_1samp(means, 0).confidence_interval(0.95)
    assert (low, high) == pytest.approx((wanted.low, wanted.high))
    assert kind == "t"


def test_seeds_count_and_not_their_clients():
    """A hundred clients say no more than two with the same mean."""
    few = statistics.interval(seeds_of([[0.0, 0.2], [0.1, 0.3], [0.3, 0.5]]))
    many = statistics.interval(seeds_of([[0.0, 0.2] * 50, [0.1, 0.3] * 50, [0.3, 0.5] * 50]))
    assert few[:2] == pytest.approx(many[:2])


def test_the_bootstrap_is_that_of_brute_force():
    """Every draw of three seeds, and of two clients in each of them, with its probability."""
    values = [[0.0, 0.1], [0.2, 0.5], [0.4, 0.3]]
    means = np.mean(values, axis=1)
    clients = [[np.mean(pick) for pick in itertools.product(seed, repeat=2)] for seed in values]
    all_of_them = []
    for seeds in itertools.product(range(3), repeat=3):
        for drawn in itertools.product(*(clients[seed] for seed in seeds)):
            all_of_them += [(np.mean(drawn) - means.mean()) / max(np.std(drawn, ddof=1), 1e-300)]
    t = np.quantile(all_of_them, [0.05, 0.95], method="inverted_cdf")
    wanted = means.mean() - t[::-1] * means.std(ddof=1)
    low, high = statistics.bootstrap(seeds_of(values), level=0.1, resamples=200_000)
    assert (low, high) == pytest.approx(tuple(wanted), abs=0.01)


def test_drawn_means_are_of_drawn_seeds_and_their_clients():
    """Variance over draws: between seeds, and within them a client's over their number."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(5, 4)) + rng.normal(size=(5, 1))
    drawn = statistics.resampled(seeds_of(values.tolist()), 40_000, rng)
    assert drawn.shape == (40_000, 5)
    assert drawn.mean() == pytest.approx(values.mean(), abs=0.02)
    assert drawn.var() == pytest.approx(
        values.mean(axis=1).var() + values.var(axis=1).mean() / 4, rel=0.03
    )


def test_from_five_seeds_on_the_outer_ends_of_students_and_the_bootstraps_count():
    values = np.random.default_rng(1).gamma(1.0, 0.01, size=(6, 10)).tolist()
    low, high, kind = statistics.interval(seeds_of(values))
    ends = statistics.t_interval(seeds_of(values)), statistics.bootstrap(seeds_of(values))
    assert kind == "bootstrap"
    assert (low, high) == (min(low for low, _ in ends), max(high for _, high in ends))
    assert low < np.mean(values) < high
    assert [statistics.interval(seeds_of(values[:n]))[2] for n in (4, 5)] == ["t", "bootstrap"]


def test_where_one_seed_differs_there_is_an_interval_and_none_where_nothing_does():
    assert statistics.interval(seeds_of([[0.1, 0.1]] * 7)) is None
    low, high, kind = statistics.interval(seeds_of([[0.0, 0.0]] * 6 + [[0.7, 0.7]]))
    assert kind == "t"
    assert low < 0.1 < high and math.isfinite(high - low)


@pytest.mark.parametrize(
    "differences", [[0.1, 0.2, -0.05, 0.3, 0.15, 0.25, 0.02], [0.1, -0.1, 0.2, 0.2, 0.3, 0.3, 0.4]]
)
def test_wilcoxon_is_that_of_all_signs(differences):
    ranks = stats.rankdata(np.abs(differences))
    signs = np.array(list(itertools.product([-1, 1], repeat=len(ranks))))
    own = abs((np.sign(differences) * ranks).sum())
    assert statistics.wilcoxon(differences) == pytest.approx(
        np.mean(np.abs(signs @ ranks) >= own - 1e-9)
    )
    assert statistics.wilcoxon(differences) == pytest.approx(stats.wilcoxon(differences).pvalue)


def test_equal_pairs_say_nothing():
    assert statistics.wilcoxon([0.0, 1e-17, 0.0]) == 1.0
    assert statistics.wilcoxon([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]) == 2 / 2**6
    assert statistics.tally([0.0, 1e-17, 0.2, -0.1]) == (1, 2, 1)


def test_what_differs_by_the_rounding_of_float32_is_equal():
    """As many right answers, spread over clients in another way; on either side of a step of any
    rounding, too."""
    ours, theirs = (
        np.array(right, dtype=np.float32) / np.float32(36) for right in ((10, 12, 14), (11, 11, 14))
    )
    gap = float(ours.astype(float).mean() - theirs.astype(float).mean())
    assert 1e-12 < abs(gap) < 1e-7
    assert statistics.wilcoxon([gap] * 6) == 1.0
    assert statistics.tally([gap, -gap, 0.1]) == (1, 2, 0)
    # nothing to draw from
    assert statistics.interval(seeds_of([[gap * k] for k in range(6)])) is None
    assert statistics.t_test_over_seeds(seeds_of([[gap * (1 + k / 9)] for k in range(6)])) == 1.0
    scores = np.array([[1 / 128, 1 / 128 + gap, 0.0]] * 6)
    assert statistics.friedman(scores)[2].tolist() == [1.5, 1.5, 3.0]
    assert statistics.pairwise(scores)[0, 1] == 1.0
    assert statistics.levelled([0.3, 0.1 + 1e-8, 0.1, 0.2]).tolist() == [0.3, 0.1, 0.1, 0.2]
    assert statistics.levelled([]).tolist() == []


@pytest.mark.parametrize("seeds", [2, 3, 6])
def test_seeds_without_a_spread_are_not_certain(seeds):
    """Their signs are what is left: Student's t would have p 0."""
    assert statistics.t_test_over_seeds(seeds_of([[0.1, 0.1]] * seeds)) == 2 / 2**seeds
    assert statistics.t_test_over_seeds(seeds_of([[0.1], [0.1 + 1e-8]])) == 0.5
    assert statistics.t_test_over_seeds(seeds_of([[0.0, 0.0]] * seeds)) == 1.0


def test_holms_correction():
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.5, 0.9]) == [1.0, 1.0]
    assert statistics.holm([]) == []


@pytest.mark.parametrize("comparisons", [1, 2, 3, 5, 10])
def test_pairs_needed_are_the_fewest_with_which_a_test_can_succeed(comparisons):
    needed = statistics.pairs_needed(comparisons)
    least = [
        comparisons * stats.wilcoxon(np.arange(1.0, n + 1)).pvalue for n in (needed - 1, needed)
    ]
    assert least[1] <= 0.05
    assert least[0] > 0.05


def test_friedman_is_scipys_and_ranks_are_means():
    scores = np.array([[0.9, 0.8, 0.7], [0.8, 0.85, 0.6], [0.7, 0.6, 0.5], [0.9, 0.5, 0.5]])
    chi_square, p, ranks = statistics.friedman(scores)
    wanted = stats.friedmanchisquare(*scores.T)
    assert (chi_square, p) == pytest.approx((wanted.statistic, wanted.pvalue))
    assert ranks.tolist() == [1.25, (2 + 1 + 2 + 2.5) / 4, (3 + 3 + 3 + 2.5) / 4]
    assert statistics.friedman(np.full((6, 3), 0.5))[:2] == (0.0, 1.0)


def test_pairwise_tests_are_corrected_together():
    base = np.arange(8) / 100
    scores = np.stack([base + 0.5, base + 0.4 + base / 3, base + 0.1 + base / 7], axis=1)
    p = statistics.pairwise(scores)
    assert np.array_equal(p, p.T)
    assert p[0, 1] == p[1, 2] == pytest.approx(3 * 2 / 2**8)


def test_cliques_are_the_largest_runs_of_neighbours_without_a_difference():
    p = np.full((4, 4), 0.5)
    p[0, 3] = p[3, 0] = 0.01
    ranks = np.array([1.0, 2.0, 3.0, 4.0])
    assert statistics.cliques(ranks, p) == [[0, 1, 2], [1, 2, 3]]
    assert statistics.cliques(ranks[::-1], p) == [[3, 2, 1], [2, 1, 0]]
    p[1, 2] = p[2, 1] = 0.04
    assert statistics.cliques(ranks, p) == [[0, 1], [2, 3]]
    assert statistics.cliques(ranks, np.full((4, 4), 0.01)) == []
