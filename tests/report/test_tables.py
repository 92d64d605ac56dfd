from __future__ import annotations

import json
from pathlib import Path

import pytest

from fl_lightning.lab.report.figures import costs
from fl_lightning.lab.report.page import render
from fl_lightning.lab.report.tables import (
    fairness,
    incomparable,
    mib,
    operations,
    overview,
    reached,
    remarks,
    scores,
    seconds,
    targets,
    time_to_accuracy,
)
from fl_lightning.lab.report.words import component
from fl_lightning.results.folder import CLIENT_FLOPS
from fl_lightning.results.runs import Comparison, load

from .conftest import MakeRun, cells


def test_targets_are_what_a_run_reached_and_did_not_begin_with(make_run: MakeRun) -> None:
    runs = load([make_run("a", (0.12, 0.5, 0.31)), make_run("b", (0.30, 0.40))])
    assert targets(runs) == [0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5]
    # Where no five points were gained, closer ones.
    assert targets(load([make_run("c", (0.71, 0.7412))])) == [0.72, 0.74]
    assert targets(load([make_run("e", (0.99, 0.995))])) == [0.995]
    assert targets(load([make_run("d", (0.01,))])) == []


def test_targets_lie_between_scores_that_are_finite(make_run: MakeRun) -> None:
    """Predictions of a regression may pass what 32 bits hold."""
    paths = [make_run(name, config={"data": {"task": "regression"}}) for name in ("a", "b")]
    for path, first in zip(paths, ("inf", "nan"), strict=True):
        path.joinpath("metrics.csv").write_text(
            f"round,mean_mae,mae_after\n1,{first},2\n2,9,9\n3,2,2\n"
        )
    runs = load(paths)
    assert targets(runs) == [8, 7, 6, 5, 4, 3, 2]
    assert "not reached" not in render(runs)


def test_a_target_is_reached_with_what_was_spent_by_then(make_run: MakeRun) -> None:
    (run,) = load([make_run("a", (0.1, 0.5, 0.4, 0.8), channel=True)])
    # 4 clients, up and down
    assert reached(run, 0.5) == {"round": 2, "mib": 16.0, "channel": 6.0, "wall": 3.5}
    assert reached(run, 0.55) == {"round": 4, "mib": 32.0, "channel": 12.0, "wall": 7.0}
    assert reached(run, 0.85) is None


def test_the_table_of_targets(make_run: MakeRun) -> None:
    table = time_to_accuracy(
        load([make_run("a", (0.1, 0.52)), make_run("b", (0.1, 0.2), channel=True)])
    )
    assert [target for target, _ in table] == [
        "15 %",
        "20 %",
        "25 %",
        "30 %",
        "35 %",
        "40 %",
        "45 %",
        "50 %",
    ]
    assert table[0][1] == [
        (0, ["2", "16.00 MiB", "–", "3.5 s"]),
        (1, ["2", "16.00 MiB", "6.0 s", "3.5 s"]),
    ]
    assert table[-1][1][1] == (1, ["not reached", "", "", ""])


def test_rounds_that_are_not_judged_still_cost(make_run: MakeRun) -> None:
    path = make_run("a", (0.1, 0.5, 0.8))
    lines = (path / "metrics.csv").read_text().splitlines()
    lines[2] = lines[2].replace("2,0.5,0.25,0.125,0.5,", "2,,,,,")
    (path / "metrics.csv").write_text("\n".join(lines) + "\n")
    (run,) = load([path])
    assert reached(run, 0.5) == {"round": 3, "mib": 24.0, "channel": None, "wall": 5.25}


def test_final_scores(make_run: MakeRun) -> None:
    found = cells(scores(load([make_run("a", (0.1, 0.85, 0.8)), make_run("b", counted=False)])))
    assert found["best round, chosen on test data (optimistic)"] == [
        "85.00 % (round 2)",
        "80.00 % (round 3)",
    ]
    assert found["last judged round"] == ["80.00 % (round 3)", "80.00 % (round 3)"]
    assert found["all clients at the end: mean"] == ["75.00 %", "75.00 %"]
    assert found["upload"] == ["12.00 MiB", "12.00 MiB"]
    assert found["upload, parameters only"] == ["6.00 MiB", "6.00 MiB"]
    assert found["wall time of the rounds"] == ["6.0 s", "6.0 s"]
    assert found["operations"] == ["9 GFLOP", "–"]
    assert found["peak memory, host"] == ["103 MiB", "103 MiB"]
    assert "round chosen on validation data" not in found


@pytest.mark.parametrize("rounds", [(1, 2, 3), (2,)])
def test_operations_that_were_counted_in_part_are_no_total(
    make_run: MakeRun, rounds: tuple[int, ...]
) -> None:
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


