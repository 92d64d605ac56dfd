"""What an audit measures: attacks on drawn scores whose AUC is known, and the command on a small
study."""

import json

import numpy as np
import pytest
import torch
import yaml
from lines import run_line
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import norm, spearmanr
from sklearn.metrics import roc_auc_score, roc_curve
from torch.testing import assert_close

from fl_lightning.foundation.metric import NO_TARGET
from fl_lightning.lab.audit import attacks
from fl_lightning.lab.audit.observe import VIEWS, AuditedSamples, Observed, log_odds, observe
from fl_lightning.results.opening import config_of

VIEW = next(iter(VIEWS))


def drawn(seeds, effect, hardness, n=400):
    """Runs in which members' confidence is higher by `effect` standard deviations, and samples
    differ by `hardness`."""
    rng = np.random.default_rng(0)
    hard, runs = rng.normal(0, hardness, n), []
    for seed in range(seeds):
        member = rng.random(n) < 0.5
        score = hard + effect * member + rng.normal(0, 1, n)
        confidence = dict.fromkeys(VIEWS, np.full(n, np.nan)) | {VIEW: score}
        samples = AuditedSamples(
            np.arange(n) % 4, np.arange(n, dtype=np.uint64), member, confidence
        )
        runs.append(Observed("fedavg", seed, samples, np.ones((4, 2)), [0] * 4, None))
    return runs


def row(rows, measure):
    [one] = [r for r in rows if r.measure == measure]
    return one


def test_areas_and_true_positives_are_scikit_learns():
    rng = np.random.default_rng(0)
    member, score = rng.random(3000) < 0.3, rng.normal(size=3000).round(2)
    assert attacks.auc(member, score) == pytest.approx(roc_auc_score(member, score), abs=1e-12)
    false, true, _ = roc_curve(member, score, drop_intermediate=False)
    for level in (0.001, 0.01, 0.3):
        assert attacks._true_positive_rate(member, score, level) == pytest.approx(
            true[false <= level].max(), abs=1e-12
        )


def test_a_loss_threshold_has_the_auc_of_two_gaussians():
    [run] = drawn(1, effect=1.0, hardness=0.0, n=4000)
    rows = attacks.loss_threshold(run)
    one, control = row(rows, "AUC"), row(rows, "AUC, control: memberships shuffled")
    assert one.low <= norm.cdf(1 / 2**0.5) <= one.high and one.high - one.low < 0.05
    assert abs(control.value - 0.5) < 0.01 and control.low < 0.5 < control.high < 0.53
    low = row(rows, "true positives at 1 % false")
    assert low.value == pytest.approx(norm.sf(norm.isf(0.01) - 1), abs=0.03)
    assert row(rows, "AUC, worst client").value >= row(rows, "AUC, mean over clients").value


def test_lira_is_algorithm_1_of_its_paper_with_one_variance():
    """Carlini et al., 2022: written out sample by sample."""
    runs = drawn(5, effect=1.0, hardness=1.0, n=60)
    scores = [run.samples.confidence[VIEW] for run in runs]
    clients, members, ratios = attacks.lira_ratios(
        runs, scores, [run.samples.member for run in runs]
    )
    table, inside = np.array(scores), np.array([run.samples.member for run in runs])
    spread = {}
    for kind in (True, False):
        own = [table[inside[:, j] == kind, j] for j in range(60)]
        spread[kind] = np.concatenate([v - v.mean() for v in own if len(v) > 1]).std() * 2**0.5
    expected = []
    for r in range(5):
        for j in range(60):
            others = np.arange(5) != r
            means = {k: table[others & (inside[:, j] == k), j] for k in (True, False)}
            if len(means[True]) and len(means[False]):
                logs = {k: norm.logpdf(table[r, j], means[k].mean(), spread[k]) for k in means}
                expected.append((r * 10**6 + j % 4, inside[r, j], logs[True] - logs[False]))
    assert 0 < len(expected) < 300
    assert [(c, m) for c, m, _ in expected] == list(zip(clients, members, strict=True))
    assert_allclose(ratios, [value for *_, value in expected], atol=1e-9)


