"""The statistics of `fl-train worth` against closed forms, scikit-learn and simulated silos."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from scipy.special import softmax
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from fl_lightning.lab.worth import statistics as worth
from fl_lightning.lab.worth.statistics import Estimate, ScoredSamples, Scores


def folds_of(cycles, n, rng, folds=5):
    return np.stack([rng.permutation(np.arange(n) % folds) for _ in range(cycles)])


def made(n=60, cycles=3, classes=2, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    both = []
    for skill in (1.0, 1.5):
        outputs = rng.normal(0, 1, (cycles, n, classes)) + skill * np.eye(classes)[labels]
        both.append(Scores((outputs.argmax(-1) == labels).astype(float), outputs))
    return both[0], both[1], ScoredSamples(labels, folds_of(cycles, n, rng), np.arange(n))


def estimated(metric, alone, ours, samples):
    estimated = worth.estimate(metric, alone, ours, samples)
    assert estimated is not None
    return estimated


def test_one_cycle_of_accuracy_is_the_formula_of_the_mean():
    """One cycle: V_s is the variance of the mean, a half a made-up sample, V_x what fits add."""
    alone, ours, samples = made(cycles=1)
    n, d = 60, (ours.right - alone.right)[0]
    got = estimated("accuracy", alone, ours, samples)
    spread, a = d.var(ddof=1) / n, 0.5 / (n * (n - 1))
    by_fit = sum(float((d - d.mean())[samples.folds[0] == k].sum()) ** 2 for k in range(5)) / n**2
    common = max(0.0, by_fit - float(((d - d.mean()) ** 2).sum()) / n**2)
    variance = spread + a + common
    degrees = variance**2 / ((spread + a) ** 2 / (n - 1) + common**2 / 4)
    assert got.gain == pytest.approx(d.mean())
    assert got.variance == pytest.approx(variance)
    assert got.degrees == pytest.approx(degrees)
    assert got.half == pytest.approx(1.1 * stats.t.ppf(0.975, degrees) * math.sqrt(variance))


def test_more_cycles_are_no_more_samples():
    """The same answers in every cycle: the interval is that of one cycle."""
    alone, ours, samples = made(cycles=1)
    again = ScoredSamples(samples.labels, np.repeat(samples.folds, 6, 0), samples.units)
    once = estimated("accuracy", alone, ours, samples)
    often = estimated(
        "accuracy", Scores(np.repeat(alone.right, 6, 0)), Scores(np.repeat(ours.right, 6, 0)), again
    )
    assert often.gain == pytest.approx(once.gain)
    spread = (ours.right - alone.right)[0].var(ddof=1) / 60 + 0.5 / (60 * 59)
    assert often.variance >= spread * (1 - 1e-9)


def test_samples_of_one_person_count_once():
    """Every sample four times, as of one person: the variance is that of the persons."""
    alone, ours, samples = made(cycles=2)
    four = [Scores(np.repeat(one.right, 4, 1)) for one in (alone, ours)]
    repeated = ScoredSamples(
        np.repeat(samples.labels, 4), np.repeat(samples.folds, 4, 1), np.repeat(samples.units, 4)
    )
    apart = ScoredSamples(repeated.labels, repeated.folds, np.arange(240))
    once, persons = (
        estimated("accuracy", alone, ours, samples),
        estimated("accuracy", *four, repeated),
    )
    assert persons.gain == pytest.approx(once.gain)
    assert persons.half > 1.15 * estimated("accuracy", *four, apart).half
    # half a made-up sample is of 240, not of 60
    assert persons.half == pytest.approx(once.half, rel=0.04)


def test_one_recording_tells_nothing():
    """500 windows of one recording, all judged better: they count as one, and the interval has
    every gain in it."""
    _, _, samples = made(n=500)
    of_one = ScoredSamples(samples.labels, samples.folds, np.zeros(500, int))
    alone, ours = Scores(np.zeros((3, 500))), Scores(np.ones((3, 500)))
    got = estimated("accuracy", alone, ours, of_one)
    assert got.gain == pytest.approx(1) and got.half > 1
    assert estimated("accuracy", alone, ours, samples).half < 0.01


def test_intervals_over_recordings_cover():
    """Of 200 silos with 12 windows in each of 10 recordings that differ: the intervals cover the
    mean over recordings; as if windows were independent, they would not."""
    rng, covered, naive = np.random.default_rng(4), 0, 0
    for _ in range(200):
        effect, units = rng.normal(0.05, 0.2, 10), np.repeat(np.arange(10), 12)
        folds = folds_of(2, 120, rng)
        alone = (rng.random((2, 120)) < 0.5).astype(float)
        ours = (rng.random((2, 120)) < np.clip(0.5 + effect, 0, 1)[units]).astype(float)
        for kind in (units, np.arange(120)):
            got = estimated(
                "accuracy", Scores(alone), Scores(ours), ScoredSamples(units % 2, folds, kind)
            )
            inside = abs(got.gain - 0.05) <= got.half
            covered += inside and kind is units
            naive += inside and kind is not units
    assert 0.92 * 200 <= covered < 200 and naive < 0.88 * 200


@pytest.mark.parametrize("classes", [2, 4])
def test_metrics_are_scikit_learns(classes):
    """Balanced accuracy over a cycle; AUROC of one fold, where all scores are of one model."""
    alone, _, samples = made(cycles=1, classes=classes)
    one_cycle = ScoredSamples(samples.labels, np.zeros((1, 60), int), samples.units)
    answers = alone.outputs[0].argmax(-1)  # type: ignore[index]
    assert worth.value("balanced_accuracy", alone, samples) == pytest.approx(
        balanced_accuracy_score(samples.labels, answers)
    )
    chances = softmax(alone.outputs[0], -1)  # type: ignore[index]
    truth = roc_auc_score(
        samples.labels, chances[:, 1] if classes == 2 else chances, multi_class="ovr"
    )
    assert worth.value("auroc", alone, one_cycle) == pytest.approx(truth)
    assert worth.by_fold("auroc", alone, one_cycle)[0, 0] == pytest.approx(truth)


def fixed_models(rng, n, skills, cycles=1):
    """The scores of two models that are the same in all folds, and differ by chance."""
    labels = rng.permutation(np.arange(n) % 2)
    shared = rng.normal(size=(n, 2))
    both = []
    for skill in skills:
        outputs = skill * np.eye(2)[labels] + 0.8 * shared + 0.6 * rng.normal(size=(n, 2))
        both.append(Scores(np.zeros((cycles, n)), np.repeat(outputs[None], cycles, 0)))
    return *both, ScoredSamples(labels, folds_of(cycles, n, rng), np.arange(n))


def test_auroc_counts_pairs_once():
    """Two classes, one fold: DeLong's variances of placements, less what pairs owe to neither of
    their two samples, and half a made-up sample of each class."""
    alone, ours, samples = made(cycles=1, n=80)
    one_cycle = ScoredSamples(samples.labels, np.zeros((1, 80), int), samples.units)
    got = estimated("auroc", alone, ours, one_cycle)
    ranked = []
    for one in (alone, ours):
        chance = softmax(one.outputs[0], -1)[:, 1]  # type: ignore[index]
        positive, negative = chance[one_cycle.labels == 1], chance[one_cycle.labels == 0]
        ranked.append(np.sign(positive[:, None] - negative) / 2 + 0.5)
    difference = ranked[1] - ranked[0]
    delong = sum(difference.mean(axis).var(ddof=1) / 40 for axis in (0, 1))
    pairs = difference.var() / 40**2
    made_up = 2 * 0.5 * (2 / 40**2) ** 2 * 40 / 39
    assert got.variance == pytest.approx(delong - pairs + made_up)


def test_aurocs_pairs_are_of_persons():
    """Every sample three times, as of one person: the interval stays about as wide."""
    alone, ours, samples = made(cycles=2)
    thrice = [Scores(*(np.repeat(x, 3, 1) for x in (s.right, s.outputs))) for s in (alone, ours)]
    repeated = ScoredSamples(
        *(np.repeat(x, 3, -1) for x in (samples.labels, samples.folds, samples.units))
    )
    once, persons = estimated("auroc", alone, ours, samples), estimated("auroc", *thrice, repeated)
    assert persons.gain == pytest.approx(once.gain)
    apart = replace(repeated, units=np.arange(180))
    assert persons.half > 1.05 * estimated("auroc", *thrice, apart).half
    # two ranks of a made-up sample are less among three times as many
    assert persons.half == pytest.approx(once.half, rel=0.06)


@pytest.mark.sampled("60")
@pytest.mark.parametrize("n", [60, 200])
def test_fixed_models_owe_nothing_to_luck_in_auroc(n):
    """One cycle of models that are the same in all folds: V_x is near 0, and the interval as wide
    as it must be."""
    rng, ends, gains, common = np.random.default_rng(0), [], [], []
    truth = stats.norm.cdf(1.3) - stats.norm.cdf(1.0)
    for _ in range(250):
        got = estimated("auroc", *fixed_models(rng, n, (1.0, 1.3)))
        ends.append(got.ends)
        gains.append(got.gain)
        common.append(got.common / got.variance)
    low, high = np.transpose(ends)
    assert np.mean(common) < 0.1
    assert 0.95 < np.median(high - low) / 2 / (1.96 * np.std(gains)) < 1.25
    assert np.mean((low < truth) & (truth < high)) >= 0.95


def test_models_that_rank_all_pairs_right_have_a_width():
    """Perfect separation: the half-width is that of some four misplaced pairs, and more where one
    model ranks a sample wrong; there it lies on that side."""
    alone, ours, samples = fixed_models(np.random.default_rng(0), 60, (10.0, 10.0))
    got = estimated("auroc", alone, ours, samples)
    assert got.gain == 0 and got.ends == (-got.half, got.half)
    assert 3 < got.half * 60 * 60 / 4 / 5 < 5
    alone.outputs[0, np.flatnonzero(samples.labels == 0)[0]] = [0.0, 30.0]  # type: ignore[index]
    worse = estimated("auroc", alone, ours, samples)
    low, high = worse.ends
    assert worse.gain - low == pytest.approx(worse.half) and high - worse.gain > worse.half


def test_mae_is_better_where_it_is_less():
    _, _, samples = made()
    samples = ScoredSamples(np.zeros(60, int), samples.folds, samples.units)
    errors = np.abs(np.random.default_rng(1).normal(0, 1, (3, 60)))
    got = estimated("mae", Scores(errors), Scores(errors / 2), samples)
    assert got.gain == pytest.approx(errors.mean() / 2)
    assert worth.value("mae", Scores(errors), samples) == pytest.approx(errors.mean())


def test_models_that_agree_have_a_width():
    alone, _, samples = made()
    got = estimated("accuracy", alone, alone, samples)
    assert got.gain == 0 and got.half > 0
    assert got.p_of_no_gain == pytest.approx(0.5)


@pytest.mark.parametrize(
    "low, high, word",
    [
        (0.001, 0.019, "no difference that matters"),
        (0.001, 0.021, "gains"),
        (-0.03, -0.001, "harmed"),
        (-0.03, 0.05, "cannot tell yet"),
        (-0.05, 0.01, "cannot tell yet"),
    ],
)
def test_the_margin_comes_first(low, high, word):
    assert worth.verdict(low, high, 0.02) == word


def test_floors():
    few = np.arange(39) % 2
    assert "39 samples" in worth.why_too_few("accuracy", few)
    assert worth.why_too_few("accuracy", np.arange(40) % 2) == ""
    assert "9 samples outside" in worth.why_too_few("accuracy", (np.arange(100) < 9).astype(int))
    # small classes, but 11 outside the largest
    assert worth.why_too_few("accuracy", np.minimum(np.arange(100), 11)) == ""
    assert "one class" in worth.why_too_few("auroc", np.ones(100, int))
    assert worth.why_too_few("mae", np.zeros(40, int)) == ""


def test_a_winner_is_not_scored_where_it_won():
    """Method k is the best on fold k alone: it is never chosen for it."""
    tables = np.full((3, 2, 1, 3), 0.5)
    for k in range(3):
        tables[k, :, 0, k] = 1.0
    picks, _ = worth.choose_by_other_folds(tables, np.full((2, 1, 3), 10))
    assert all(picks[0, k] != k for k in range(3))
    tables[1, :, 0, :2] = 1.0
    picks, final = worth.choose_by_other_folds(tables, np.full((2, 1, 3), 10))
    assert final == 1 and picks[0, 2] == 1


def test_samples_for_a_half_width():
    """Without luck of fits 1.4² n (h / w)², in two figures, rounded up; with it more, or no number
    at all."""
    one = Estimate(
        gain=0.0, variance=4e-4, degrees=1e9, common=0.0, fits=20, by_cycles=0.0, cycles=4
    )
    assert 1.96 * 100 * (one.half / 0.02) ** 2 == pytest.approx(911, abs=1)
    assert one.samples_for(100, 0.02) == 920 and one.samples_for(100, 1.01 * one.half) == 100
    lucky = replace(one, common=0.2e-4)
    wanted = lucky.samples_for(100, 0.02)
    assert wanted is not None and wanted > 920
    exact = (one.variance - lucky.common) * 100 / wanted + lucky.common  # the variance with so many
    assert 1.4 * one.half * math.sqrt(exact / one.variance) <= 0.02
    assert replace(one, common=1e-4).samples_for(100, 0.02) is None


@pytest.mark.slow
def test_intervals_cover_and_cry_no_wolf():
    """400 silos of 60 whose models are right with fixed chances, sample by sample: 95 % intervals
    cover the true mean, and silos without a gain are hardly ever called so."""
    rng = np.random.default_rng(3)
    covered, false = 0, 0
    for k in range(400):
        n, gain = 60, 0.0 if k % 2 else 0.1
        chance = rng.beta(4, 2, n)
        better = np.clip(chance + gain, 0, 1)
        samples = ScoredSamples(np.arange(n) % 2, folds_of(4, n, rng), np.arange(n))
        alone, ours = (Scores((rng.random((4, n)) < p).astype(float)) for p in (chance, better))
        got = estimated("accuracy", alone, ours, samples)
        truth = gain if gain == 0 else None
        expected = (
            0.0
            if truth == 0.0
            else float(np.mean([np.clip(rng.beta(4, 2, 9999) + 0.1, 0, 1) - 4 / 6]))
        )
        covered += got.gain - got.half <= expected <= got.gain + got.half
        false += (
            truth == 0.0
            and worth.verdict(got.gain - got.half, got.gain + got.half, 0.02) == "gains"
        )
    assert covered >= 0.94 * 400
    assert false <= 5


def test_cycles_cannot_narrow_by_more_than_their_number():
    """Single cycles that differ so much that the formula would promise no width at all."""
    one = Estimate(
        gain=0.0, variance=1e-4, degrees=20, common=0.0, fits=20, by_cycles=2e-3, cycles=4
    )
    assert one.half_after(8) == pytest.approx(one.half / math.sqrt(2))
    assert one.half_after(4) == one.half


def test_heavy_tails_are_seen_in_silos_of_all_sizes():
    """Errors with two degrees of freedom, as far as their largest one shows; normal ones are not
    taken for such."""
    rng = np.random.default_rng(0)
    for n, least in ((60, 0.4), (600, 0.6), (3000, 0.8)):
        one = ScoredSamples(np.zeros(n, int), np.zeros((1, n), int), np.arange(n))
        shares = []
        for draw in (lambda n: rng.standard_t(2, n), rng.standard_normal):
            errors = np.abs([draw(n) for _ in range(100)])
            shares.append(
                np.mean([worth.one_unit_dominates(row[None], row[None], one) for row in errors])
            )
        assert shares[0] > least and shares[1] < 0.1
