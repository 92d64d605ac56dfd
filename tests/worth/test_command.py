"""`fl-train worth` from the command line: its files, its sentences, that it goes on, and what it
refuses."""

from __future__ import annotations

import csv
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fl_lightning.cli import main
from fl_lightning.configuration.components import Component, ModelConfig
from fl_lightning.configuration.config import Config
from fl_lightning.foundation.errors import BadInput
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.lab.worth import further, words
from fl_lightning.lab.worth import launch as command
from fl_lightning.lab.worth.runs import score
from fl_lightning.lab.worth.scores import place
from fl_lightning.lab.worth.silos import Facts
from fl_lightning.results.opening import config_of

from .conftest import SMALL, write_hospitals

FOLDS = 5


@pytest.fixture
def answer(out: Path) -> dict[str, dict[str, Any]]:
    """The rows of `worth.json` by silo."""
    content = json.loads((out / "worth.json").read_text())
    assert content["version"] == 1
    return {row["silo"]: row for row in content["silos"]}


def test_the_contract_of_the_files(out: Path, answer: dict[str, dict[str, Any]]) -> None:
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


def test_the_scores_are_those_of_the_runs(out: Path) -> None:
    """Sample by sample what the run folder has as a share: of training alone, and of one run that
    serves two rows."""
    for label, folder in (
        ("local", "local"),
        ("fedavg,after", "fedavg,personalised"),
        ("fedper", "fedper"),
    ):
        for seed in (0, 3):
            with np.load(out / "scores" / label / f"seed-{seed}.npz") as table:
                own = [table["right"][table["client"] == c].mean() for c in range(6)]
            with (out / "runs" / folder / f"seed-{seed}" / "final.csv").open() as file:
                assert own == pytest.approx(
                    [float(row["accuracy"]) for row in csv.DictReader(file)], abs=1e-6
                )


def test_fine_tuned_models_are_scored_as_such(out: Path) -> None:
    with np.load(out / "scores" / "fedavg,finetuned" / "seed-1.npz") as table:
        own = [table["right"][table["client"] == c].mean() for c in range(6)]
    with (out / "runs" / "fedavg,personalised" / "seed-1" / "clients.csv").open() as file:
        last = [row for row in csv.DictReader(file) if row["round"] == "2"]
    assert own == pytest.approx([float(row["accuracy_finetuned"]) for row in last], abs=1e-6)


@pytest.mark.slow
def test_runs_of_two_processes_are_scored_as_those_of_one(out: Path, tmp_path: Path) -> None:
    """Each process has the models of its own clients alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out.parent)
        rows, folder = (
            {"fedavg after": "after", "fedavg finetuned": "finetuned"},
            out / "runs/fedavg,personalised/seed-1",
        )
        config = config_of(folder)
        score(
            replace(config, fabric=replace(config.fabric, devices=2, threads=1)),
            folder,
            tmp_path,
            rows,
        )
    for label in rows:
        with (
            np.load(place(out, label, 1)) as one,
            np.load(place(tmp_path, label, 1)) as two,
        ):
            assert {name: two[name].tolist() for name in two} == {
                name: one[name].tolist() for name in one
            }


def test_a_silos_seconds_count_processes_that_train_beside_each_other(
    out: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(out / "runs/fedavg,personalised/seed-1", tmp_path / "run")
    measured: Any = SimpleNamespace(
        answers=[SimpleNamespace(silo=SimpleNamespace(number=0, name="Aarau"))], method="a"
    )
    one = further.costs(tmp_path, measured, "run")[0]["seconds_a_silo"]
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"world_size": 2}))
    assert (
        further.costs(tmp_path, measured, "run")[0]["seconds_a_silo"] == pytest.approx(2 * one) != 0
    )


def test_every_sample_is_tested_once_a_cycle_by_models_that_have_not_seen_it(out: Path) -> None:
    tables = [np.load(out / "scores" / "local" / f"seed-{seed}.npz") for seed in range(FOLDS)]
    aarau = np.concatenate([table["sample"][table["client"] == 0] for table in tables])
    assert len(np.unique(aarau)) == len(aarau) == 90


def test_silos_that_cannot_be_judged_are_told_why(answer: dict[str, dict[str, Any]]) -> None:
    assert "3 samples" in answer["Zug"]["sentence"]
    assert "one class" in answer["Pure"]["sentence"]
    for name in ("Chur", "Twin"):
        other = "Twin" if name == "Chur" else "Chur"
        assert f"copy of {other}" in answer[name]["sentence"]
        assert answer[name]["gain"] is None
    assert "10 of its 70 samples lie in Aarau, too" in answer["Basel"]["sentence"]
    for name in ("Zug", "Pure", "Chur", "Twin"):
        assert answer[name]["verdict"] == "cannot tell yet"


def test_shared_samples_are_in_no_figure(out: Path, answer: dict[str, dict[str, Any]]) -> None:
    """Basel's share of right answers without the ten that Aarau has, too."""
    tables = [np.load(out / "scores" / "local" / f"seed-{seed}.npz") for seed in range(FOLDS)]
    sample, client, right = (
        np.concatenate([t[name] for t in tables]) for name in ("sample", "client", "right")
    )
    kept = (client == 1) & ~np.isin(sample, sample[client == 0])
    assert kept.sum() == 60
    assert answer["Basel"]["alone"] == pytest.approx(right[kept].mean())


