"""`fl-train study` in this process (its workers are forked from it), on a few digits."""

import hashlib
import json
import os
import re
import shlex
import signal
import time
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from forked import forked
from lines import run_line
from refusals import refused_line

from fl_lightning.cli import main
from fl_lightning.foundation.files import take_lock
from fl_lightning.lab.study import scores
from fl_lightning.lab.study.board import state_of
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.lab.study.grid import Study
from fl_lightning.lab.study.launch import resolved, run_one
from fl_lightning.training import local

from .small import SMALL, TINY, results, table


@pytest.fixture
def ask(on_study):
    """Runs TINY with changes."""
    return lambda words="--workers 1", **changes: on_study(
        f"study study.yaml --out s {words}", TINY | changes
    )


def write(folder, **changes):
    (folder / "study.yaml").write_text(yaml.safe_dump({**TINY, **changes}))


def stamps(study):
    """When each run ended."""
    return {file: file.stat().st_mtime_ns for file in study.glob("runs/**/summary.json")}


# ---------------------------------------------------------------- what it does


def test_a_study_runs_what_is_missing_and_nothing_twice(ask, tmp_path):
    code, out, err = ask()
    assert code == 0, err
    assert "2 of 2 runs finished" in out
    assert re.search(r"\[2/2\] fedprox mu=0.5, seed 0: \d\d\.\d\d % \(global\), ", err)
    study = tmp_path / "s"
    content = json.loads((study / "study.json").read_text())
    assert content["version"] == 1
    folders = [cell["folder"] for cell in content["cells"]]
    assert folders == ["runs/kapc/seed-0", "runs/fedprox,mu=0.5/seed-0"]
    for cell in content["cells"]:
        config = yaml.safe_load((study / cell["folder"] / "config.yaml").read_text())
        assert config["method"]["name"] == cell["method"]
        assert config["seed"] == cell["seed"]
        assert config["fabric"]["threads"] == 1
        assert config["loggers"] == {}
        callbacks = {name for name, value in config["callbacks"].items() if value is not None}
        assert callbacks == {"checkpoint"}
        assert len(table(study / cell["folder"] / "metrics.csv")) == 2
    before = stamps(study)
    code, out, err = ask(methods=["kapc", {"name": "fedprox", "mu": 0.5}, "fedavg"])
    assert code == 0
    assert "3 of 3 runs finished (2 were there)" in out
    assert before.items() <= stamps(study).items()
    assert len(stamps(study)) == 3
    assert run_line("status s") == 0


@pytest.mark.slow
def test_keys_of_the_base_can_be_set_on_the_command_line(ask, tmp_path):
    words = "--workers 1 --federation.rounds 1 --data.resident=never"
    when = {"data.alpha=0.5": {"lam": 7.0}}
    methods = [{"name": "kapc", "when": when}]
    grid = {"data.alpha": [0.5]}
    code, _, err = ask(words, methods=methods, grid=grid)
    assert code == 0, err
    (run,) = stamps(tmp_path / "s")
    config = yaml.safe_load((run.parent / "config.yaml").read_text())
    assert (config["federation"]["rounds"], config["data"]["resident"]) == (1, "never")
    assert config["method"]["init_args"]["lam"] == 7.0
    other = [{"name": "kapc", "when": {"data.alpha=0.5": {"lam": 8.0}}}]
    assert "in this study 'kapc' was" in refused_line(ask(words, methods=other, grid=grid))
    # the study has run with another base
    assert "base.federation.rounds=2" in refused_line(ask(methods=methods, grid=grid))
    whole = yaml.safe_load((tmp_path / "s/study.yaml").read_text())
    assert ask(**whole)[0] == 0  # what was set is a part of it


@pytest.mark.slow
def test_a_row_of_which_no_run_has_begun_may_change(ask, tmp_path):
    row = {"name": "kapc", "label": "mine", "lam": 7.0}
    assert ask("--workers 1 --methods local", methods=["local", row])[0] == 0
    assert ask(methods=["local", row | {"lam": 8.0}])[0] == 0
    assert "in this study 'mine' was" in refused_line(ask(methods=["local", row]))


def test_the_table_of_a_study_has_the_scores_of_compare(ask, tmp_path):
    """Of all clients' final models, and not of those that took part in the last round."""
    assert ask("--workers 1 --federation.participation 0.5", methods=["local"])[0] == 0
    folder = StudyFolder(tmp_path / "s")
    seen = state_of(folder, folder.cells()[0], lambda _: None)
    (cell,) = scores.read([tmp_path / "s"])[0].itertuples()
    assert seen.score == pytest.approx(cell.scores.mean())
    assert abs(seen.score - cell.run.rows("metrics")[-1]["mean_accuracy"]) > 0.001