def test_the_round_chosen_on_validation_data_is_read_on_test_data(make_run: MakeRun) -> None:
    path = make_run("a", (0.1, 0.9, 0.8))
    header, *lines = (path / "metrics.csv").read_text().splitlines()
    chosen = [f"{line},{value}" for line, value in zip(lines, (0.2, 0.3, 0.7), strict=True)]
    (path / "metrics.csv").write_text("\n".join([f"{header},validation_accuracy", *chosen]) + "\n")
    found = {k: v[0] for k, v in cells(scores(load([path]))).items()}
    assert found["round chosen on validation data"] == "80.00 % (round 3)"


def test_scores_on_the_test_set_of_all_stand_beside_each_kind_of_model(make_run: MakeRun) -> None:
    path = make_run("a", (0.1, 0.9, 0.8), summary=', "final_global_test_accuracy_global": 0.65')
    header, *lines = (path / "metrics.csv").read_text().splitlines()
    scored = [f"{line},{value}" for line, value in zip(lines, (0.2, 0.7, 0.6), strict=True)]
    (path / "metrics.csv").write_text(
        "\n".join([f"{header},global_test_accuracy_global", *scored]) + "\n"
    )
    table = scores(load([path, make_run("b")]))
    found = {k: v for k, v in cells(table).items() if k.startswith("test set of all")}
    begin = "test set of all, global model: "
    assert found == {
        f"{begin}best round (optimistic)": ["70.00 % (round 2)", "–"],
        f"{begin}last judged round": ["60.00 % (round 3)", "–"],
        f"{begin}all clients at the end": ["65.00 %", "–"],
    }
    assert not any("test set" in name for name in scores(load([make_run("c")])).index)


def test_fairness_of_final_models_and_of_an_unfinished_run(make_run: MakeRun) -> None:
    runs = load([make_run("a"), make_run("b", (0.1, 0.8), cohort=(0, 2), asked=9, ended=False)])
    found = cells(fairness(runs))
    assert found["scores of"] == ["end: after local training", "round 2: after local training"]
    assert found["clients"] == ["4", "2"]
    assert found["mean"] == ["75.00 %", "79.00 %"]  # 0.9, 0.8, 0.7, 0.6; 0.80, 0.78
    assert found["worst client"] == found["worst 10 %, mean"] == ["60.00 %", "78.00 %"]
    assert found["median"] == ["75.00 %", "79.00 %"]
    assert found["spread (std)"] == ["11.18 %", "1.00 %"]


def test_final_scores_of_mixed_kinds_are_the_judges_alone(make_run: MakeRun) -> None:
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


def test_an_extended_run_is_unfinished_and_its_old_end_is_not_its_end(make_run: MakeRun) -> None:
    (run,) = load([make_run("a", asked=9)])
    assert not run.finished
    assert run.scores(None)[1] == "round 3: after local training"
    assert cells(scores([run]))["all clients at the end: mean"] == ["–"]
    assert remarks([run]) == ["a is unfinished: 3 of 9 rounds are done."]


def test_made_up_data_are_named(make_run: MakeRun) -> None:
    (said,) = remarks(load([make_run("a", summary=', "made_up_data": true')]))
    assert said.startswith("a was trained on made-up data")


def test_what_cannot_be_compared_is_named(make_run: MakeRun) -> None:
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
    columns = d / "columns.json"
    columns.write_text(columns.read_text().replace("after", "global"))
    metrics = d / "metrics.csv"
    metrics.write_text(
        metrics.read_text().replace("accuracy_after", "accuracy_global").replace("accuracy_b", "b")
    )
    assert incomparable(load([a, d])) == ["evaluation.judge", "federation.rounds"]


def test_the_judge_of_an_unfinished_run_is_declared_with_its_columns(make_run: MakeRun) -> None:
    (run,) = load([make_run("a", ended=False)])
    assert run.judge == "after"
    assert list(overview([run])) == ["a"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"name": "kapc", "init_args": {"lam": 0.1, "start": "own"}}, "kapc (lam 0.1, start own)"),
        ({"class_path": "my.Net", "init_args": {}}, "my.Net"),
        ([{"name": "mlp", "count": 3}, {"name": "cnn", "count": 1}], "3 x mlp, 1 x cnn"),
        ("cnn", "cnn"),
        (None, "–"),
    ],
)
def test_components_in_words(value: object, text: str) -> None:
    assert component(value) == text


def test_beside_each_other_runs_show_the_arguments_that_differ(make_run: MakeRun) -> None:
    def method(lam: float, name: str = "kapc") -> dict[str, object]:
        return {"method": {"name": name, "init_args": {"lam": lam, "start": "own"}}}

    names = {
        "a": method(0.1),
        "b": method(0.2),
        "c": method(0.3, "fedamp"),
        "d": {"method": "fedavg"},
    }
    runs = load([make_run(name, config=config) for name, config in names.items()])
    shown = cells(overview(runs))
    assert shown["method"] == ["kapc (lam 0.1)", "kapc (lam 0.2)", "fedamp", "fedavg"]
    assert cells(overview(runs[:1]))["method"] == ["kapc (lam 0.1, start own)"]