def test_it_goes_on_where_it_was_stopped(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run and a row's scores are gone: the same command makes them again, and nothing else, to
    the same answer."""
    before = (out / "worth.json").read_bytes()
    kept = (out / "runs" / "fedper" / "seed-0" / "summary.json").stat().st_mtime_ns
    shutil.rmtree(out / "runs" / "local" / "seed-2")
    (out / "scores" / "local" / "seed-2.npz").unlink()
    (out / "scores" / "fedper" / "seed-4.npz").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out.parent)
        assert main(["worth", *shlex.split(SMALL), "--out", "answer", "--repeats", "5"]) == 0
    shown = capsys.readouterr()
    assert "2 of 2 trainings" in shown.err
    assert (out / "worth.json").read_bytes() == before
    assert (out / "runs" / "fedper" / "seed-0" / "summary.json").stat().st_mtime_ns == kept
    assert "Aarau" in shown.out and "verdict" in shown.out


def test_another_base_is_refused(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out.parent)
        flags = [*shlex.split(SMALL), "--federation.rounds", "3"]
        assert main(["worth", *flags, "--out", "answer", "--repeats", "5"]) == 2
    assert "federation.rounds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--methods fedpre", "methods"),
        ("--metric speed", "metric"),
        ("--metric mae", "metric"),
        ("--repeats 1", "repeats"),
        ("--minutes 0", "minutes"),
        ("--margin 0", "margin"),
        ("--minutes 1 --repeats 10", "repeats"),
        ("--federation.participation 0.5", "federation.participation"),
        ("--data.held_out_clients 0.2", "data.held_out_clients"),
        ("--data.held_out [1]", "data.held_out"),
        ("--data.root nowhere.csv", "data.root"),
    ],
)
def test_bad_input_is_one_line(
    flags: str,
    key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_hospitals(tmp_path)
    words_ = [
        word
        for word in shlex.split(SMALL)
        if "--methods" not in flags or word not in ("--methods", "fedper")
    ]
    assert main(["worth", *words_, *shlex.split(flags), "--out", "answer"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fl-train: error: {key}: ") and error.count("\n") == 1
    assert not (tmp_path / "answer").exists()


def test_half_widths_are_foretold() -> None:
    """Before the work begins: with 60 samples a gain above 13 points, with 3 nothing; no less than
    was measured."""
    lines = words.beforehand(["a", "b", "c"], [60, 60, 3], 4)
    assert "3 samples (c)" in lines[0] and "too few" in lines[0]
    assert "60 samples (a, b)" in lines[1] and "13.4 points" in lines[1]
    # with networks: docs/worth.md
    for size, width in {60: 7.3, 200: 3.5, 1000: 1.5, 2000: 1.0}.items():
        (line,) = words.beforehand(["a"], [size], 4)
        assert float(line.split("about ")[1].split()[0]) > 1.2 * width
    (line,) = words.beforehand(["a"], [60], 4, metric="auroc")
    assert (
        "a gain in accuracy above about 13.4 points" in line
        and "of auroc no such width was simulated" in line
    )
    assert words.beforehand(["a"], [60], 4, metric="mae") == []  # an error has a unit of its own
    lines = words.beforehand(["a", "b"], [60, 300], 4, [9, 14])
    assert lines[0].startswith("60 windows of 9 recordings (a): too few recordings")
    assert lines[1].startswith("300 windows of 14 recordings (b): at best a gain above about 4.")


@pytest.mark.slow
def test_what_is_asked_beyond_the_gain(out: Path) -> None:
    """A new silo and the costs always; without each silo in turn, and with fewer samples, on
    request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out.parent)
        flags = [*shlex.split(SMALL), "--out", "answer", "--repeats", "5"]
        assert main(["worth", *flags, "--leave-one-out", "--curve"]) == 0
    content = json.loads((out / "worth.json").read_text())
    facts, names = content["consortium"], [row["silo"] for row in content["silos"]]
    method = facts["method"]
    assert [row["labelled"] for row in facts["newcomers"]] == [0, 5, 20]
    assert facts["newcomers"][0]["alone"] is None and facts["newcomers"][2]["alone"] > 0
    run = (
        out / "runs" / ("fedavg,personalised" if method.startswith("fedavg") else method) / "seed-0"
    )
    with (run / "clients.csv").open() as file:
        sent = [float(row["upload_bytes"]) for row in csv.DictReader(file) if row["client"] == "2"]
    assert facts["costs"]["rounds"] == 2 and facts["costs"]["upload_bytes"][2] == sum(sent) > 0
    missed = facts["leave_one_out"]["missed"]
    assert facts["leave_one_out"]["silos"] == names
    place = "scores/" + method.replace(" ", ",")
    shares = []
    first = [np.load(out / place / f"seed-{seed}.npz") for seed in range(FOLDS)]
    basel = np.concatenate([t["sample"][t["client"] == 1] for t in first])
    for folder in (out, out / "without" / "silo-1"):
        tables = [np.load(folder / place / f"seed-{seed}.npz") for seed in range(FOLDS)]
        sample, client, right = (
            np.concatenate([t[name] for t in tables]) for name in ("sample", "client", "right")
        )
        # the ten that Basel has, too, are not counted
        kept = (client == 0) & ~np.isin(sample, basel)
        shares.append(right[kept].mean())
        assert not (folder != out and any((t["client"] == 1).any() for t in tables))
    assert missed[0][0] is None and missed[2] == [None] * 6  # Chur is a copy: nothing to compare
    assert missed[0][1] == pytest.approx(shares[0] - shares[1])
    assert 0 < facts["leave_one_out"]["half"][0][1] < 1 and facts["leave_one_out"]["surely"] == []
    points = facts["curve"]["points"]
    assert [p["share"] for p in points] == [0.1, 0.25, 0.5, 1.0]
    assert all(p["low"] < p["gain"] < p["high"] for p in points)
    text = (out / "worth.html").read_text()
    for title in (
        "A silo that joins later",
        "Who would miss whom",
        "With fewer samples",
        "What it costs a silo",
    ):
        assert f"<h2>{title}</h2>" in text