@pytest.mark.slow
def test_the_forced_rows_are_read_off_one_run(ask, tmp_path):
    assert ask(methods=["local"], forced=True)[0] == 0
    cells = {
        cell["label"]: cell for cell in json.loads((tmp_path / "s/study.json").read_text())["cells"]
    }
    run = tmp_path / "s" / cells["fedavg after"]["folder"]
    assert run == tmp_path / "s" / cells["fedavg finetuned"]["folder"]
    last = [row for row in table(run / "clients.csv") if row["round"] == "2"]
    final = table(run / "final.csv")
    assert {row["model"] for row in final} == {"after"}
    # of every client, so of this
    assert [row["accuracy"] for row in final] == [row["accuracy_after"] for row in last]
    assert all(
        row[f"accuracy_{cells[label]['judge']}"]
        for row in last
        for label in ("fedavg after", "fedavg finetuned")
    )


def test_a_failing_run_is_named_and_the_others_run_on(ask, tmp_path, capfd):
    methods = ["ktpfl", "local"]
    code, out, err = ask(methods=methods)
    assert code == 1
    assert out == ""
    assert "ktpfl, seed 0 failed: " in err
    assert "error: 1 of 2 runs failed (ktpfl, seed 0), the first: " in err.splitlines()[-1]
    assert "Traceback" not in err
    assert [file.parent.parent.name for file in stamps(tmp_path / "s")] == ["local"]
    assert run_line("status s") == 0
    said = capfd.readouterr().out
    assert "1 of 2 runs finished, 1 failed" in said
    assert "runs/ktpfl/seed-0: " in said


@pytest.mark.slow
def test_a_part_is_run_first_and_the_rest_later(ask, tmp_path):
    """With the forced rows; the table names the whole study from the start, and a later call runs
    what is missing and keeps what else failed."""
    whole = {
        "forced": True,
        "grid": {"data.alpha": [0.1, 0.3]},
        "methods": ["kapc", {"name": "fedper", "label": "fedper"}],
    }
    part = "--workers 1 --methods kapc --settings data.alpha=0.3"
    code, out, err = ask(f"{part} --seeds 1", **whole, seeds=[0, 1])
    assert code == 0 and "3 of 3 runs finished, of the 16 of the whole study" in out, err
    runs, first = tmp_path / "s/runs/data.alpha=0.3", stamps(tmp_path / "s")
    ended = sorted(str(file.parent.relative_to(runs)) for file in first)
    assert ended == ["fedavg,personalised/seed-1", "kapc/seed-1", "local/seed-1"]
    file, failed = tmp_path / "s/failures.json", "runs/data.alpha=0.3/{}/seed-0"
    file.write_text(json.dumps({failed.format(name): "no data" for name in ("fedper", "kapc")}))
    # a seed beside the study's own
    code, out, err = ask(f"{part} --seeds 0,1", **whole, seeds=[1])
    assert code == 0 and "6 of 6 runs finished (3 were there), of the 16" in out, err
    assert json.loads(file.read_text()) == {failed.format("fedper"): "no data"}
    assert first.items() <= stamps(tmp_path / "s").items()


@pytest.mark.parametrize("content", ["", "{", "3", "null", "[1]"])
def test_damaged_failures_are_passed_over(content, tmp_path):
    (tmp_path / "failures.json").write_text(content)
    assert StudyFolder(tmp_path).failures() == {}


@pytest.mark.slow
def test_a_study_grows_and_does_not_change(ask, tmp_path):
    assert ask(methods=["local"])[0] == 0

    def kept():
        return {path: path.read_bytes() for path in (tmp_path / "s").glob("study.*")}

    before = kept()
    epochs = {"federation.local_epochs": 2}
    for said, changes in [
        ("base.federation.local_epochs=2", {"base": [*TINY["base"], epochs]}),
        ("study='without s/runs/local/seed-0'", {"methods": ["fedavg"]}),
        ("study='without s/runs/local/seed-0'", {"grid": {"data.alpha": [0.1]}}),
        ("methods[0]=", {"methods": [{"name": "local", "epochs": 3, "label": "local"}]}),
    ]:
        assert said in refused_line(ask(**({"methods": ["local"]} | changes)))
        assert kept() == before
    # Seeds that have been run stay beside others.
    assert ask(methods=["local"], seeds=[1])[0] == 0
    cells = json.loads((tmp_path / "s/study.json").read_text())["cells"]
    assert [cell["seed"] for cell in cells] == [1, 0]
    # A study that began before there was some key goes on where that has its default.
    assert ask(methods=["local"])[0] == 0
    file, before = tmp_path / "s/study.yaml", kept()
    file.write_text(file.read_text().replace("    score_on: test\n", ""))
    assert kept() != before and ask(methods=["local"])[0] == 0
    assert kept() == before
    # What is the same said otherwise is the same, and so is the study's own file.
    whole = yaml.safe_load(file.read_text())
    assert ask(**whole)[0] == 0
    assert ask(methods=["local"], base=[whole["base"], {"data.root": None}])[0] == 0