def several_rounds(hardness, gains, seeds=1, n=4000):
    """Runs whose members' confidence is higher by one of `gains` in each round kept, with noise of
    its own."""
    rng = np.random.default_rng(1)
    hard, runs = rng.normal(0, hardness, n), drawn(seeds, 0.0, 0.0, n)
    for run in runs:
        s = run.samples
        rounds = np.stack([hard + gain * s.member + rng.normal(0, 1, n) for gain in gains])
        nothing = dict.fromkeys(VIEWS, np.full(n, np.nan))
        s.confidence = nothing | {VIEW: rounds[-1]}
        s.over_rounds = {
            "mean": nothing | {VIEW: rounds.mean(0)},
            "rise": nothing | {VIEW: rounds[-1] - rounds[0]},
        }
        run.rounds = list(range(1, len(gains) + 1))
    return runs


@pytest.mark.slow
def test_attacks_over_rounds_have_the_auc_of_two_gaussians():
    """Of equal gains the mean over k rounds has k ** 0.5 times the effect; a rise takes out how
    hard a sample is."""
    [run] = several_rounds(0.0, [1.0] * 4)
    by = {r.attack: r for r in attacks.loss_threshold(run) if r.measure == "AUC"}
    last, over = by["loss threshold"], by["loss threshold, mean over rounds"]
    assert (
        last.low
        <= norm.cdf(1 / 2**0.5)
        <= last.high
        < over.low
        <= norm.cdf(4**0.5 / 2**0.5)
        <= over.high
    )
    assert (last.rounds, over.rounds) == (1, 4)
    [run] = several_rounds(10.0, [0.0, 1.0])
    by = {r.attack: r for r in attacks.loss_threshold(run) if r.measure == "AUC"}
    assert by["loss threshold"].value < 0.55
    assert (
        by["loss threshold, rise over rounds"].low
        <= norm.cdf(1 / 2)
        <= by["loss threshold, rise over rounds"].high
    )
    controls = [r for r in attacks.loss_threshold(run) if "control" in r.measure]
    assert len(controls) == 3 and all(abs(r.value - 0.5) < 0.02 for r in controls)


@pytest.mark.slow
def test_lira_over_rounds_needs_the_same_rounds_of_all():
    runs = several_rounds(3.0, [1.0] * 4, seeds=8, n=400)
    by = {r.attack: r for r in attacks.lira(runs) if r.measure == "AUC"}
    assert (
        by["LiRA"].high < by["LiRA, mean over rounds"].low
        and by["LiRA, mean over rounds"].rounds == 4
    )
    alone = [r for r in attacks.lira(runs) if r.attack == "LiRA"]
    runs[3].rounds = [2, 3, 4]
    assert attacks.lira(runs) == alone
    for run in runs:
        run.rounds, run.samples.over_rounds = [4], {}
    assert attacks.lira(runs) == alone


@pytest.mark.slow
def test_the_relation_against_permutations():
    rng, n = np.random.default_rng(0), 12
    groups = [k % 3 for k in range(n)]
    counts = rng.integers(1, 50, (n, 5))
    same = np.equal.outer(groups, groups)
    relation = {
        "mean": 0.1 * same + rng.random((n, n)) * 0.01,
        "body": rng.random((n, n)),
        "one": np.ones((n, n)),
    }
    [run] = drawn(1, 0, 0)
    run.counts, run.groups, run.relation = counts, groups, relation
    rows = [r for r in attacks.relations(run) if r.attack == "who shares a group"]
    by = {(r.viewer.partition(":")[0], r.measure): r for r in rows}
    for viewer in ("server", "another client"):
        known, noise = by[viewer, "AUC, mean over layers"], by[viewer, "AUC, layer body"]
        assert known.value == 1 > known.high
        assert noise.low - 0.1 < noise.value < noise.high + 0.1
    assert len(by) == 4  # a row that is the same for all is no relation