@pytest.mark.parametrize(
    ("gains", "until"),
    [
        ((0.1, 0.05, -0.05), 10**2.5),
        ((0.1, 0.2, 0.3), None),
        ((-0.1, -0.2, -0.3), None),
        ((0.1, -0.1, 0.1), None),  # it pays again: it does not end
        ((0.1, -0.1, 0.1, -0.1), 10**3.5),
    ],
)
def test_where_it_ends_to_pay(gains: tuple[float, ...], until: float | None) -> None:
    points = [{"samples": 10.0**k, "gain": gain} for k, gain in enumerate(gains, 1)]
    assert further._crossing(points, "gain") == (None if until is None else pytest.approx(until))


def test_means_are_not_told_as_more_than_they_are() -> None:
    nothing: dict[str, float | None] = {"gain": None, "low": None, "high": None}

    def of(ends: dict[str, float | None], *gains: float) -> str:
        return further._until(
            ends, [{"share": 0.25 * k, "gain": gain} for k, gain in enumerate(gains, 1)]
        )

    assert of(nothing, -0.2, -0.1) == "It does not pay at any of these sizes."
    assert of(nothing, 0.2, 0.1) == "It pays at all of these sizes."
    assert (
        of(nothing, -0.2, -0.1, 0.1, 0.2)
        == "By the means it pays at 75 %, 100 % of the samples, and not at 25 %, 50 %."
    )
    assert "intervals do not tell" in of({"gain": 30.0, "low": None, "high": None}, 0.1, -0.1)
    assert of({"gain": 30.0, "low": 20.0, "high": None}, 0.1, -0.1).endswith(
        "(20 to more than measured)."
    )


