"""`fl-train worth` from the command line: its files, its sentences, that it goes on, and what it
refuses."""

import csv
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lines import run_line

from fl_lightning.cli import main
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.lab.worth import LENGTHS, further, row_name, words
from fl_lightning.lab.worth import launch as command
from fl_lightning.lab.worth.runs import Task
from fl_lightning.lab.worth.scores import scores_path
from fl_lightning.lab.worth.silos import SiloFacts
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.opening import config_of

from .conftest import SMALL, write_hospitals

FOLDS = 5


@pytest.fixture
def answer(out):
    """The rows of `worth.json` by silo."""
    content = json.loads((out / "worth.json").read_text())
    assert content["version"] == 2
    return {row["silo"]: row for row in content["silos"]}


def test_the_contract_of_the_files(out, answer):
    keys = {
        "silo",
        "samples",
        "method",
        "alone",
        "federated",
        "gain",
        "low",
        "high",
        "verdict",
        "sentence",
    }
    assert all(keys <= row.keys() and row["verdict"] in words.VERDICTS for row in answer.values())
    assert {name: row["samples"] for name, row in answer.items()} == {
        "Aarau": 90,
        "Basel": 70,
        "Chur": 50,
        "Pure": 45,
        "Twin": 50,
        "Zug": 3,
    }
    with (out / "worth.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["silo"] for line in lines] == list(answer)
    assert float(lines[0]["gain"]) == answer["Aarau"]["gain"]
    for row in answer.values():
        if row["gain"] is not None:
            assert row["low"] < row["gain"] < row["high"]
            assert row["federated"] - row["alone"] == pytest.approx(row["gain"])


def shares(out, label, seed):
    """Of each silo how many of its test samples were right."""
    with np.load(scores_path(out, label, seed)) as table:
        return [table["right"][table["client"] == c].mean() for c in range(6)]


def test_the_scores_are_those_of_the_runs(out):
    """Sample by sample what the run folder has as a share: of training alone, of one run that
    serves two rows, and of fine-tuned models."""
    rows = {"local": "local", "fedavg after": "fedavg,personalised", "fedper": "fedper"}
    for label, folder in rows.items():
        for seed in (0, 3):
            final = RunFolder(out / "runs" / folder / f"seed-{seed}").read("final")
            expected = [row["accuracy"] for row in final]
            assert shares(out, f"{label} x10", seed) == pytest.approx(expected, abs=1e-6)
    last = RunFolder(out / "runs/fedavg,personalised/seed-1").read("clients")[-6:]
    expected = [row["accuracy_finetuned"] for row in last]
    assert {row["round"] for row in last} == {10}
    assert shares(out, "fedavg finetuned x10", 1) == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_runs_of_two_processes_are_scored_as_those_of_one(out, tmp_path):
    """Each process has the models of its own clients alone."""
    rows = {"fedavg after": "after", "fedavg finetuned": "finetuned"}
    run = out / "runs/fedavg,personalised/seed-1"
    config = config_of(run)
    two = replace(config, fabric=replace(config.fabric, devices=2, threads=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out.parent)
        Task(two, tmp_path / "run", tmp_path, rows).run(command.train)
    for label in (row_name(label, length) for label in rows for length in LENGTHS):
        with (
            np.load(scores_path(out, label, 1)) as one,
            np.load(scores_path(tmp_path, label, 1)) as other,
        ):
            assert {name: other[name].tolist() for name in other} == {
                name: one[name].tolist() for name in one
            }


@pytest.mark.slow
def test_every_sample_is_tested_once_a_cycle_by_models_that_have_not_seen_it(out):
    tables = [np.load(out / "scores" / "local" / f"seed-{seed}.npz") for seed in range(FOLDS)]
    aarau = np.concatenate([table["sample"][table["client"] == 0] for table in tables])
    assert len(np.unique(aarau)) == len(aarau) == 90


def test_silos_that_cannot_be_judged_are_told_why(answer):
    assert "3 samples" in answer["Zug"]["sentence"]
    assert "one class" in answer["Pure"]["sentence"]
    for name in ("Chur", "Twin"):
        other = "Twin" if name == "Chur" else "Chur"
        assert f"copy of {other}" in answer[name]["sentence"]
        assert answer[name]["gain"] is None
    assert "10 of its 70 samples lie in Aarau, too" in answer["Basel"]["sentence"]
    assert answer["Basel"]["not_counted"] == 10
    for name in ("Zug", "Pure", "Chur", "Twin"):
        assert answer[name]["verdict"] == "cannot tell yet"


@pytest.mark.slow
def test_it_goes_on_where_it_was_stopped(copy, capsys):
    """A run is gone, and another one's scores: the same command makes both again, and nothing else,
    to the same answer."""
    before, run = (copy / "worth.json").read_bytes(), copy / "runs/fedper/seed-0/summary.json"
    kept = run.stat().st_mtime_ns
    shutil.rmtree(copy / "runs" / "local" / "seed-2")
    (copy / "scores" / "fedper,x3" / "seed-4.npz").unlink()
    assert run_line(f"worth {SMALL} --out answer --repeats 5") == 0
    shown = capsys.readouterr()
    assert "2 of 2 trainings" in shown.err
    assert (copy / "worth.json").read_bytes() == before and run.stat().st_mtime_ns == kept
    assert "Aarau" in shown.out and "verdict" in shown.out


@pytest.mark.sampled("nowhere", "minutes", "margin")
@pytest.mark.parametrize(
    "flags, key",
    {
        "--methods fedpre": "methods",
        "--metric speed": "metric",
        "--metric mae": "metric",
        "--repeats 1": "repeats",
        "--minutes 0": "minutes",
        "--margin 0": "margin",
        "--minutes 1 --repeats 10": "repeats",
        "--federation.participation 0.5": "federation.participation",
        "--data.held_out_clients 0.2": "data.held_out_clients",
        "--data.held_out [1]": "data.held_out",
        "--data.root nowhere.csv": "data.root",
    }.items(),
)
def test_bad_input_is_one_line(
    flags,
    key,
    tmp_path,
    monkeypatch,
    capsys,
):
    monkeypatch.chdir(tmp_path)
    write_hospitals(tmp_path)
    words_ = [
        word
        for word in shlex.split(SMALL)
        if "--methods" not in flags or word not in ("--methods", "fedper")
    ]
    assert main(["worth", *words_, *shlex.split(flags), "--out", "answer"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fl-train: error: {key}=") and error.count("\n") == 1
    assert not (tmp_path / "answer").exists()


def beforehand(sizes, metric="accuracy", **keys):
    names = ["a", "b", "c"][: len(sizes)]
    return words.visible_gains(SiloFacts(names, sizes, **keys), 4, metric)


def test_half_widths_are_foretold():
    """Before the work begins: with 60 samples a gain above 13 points, with 3 nothing; no less than
    was measured."""
    lines = beforehand([60, 60, 3])
    assert "3 samples (c)" in lines[0] and "too few" in lines[0]
    assert "60 samples (a, b)" in lines[1] and "13.4 points" in lines[1]
    for size, width in {60: 7.3, 200: 3.5, 1000: 1.5, 2000: 1.0}.items():
        (line,) = beforehand([size])
        assert float(line.split("about ")[1].split()[0]) > 1.2 * width
    assert beforehand([60], "mae") == []  # an error has a unit of its own
    lines = beforehand([60, 300], kind="units", counts=[9, 14])
    assert "60 samples of 9 units (a): too few units" in lines[0]
    assert lines[1].startswith("300 samples of 14 units (b): at best a gain above about 4.")


@pytest.mark.slow
def test_what_is_asked_beyond_the_gain(copy):
    """A new silo and the costs always; without each silo in turn, and with fewer samples, on
    request."""
    flags = [*shlex.split(SMALL), "--out", "answer", "--repeats", "5"]
    assert main(["worth", *flags, "--leave-one-out", "--curve"]) == 0
    content = json.loads((copy / "worth.json").read_text())
    facts, names = content["consortium"], [row["silo"] for row in content["silos"]]
    assert [row["labelled"] for row in facts["newcomers"]] == [0, 5, 20]
    assert facts["newcomers"][0]["alone"] is None and facts["newcomers"][2]["alone"] > 0
    assert facts["costs"]["rounds"] in (1, 3, 10) and facts["costs"]["upload_bytes"][2] > 0
    left_out = facts["leave_one_out"]
    assert left_out["silos"] == names and 0 < left_out["half"][0][1] < 1
    assert left_out["missed"][2] == [None] * 6  # Chur is a copy: nothing to compare
    label = facts["method"].replace(" ", ",")
    for seed in range(FOLDS):
        with np.load(copy / f"without/silo-1/scores/{label}/seed-{seed}.npz") as table:
            assert not (table["client"] == 1).any()
    points = facts["curve"]["points"]
    assert [p["share"] for p in points] == [0.1, 0.25, 0.5, 1.0]
    assert all(p["low"] < p["gain"] < p["high"] for p in points)


@pytest.mark.parametrize(
    "gains, until",
    [
        ((0.1, 0.05, -0.05), 10**2.5),
        ((0.1, 0.2, 0.3), None),
        ((-0.1, -0.2, -0.3), None),
        ((0.1, -0.1, 0.1), None),  # it pays again: it does not end
        ((0.1, -0.1, 0.1, -0.1), 10**3.5),
    ],
)
def test_where_it_ends_to_pay(gains, until):
    points = [{"samples": 10.0**k, "gain": gain} for k, gain in enumerate(gains, 1)]
    assert further._crossing(points, "gain") == (None if until is None else pytest.approx(until))


def planned(layers=None, **keys):
    return command.WorthPlan(layers or [], StudyFolder(Path("answer")), ["fedper"], **keys)


def test_models_are_trained_for_the_longest_length_whatever_the_configuration_says():
    plan = planned([{"callbacks": {"checkpoint": None}, "federation": {"rounds": 4}}])
    _, base, runs = command._resolved(plan, 1)
    assert "checkpoint" in base.callbacks and base.federation.rounds == 40
    assert {config.federation.rounds for _, config in runs} == {40}


def test_ditto_is_tried_with_several_penalties():
    plan = command.WorthPlan([], StudyFolder(Path("answer")), ["ditto"])
    labels = [run.entry.label for run, _ in command._resolved(plan, 1)[2] if run.seed == 0]
    assert {"ditto", "ditto lam=0.1", "ditto lam=10.0"} < {*labels}


@pytest.mark.parametrize(
    "minutes, cycle, expected", [(10, 75, 8), (10, 200, 2), (3, 100, 1), (60, 30, 10)]
)
def test_minutes_are_kept(minutes, cycle, expected, monkeypatch):
    """By a clock that runs only while something trains: whole cycles and what follows them, at most
    a tenth over."""
    now = [0.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])

    def trained(ready, cycles):
        if now[0] + cycle > ready.plan.deadline:
            raise command.OutOfTime
        now[0] += cycle
        return 1

    monkeypatch.setattr(command, "_train_up_to", trained)
    plan = replace(planned(minutes=minutes), methods=["fedper", "selfkapc", "fedcac"])
    ready = command.Prepared(plan, {}, SiloFacts(["a"] * 6, [60] * 6), "accuracy")
    assert command._train(ready) == expected
    seconds = now[0] + cycle * plan.extra_ratio(6)
    assert seconds <= 1.1 * 60 * minutes
    assert expected == 10 or seconds + cycle > 1.1 * 60 * minutes


@pytest.mark.slow
def test_newcomers_are_scored_by_the_chosen_metric(copy):
    """No newcomer of a method that has been trained is trained again: they were scored by all that
    --metric may name."""
    flags = [*shlex.split(SMALL), "--out", "answer", "--repeats", "5", "--metric", "auroc"]
    assert main(["worth", *flags]) == 0
    facts = json.loads((copy / "worth.json").read_text())["consortium"]
    scores = []
    for file in (copy / "newcomers" / facts["method"].replace(" ", ",")).rglob("newcomers.csv"):
        with file.open() as lines:
            rows = [row for row in csv.DictReader(lines) if row["samples_per_class"] == "20"]
        scores += [float(row["auroc"]) for row in rows if row.get("auroc")]
    newcomers = {row["labelled"]: row for row in facts["newcomers"]}
    assert newcomers[20]["federated"] == pytest.approx(sum(scores) / len(scores))
    # Pure has one class, and Zug may have
    text = (copy / "worth.html").read_text().partition("A silo that joins later")[2]
    assert re.search(r"It is defined for [45] of 6 silos", text)