@pytest.mark.parametrize(
    "groups, ways", [([0, 0, 1, 1], 3), ([0] * 4 + [1] * 4, 35), ([0, 0, 1, 1, 1], 10)]
)
def test_groups_that_luck_finds_are_not_tested(groups, ways):
    """With so few ways to divide the clients, permutations reach the right one, and their interval
    says nothing."""
    n = len(groups)
    [run] = drawn(1, 0, 0)
    run.groups, run.counts = groups, np.random.default_rng(0).integers(1, 50, (n, 5))
    run.relation = {
        "mean": 0.1 * np.equal.outer(groups, groups)
        + np.random.default_rng(1).random((n, n)) * 0.01
    }
    [why] = attacks.untestable_groups(run)
    assert f"in {ways} ways only" in why
    assert not [r for r in attacks.relations(run) if r.attack == "who shares a group"]
    run.groups, run.counts = [k % 2 for k in range(10)], np.ones((10, 5))
    assert not attacks.untestable_groups(run)  # 126 ways


def test_ranks_are_spearmans():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 5, 50).astype(float), rng.normal(size=50)
    assert attacks._rank_correlation(a, b) == pytest.approx(spearmanr(a, b).statistic)


@pytest.mark.slow
def test_label_mixes_follow_biases():
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 100, (10, 6))
    [run] = drawn(1, 0, 0)
    run.counts, run.heads = counts, counts / counts.sum(1, keepdims=True)
    [one] = attacks.label_mixes(run)
    assert one.value > 0.7 > one.high
    run.heads = rng.normal(size=(10, 6))
    [none] = attacks.label_mixes(run)
    assert none.low - 0.1 < none.value < none.high + 0.1


@pytest.mark.slow
def test_a_study_is_audited(tmp_path, monkeypatch, fit):
    base = [
        "kapc_digits",
        {
            "federation.rounds": 3,
            "federation.clients": 4,
            "federation.local_epochs": 8,
            "data.partition": "iid",
            "data.planted": "labels",
            "data.groups": 2,
            "data.client_test": 0.5,
            "data.fraction": 0.5,
            "fabric.threads": 1,
            "fabric.accelerator": "cpu",
            "loggers": None,
            "callbacks.heatmaps": None,
        },
    ]
    (tmp_path / "s.yaml").write_text(
        yaml.safe_dump({"base": base, "methods": ["kapc"], "seeds": "0-3"})
    )
    assert run_line("study s.yaml --out s --workers 1") == 0
    before = {p: p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file()}
    assert run_line("audit s --out a") == 0
    assert {p: p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file()} == before
    rows = json.loads((tmp_path / "a" / "audit.json").read_text())["rows"]
    assert {"LiRA", "loss threshold"} <= {r["attack"] for r in rows}
    alone = [
        r
        for r in rows
        if r["method"] == "local" and r["attack"] == "loss threshold" and r["measure"] == "AUC"
    ]
    assert [r["viewer"] for r in alone] == ["public: personal model"] and alone[0]["low"] > 0.5
    control = [r for r in rows if "control" in r["measure"]]
    assert all(abs(r["value"] - 0.5) < 0.1 for r in control)
    # four clients: one of three ways is right
    assert not [r for r in rows if r["attack"] == "who shares a group"]
    assert (
        "4 clients in groups of 2, 2 can be divided in 3 ways only"
        in (tmp_path / "a" / "audit.html").read_text()
    )
    assert run_line("audit s/runs/kapc/seed-0 --out a") == 0
    assert "audit.html" in {p.name for p in (tmp_path / "a").iterdir()}