def test_runs_without_a_silo_are_kept_by_method(tmp_path: Path) -> None:
    """Another call may choose another method: its runs are not those that are there."""
    config = Config(method=Component("unused"), models=[ModelConfig(Component("unused"))])
    rows = dict.fromkeys(("fedper", "fedavg finetuned"), (config, None))
    folders = [
        {folder for _, folder, _, _ in further.without(tmp_path, rows, label, 3)} for label in rows
    ]
    assert len(folders[0]) == len(folders[1]) == 3 * 5 and not folders[0] & folders[1]


def test_a_new_silo_trains_alone_as_long_as_the_others_and_shares_are_of_the_runs_samples(
    tmp_path: Path,
) -> None:
    base = Config(method=Component("unused"), models=[ModelConfig(Component("unused"))])
    config = replace(base, data=replace(base.data, train_share=0.4))
    rows = dict.fromkeys(("fedper", "local"), (config, None))
    tasks = further.newcomers(tmp_path, rows, "fedper", 3)
    rounds = {next(iter(of)): run.evaluation.newcomer_rounds for run, _, _, of in tasks}
    assert rounds == {"fedper": base.evaluation.newcomer_rounds, "local": base.federation.rounds}
    shares = {run.data.train_share for run, *_ in further.curve(tmp_path, rows, "fedper")}
    assert shares == {0.4 * share for share in further.SHARES}


def asked(methods: list[str], minutes: float) -> command.Plan:
    return command.Plan([], StudyFolder(Path("answer")), methods, minutes=minutes)


def test_models_are_kept_whatever_the_configuration_says() -> None:
    """They are scored from the checkpoint."""
    layers = [{"callbacks": {"checkpoint": None}}]
    plan = command.Plan(layers, StudyFolder(Path("answer")), ["fedper"])
    assert "checkpoint" in command._resolved(plan, 1)[1].callbacks


@pytest.mark.parametrize(
    ("minutes", "cycle", "expected"), [(10, 75, 8), (10, 200, 2), (3, 100, 1), (60, 30, 10)]
)
def test_minutes_are_kept(
    minutes: float, cycle: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that runs only while something trains: whole cycles and what follows them, at most
    a tenth over."""
    now = [0.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])

    def trained(plan: command.Plan, cycles: int, limit: float) -> int:
        if now[0] + cycle - plan.begin > limit:
            raise command.TooSlow(now[0] + cycle - plan.begin)
        now[0] += cycle
        return 1

    monkeypatch.setattr(command, "_cycle", trained)
    plan = asked(["fedper", "ditto", "selfkapc"], minutes)
    cycles = command._train(plan, Facts(["a"] * 6, [60] * 6))
    assert cycles == expected
    whole = now[0] + cycle * plan.more(6)
    assert whole <= 1.1 * 60 * minutes
    assert cycles == 10 or whole + cycle > 1.1 * 60 * minutes


def test_minutes_that_hold_no_cycle_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: Any) -> int:
        raise command.TooSlow(600)

    monkeypatch.setattr(command, "_cycle", slow)
    with pytest.raises(BadInput, match=r"minutes: 1 .*take about 15\.\d minutes"):
        command._train(asked(["fedper"], 1), Facts(["a"] * 6, [60] * 6))