def test_units() -> None:
    assert [mib(value) for value in (0.5, 99.5, 5000, 20_480)] == [
        "0.50 MiB",
        "99.50 MiB",
        "5,000 MiB",
        "20.0 GiB",
    ]
    assert [seconds(value) for value in (1.25, 599, 900, 9000)] == [
        "1.2 s",
        "599.0 s",
        "15.0 min",
        "2.5 h",
    ]
    assert [operations(value) for value in (0, 999, 1500, 2.5e15)] == [
        "0 FLOP",
        "999 FLOP",
        "1.5 kFLOP",
        "2.5 PFLOP",
    ]


# ---------------------------------------------------------------- runs with different judges


def judged_globally(path: Path, both: bool = True) -> Path:
    """The run in `path` as FedAvg's: its judge is the global model, better here by 0.1 than after
    training."""
    header, *lines = (path / "metrics.csv").read_text().splitlines()
    cells = [line.split(",") for line in lines]
    rows = [[*line[:1], str(round(float(line[1]) + 0.1, 4)), *line[2:]] for line in cells]
    text = (
        "\n".join([f"{header},accuracy_global", *(",".join([*row, row[1]]) for row in rows)]) + "\n"
    )
    if not both:
        text = text.replace("accuracy_after", "nothing").replace(
            "accuracy_before", "nothing_either"
        )
    (path / "metrics.csv").write_text(text)
    (path / "columns.json").write_text('{"mean_accuracy": {"model": "global"}}')
    summary = {
        "rounds": 3,
        "clients": 4,
        "judge": "global",
        "final_kinds": {"global": 4},
        "final_mean_accuracy": 0.75,
    }
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def test_runs_with_different_judges_are_compared_by_what_both_were_scored_by(
    make_run: MakeRun,
) -> None:
    runs = load([make_run("a"), judged_globally(make_run("b"))])
    assert Comparison.of(runs) == Comparison("after", True)
    found = cells(scores(runs))
    assert found["model"] == ["after local training"] * 2
    assert found["last judged round"] == ["80.00 % (round 3)"] * 2
    assert found["mean of each client's best round (more so)"] == ["78.50 % (4 clients)"] * 2
    assert found["own judge: model"] == ["after local training", "global model"]
    assert found["own judge: last judged round"] == ["80.00 % (round 3)", "90.00 % (round 3)"]
    assert found["own judge: all clients at the end: model"] == [
        "after local training",
        "global model",
    ]
    fair = cells(fairness(runs))
    assert fair["scores of"] == ["end: after local training", "round 3: after local training"]
    assert fair["mean"] == ["75.00 %", "78.50 %"]
    assert time_to_accuracy(runs)[-1] == (
        "80 %",
        [(n, ["3", "24.00 MiB", "–", "5.2 s"]) for n in (0, 1)],
    )
    (said,) = remarks(runs)
    assert "a: after local training; b: global model" in said
    assert "All are compared by what all were scored by: after local training." in said
    page = render(runs)
    assert "All are compared by" in page


def test_runs_that_share_no_kind_of_model_are_not_mixed_in_silence(make_run: MakeRun) -> None:
    runs = load([make_run("a"), judged_globally(make_run("b"), both=False)])
    assert Comparison.of(runs) == Comparison(None, True)
    (said,) = remarks(runs)
    assert "Do not compare them" in said
    found = cells(scores(runs))
    assert found["own judge: model"] == ["after local training", "global model"]
    assert "last judged round" not in found
    assert incomparable(runs) == ["evaluation.judge"]


def test_runs_of_one_judge_are_compared_by_it(make_run: MakeRun) -> None:
    runs = load([judged_globally(make_run("a")), judged_globally(make_run("b"))])
    assert Comparison.of(runs) == Comparison("global", False)
    assert cells(scores(runs))["model"] == ["global model"] * 2
    assert remarks(runs) == []


def test_epsilon_is_shown_with_its_unit_where_a_run_has_one(make_run: MakeRun) -> None:
    protects = ', "privacy_epsilon": 7.9876, "privacy_delta": 1e-05, "privacy_unit": "client"'
    endless = (
        ', "privacy_epsilon": null, "privacy_delta": 1e-05, "privacy_covers": "nothing: no noise"'
    )
    runs = load([make_run("a", summary=protects), make_run("b"), make_run("c", summary=endless)])
    shown = cells(overview(runs))["privacy"]
    assert shown == [
        "epsilon 7.99 at delta 1e-05, for each client",
        "nothing is protected",
        "epsilon infinite at delta 1e-05, nothing: no noise",
    ]
    assert "privacy" not in overview(runs[1:2]).index