@pytest.mark.parametrize(
    "said, changes",
    {
        "methods[0].lamda=1": {"methods": [{"name": "kapc", "lamda": 1}]},
        "methods[1]='kapc lam=0.05': it has the same config as methods[0]": {
            "methods": ["kapc", {"name": "kapc", "lam": 0.05}]
        },
        "methods[0]='no.such.Method'": {"methods": ["no.such.Method"]},
        "data.alpha=-1": {"grid": {"data.alpha": [0.1, -1]}},
        "config='nothing'": {"base": "nothing"},
        "base=3": {"base": [3]},
        "base.out='x'": {"base": {"out": "x"}},
        "optimizer.lr='x'": {"methods": [{"name": "kapc", "optimizer.lr": "x"}]},
        "methods[1]='a,b': methods[0] has the same label": {
            "methods": [{"name": "kapc", "label": "a b"}, {"name": "fedprox", "label": "a,b"}]
        },
        "forced='fedavg personalised': methods[0] has the same label": {
            "methods": [{"name": "fedavg", "label": "fedavg,personalised"}],
            "forced": True,
        },
    }.items(),
)
def test_a_bad_study_is_one_line_before_anything_is_written(said, changes, ask, tmp_path):
    assert said in refused_line(ask(**changes))
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "words, said",
    {
        "": "study: it must be given once",
        "study.yaml": "out: it must be given",
        "study.yaml --out s --workers 0": "workers=0",
        "study.yaml --out s --time 3": "give --slurm, too",
        "study.yaml --out s --slurm": "time=None",
        "study.yaml --out s --slurm --time 3 --together 2": "together=2: leave it out: with --slurm",
        "study.yaml --out s --together many": "together=.*a whole number from 1, or auto",
        "study.yaml --out s --together 0": "together=.*a whole number from 1, or auto",
        "study.yaml --out other": "it has other files and no study.json",
        "bad.yaml --out s": "line 1, column",
        "study.yaml --out s --methods kapc,kap": "methods='kap'.*has no such method",
        "study.yaml --out s --seeds x": "seeds='x'",
        "study.yaml --out s --settings data.alpha=1": "settings='data.alpha=1'.*study's grid",
    }.items(),
)
def test_bad_words(words, said, ask, tmp_path, refused):
    write(tmp_path)
    (tmp_path / "bad.yaml").write_text("a: [1")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    assert re.search(said, refused(f"study {words}"))
    assert not (tmp_path / "s").exists()


def test_another_study_that_came_between_is_seen(ask, tmp_path, monkeypatch):
    """Between the first look at the folder and its lock data may be loaded, for minutes."""

    def meanwhile(configs):
        monkeypatch.setattr("fl_lightning.lab.study.launch.fetch_datasets", lambda configs: None)
        assert (
            ask(base=["kapc_exact_digits", SMALL, {"optimizer.lr": 0.3}], methods=["local"])[0] == 0
        )

    monkeypatch.setattr("fl_lightning.lab.study.launch.fetch_datasets", meanwhile)
    line = refused_line(ask())
    assert "base.optimizer.lr=0.05" in line and "for another base give another --out" in line
    assert [file.parent.parent.name for file in stamps(tmp_path / "s")] == ["local"]


def test_two_studies_do_not_write_to_one_folder(ask, tmp_path):
    (tmp_path / "s").mkdir()
    with take_lock(tmp_path / "s" / "lock"):
        assert "a study is going on in it" in refused_line(ask())
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["lock"]


# ---------------------------------------------------------------- equal terms

METHODS = ("fedavg", "kapc", "ditto", "local")


