import json

import pytest

from fl_lightning.lab.report.figures import costs
from fl_lightning.lab.report.page import render
from fl_lightning.lab.report.tables import (
    incomparable,
    reached,
    remarks,
    scores,
    targets,
)
from fl_lightning.results.folder import CLIENT_FLOPS
from fl_lightning.results.runs import CommonScore, load

from .conftest import cells


def test_targets_lie_between_scores_that_are_finite(make_run):
    """Predictions of a regression may pass what 32 bits hold."""
    paths = [make_run(name, config={"data": {"task": "regression"}}) for name in ("a", "b")]
    for path, first in zip(paths, ("inf", "nan"), strict=True):
        path.joinpath("metrics.csv").write_text(
            f"round,mean_mae,mae_after\n1,{first},2\n2,9,9\n3,2,2\n"
        )
    runs = load(paths)
    assert targets(runs) == [8, 7, 6, 5, 4, 3, 2]
    assert "not reached" not in render(runs)


def test_a_target_is_reached_with_what_was_spent_by_then(make_run):
    (run,) = load([make_run("a", (0.1, 0.5, 0.4, 0.8), channel=True)])
    # 4 clients, up and down
    assert reached(run, 0.5) == {"round": 2, "mib": 16.0, "channel": 6.0, "wall": 3.5}
    assert reached(run, 0.55) == {"round": 4, "mib": 32.0, "channel": 12.0, "wall": 7.0}
    assert reached(run, 0.85) is None


def test_rounds_that_are_not_judged_still_cost(make_run):
    path = make_run("a", (0.1, 0.5, 0.8))
    lines = (path / "metrics.csv").read_text().splitlines()
    lines[2] = lines[2].replace("2,0.5,0.25,0.125,0.5,", "2,,,,,")
    (path / "metrics.csv").write_text("\n".join(lines) + "\n")
    (run,) = load([path])
    assert reached(run, 0.5) == {"round": 3, "mib": 24.0, "channel": None, "wall": 5.25}


@pytest.mark.parametrize("rounds", [(1, 2, 3), (2,)])
def test_operations_that_were_counted_in_part_are_no_total(make_run, rounds):
    """The server's are always there; in some rounds, or in all, the clients' could not be
    counted."""
    path = make_run("a")
    header, *lines = [line.split(",") for line in (path / "metrics.csv").read_text().splitlines()]
    for number, line in enumerate(lines, start=1):
        for at, name in enumerate(header):
            if name in CLIENT_FLOPS and number in rounds:
                line[at] = ""
    (path / "metrics.csv").write_text("".join(",".join(line) + "\n" for line in [header, *lines]))
    runs = load([path, make_run("b")])
    assert cells(scores(runs))["operations"] == ["–", "9 GFLOP"]
    [axes] = costs(runs)["cost-flops"].axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["b"]
    assert "cost-flops" not in costs(runs[:1])


def test_final_scores_of_mixed_kinds_are_the_judges_alone(make_run):
    """Clients 2 and 3 never took part: their final models, before training, are no others' before
    training."""
    (run,) = load(
        [make_run("a", cohort=(0, 1), summary=', "final_kinds": {"after": 2, "before": 2}')]
    )
    found, words = run.scores("after")
    assert (len(found), words) == (
        4,
        "end: after local training; 2 of 4 clients before it: they never took part",
    )
    assert run.scores(None) == (found, words)
    assert run.scores("before") == ({}, "round 0: before local training")  # not scored by client
    clients = run.folder / "clients.csv"
    clients.write_text(clients.read_text().replace("accuracy_after", "accuracy_before"))
    (run,) = load([run.folder])
    assert run.scores("before") == ({0: 0.8, 1: 0.79}, "round 3: before local training")


def test_what_cannot_be_compared_is_named(make_run):
    a = make_run("a")
    method = {"method": {"name": "fedavg"}}
    assert incomparable(load([a, make_run("b", config=method)])) == []
    other = {
        "seed": 1,
        "data": {"source": "digits", "partition": "dirichlet", "alpha": 0.5, "root": "elsewhere"},
    }
    assert incomparable(load([a, make_run("c", config=method | other)])) == ["data.alpha", "seed"]
    older = {
        "data": {"source": "digits", "partition": "dirichlet", "alpha": 0.1},
        "evaluation": {"judge": "auto", "x": 1},
    }
    # keys that one of them does not know
    assert incomparable(load([a, make_run("older", config=older)])) == []
    d = make_run("d", asked=9)
    assert incomparable(load([a, d])) == ["federation.rounds"]
    (d / "summary.json").write_text('{"judge": "global"}')
    # both were scored after local training
    assert incomparable(load([a, d])) == ["federation.rounds"]
    judged_globally(d)
    assert incomparable(load([a, d])) == ["evaluation.judge", "federation.rounds"]


def judged_globally(path):
    """The run in `path` as one that was scored by its global model alone."""
    metrics = path / "metrics.csv"
    text = metrics.read_text().replace("accuracy_before", "nothing")
    metrics.write_text(text.replace("accuracy_after", "accuracy_global"))
    (path / "columns.json").write_text('{"mean_accuracy": {"model": "global"}}')
    summary = {"rounds": 3, "judge": "global", "final_kinds": {"global": 4}}
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def test_runs_that_share_no_kind_of_model_are_not_mixed_in_silence(make_run):
    runs = load([make_run("a"), judged_globally(make_run("b"))])
    assert CommonScore.of(runs) == CommonScore(None, True)
    (said,) = remarks(runs)
    assert "Do not compare them" in said
    found = cells(scores(runs))
    assert found["own judge: model"] == ["after local training", "global model"]
    assert "last judged round" not in found
    assert incomparable(runs) == ["evaluation.judge"]