def test_confidence_is_the_log_of_the_odds_and_of_a_text_the_mean_over_places():
    scores, y = torch.randn(5, 4, 3, dtype=torch.float64), torch.randint(3, (5, 4))
    y[0, 1:] = NO_TARGET
    p = scores.softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0]
    odds = (p / (1 - p)).log()
    assert_close(log_odds(scores[:, 0], y[:, 0]), odds[:, 0])
    assert_close(log_odds(scores, y), torch.cat([odds[0, :1], odds[1:].mean(1)]))


@pytest.mark.sampled("quantize")
@pytest.mark.parametrize("callback", ["keepuploads {}", "quantize.bits 8"])
def test_uploads_are_looked_at_where_the_judge_keeps_clients_too(callback, fit):
    """A callback that keeps uploads makes the server's copy an upload, whichever model the judge
    asks for."""
    words = (
        "--method fedavg --federation.rounds 1 --callbacks.checkpoint.seconds 0 --evaluation.judge "
        "after"
    )
    folder = fit("x", words, f"--callbacks.{callback}")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    run = observe(config_of(folder), folder)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    upload = run.samples.confidence["server: upload"]
    assert np.isfinite(upload).all() and run.heads is not None
    assert (callback[0] == "k") == np.array_equal(
        upload, run.samples.confidence["public: personal model"]
    )


@pytest.mark.slow
def test_samples_with_flipped_labels_are_left_out(tmp_path, fit, capsys):
    words = "--method local --federation.rounds 1 --callbacks.checkpoint.seconds 0"
    attack = "--callbacks.attack.kind label_flip --callbacks.attack.clients"
    plain, flipped, all_ = (
        fit("plain", words),
        fit("flipped", words, attack, "[0,2]"),
        fit("all", words, attack, "[0,1,2,3]"),
    )
    runs = [observe(config_of(folder), folder) for folder in (plain, flipped)]
    assert [run.flipped for run in runs] == [[], [0, 2]] and set(runs[1].samples.client) == {1, 3}
    honest = np.isin(runs[0].samples.client, (1, 3))
    for name in ("client", "digest", "member"):
        assert_array_equal(getattr(runs[0].samples, name)[honest], getattr(runs[1].samples, name))
    for view, values in runs[0].samples.confidence.items():
        assert_array_equal(values[honest], runs[1].samples.confidence[view])
    assert_array_equal(runs[0].counts[[0, 2], ::-1], runs[1].counts[[0, 2]])
    capsys.readouterr()
    assert run_line(f"audit {flipped} --out a") == 0
    says = "audit: samples of clients 0, 2 are left out: they trained on flipped labels\n"
    assert says in capsys.readouterr().err
    assert (
        f"flipped: 2 of 4 clients {attacks.FLIPPED}." in (tmp_path / "a" / "audit.html").read_text()
    )
    assert run_line(f"audit {all_} --out b") == 0  # there is nothing left to attack


@pytest.mark.parametrize(
    "words, says",
    [
        ("--out a", "audit: it must be given once: fl-train audit STUDY | RUN"),
        ("nowhere --out a", "audit='nowhere': there is no such folder"),
        ("empty --out a", "it is neither a study nor a finished run"),
        ("empty", "out: it must be given"),
        ("empty --out file", "out='file': it is a file; name a folder"),
    ],
)
def test_what_cannot_be_audited(tmp_path, monkeypatch, refused, words, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    assert says in refused(f"audit {words}")
    assert not (tmp_path / "a").exists()


def test_files_of_ones_own_are_not_written_over(tmp_path, fit, refused):
    folder = fit("x", "--method local --federation.rounds 1 --callbacks.checkpoint.seconds 0")
    for name in ("audit.csv", "audit.json", "audit.html"):
        file = tmp_path / name.replace(".", "-") / name
        file.parent.mkdir()
        file.write_text("mine")
        line = refused(f"audit {folder} --out {file.parent}")
        assert f"/{name}': it exists and is no audit" in line
        assert [p.read_text() for p in file.parent.iterdir()] == ["mine"]
    for _ in range(2):
        assert run_line(f"audit {folder} --out b") == 0  # its own, and again