@pytest.mark.slow
def test_methods_have_the_same_split_first_model_and_batches(tmp_path, monkeypatch):
    """Of one (setting, seed): what two methods draw for the same purpose, client and epoch is the
    same samples."""
    seen = defaultdict(dict)
    real, label = local.batches, ""

    def watched(part, schedule, epoch, first, count, drawn=None):
        for k, batch in enumerate(real(part, schedule, epoch, first, count, drawn), first):
            key = schedule.purpose, schedule.client, epoch, k, schedule.batch_size, len(part)
            seen[label][key] = digest(batch)
            yield batch

    monkeypatch.setattr(local, "batches", watched)
    _, pairs = resolved(Study.of({**TINY, "methods": [*METHODS], "seeds": [0, 1]}))
    initial = {}
    for run, config in pairs[: len(METHODS) + 1]:
        label = f"{run.entry.label} {run.seed}"
        assert run_one((config, tmp_path / run.folder)) is None, label
        file = tmp_path / run.folder / "checkpoints" / "initial.safetensors"
        initial[label] = file.read_bytes()
    ours, other = seen["fedavg 0"], seen["fedavg 1"]
    assert len(ours) > 10
    for name in METHODS:
        assert initial[f"{name} 0"] == initial["fedavg 0"]
        assert ours.items() <= seen[f"{name} 0"].items()
    assert initial["fedavg 1"] != initial["fedavg 0"]
    assert all(ours[key] != other[key] for key in ours.keys() & other.keys())


def digest(batch):
    found = hashlib.sha256()
    for tensor in batch:
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


# ---------------------------------------------------------------- faults

LONG = {
    "methods": ["kapc", "fedavg"],
    "seeds": "0-2",
    "forced": True,
    "base": ["kapc_exact_digits", SMALL, {"federation.rounds": 6}],
}


def children(pid):
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@pytest.mark.slow
def test_killed_again_and_again_it_ends_as_if_undisturbed(tmp_path, monkeypatch):
    """kill -9 of a study with two workers, 20 times; what stood is not run again."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, **{**LONG, "base": [*LONG["base"], {"federation.rounds": 25}]})
    assert run_line("study study.yaml --out whole --workers 1") == 0
    whole = results(tmp_path / "whole")
    argv = ["study", "study.yaml", "--out", "s", "--workers", "2"]
    code, stood = -9, stamps(tmp_path / "s")
    for kill in range(21):
        attempt, before = forked(argv, tmp_path / "said"), rows(tmp_path / "s")
        wanted, moment = kill % 6, time.monotonic() + 0.1 * (kill % 5)  # new rounds, or that soon
        while kill < 20 and (
            rows(tmp_path / "s") < before + wanted or (not wanted and time.monotonic() < moment)
        ):
            assert not attempt.ended(), attempt.err
            time.sleep(0.002)
        if kill < 20:
            workers = children(attempt.pid)
            attempt.send(signal.SIGKILL)
            assert not any(wait_for_end(pid) for pid in workers)  # they end with it, at once
        code, now = attempt.wait(), stamps(tmp_path / "s")
        assert code == (-9 if kill < 20 else 0), attempt.err
        assert stood.items() <= now.items()
        stood = now
    assert results(tmp_path / "s") == whole


def rows(study):
    """Rounds that have been written."""
    return sum(file.read_text().count("\n") - 1 for file in study.glob("runs/**/metrics.csv"))


def wait_for_end(pid):
    """Whether a process is still there after two seconds."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.005)
    return True


@pytest.mark.slow
def test_a_killed_worker_costs_one_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, **LONG)
    attempt = forked(["study", "study.yaml", "--out", "s", "--workers", "1"], tmp_path / "said")
    while not list((tmp_path / "s").glob("runs/**/metrics.csv")):
        time.sleep(0.01)
    (worker,) = children(attempt.pid)
    os.kill(worker, signal.SIGKILL)
    assert attempt.wait() == 1
    assert "failed: its process died (killed by SIGKILL)" in attempt.err
    assert len(stamps(tmp_path / "s")) == 11
    assert run_line("study study.yaml --out s --workers 1") == 0
    assert len(stamps(tmp_path / "s")) == 12


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_says_how_to_go_on(number, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, **LONG)
    line = ["study", "study.yaml", "--out", "s", "--workers", "2"]
    attempt = forked(line, tmp_path / "said")
    while not list((tmp_path / "s").glob("runs/**/metrics.csv")):
        time.sleep(0.01)
    attempt.send(number)
    start = time.monotonic()
    assert attempt.wait() == code
    assert time.monotonic() - start < 10
    assert f"it goes on with: fl-train {shlex.join(line)}" in attempt.err
    assert "Traceback" not in attempt.err
    assert main(line) == 0
