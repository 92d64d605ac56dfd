"""`fl-train status`: states, times and refusals."""

import fcntl
import json
import math
import os
from pathlib import Path

import pytest
import yaml
from lines import run_line

from fl_lightning.cli import main
from fl_lightning.lab.queue import queued
from fl_lightning.lab.status import standing, standings

TOO_LONG = "x" * 300
CONFIG = "method: {name: kapc, init_args: {}}\nfederation: {rounds: 10}\n"


def run(out, name, rounds, finished=False, failed=False):
    folder = out / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    if rounds:
        rows = [f"{t},{0.5 + 0.01 * t},{20.0}" for t in range(1, rounds + 1)]
        (folder / "metrics.csv").write_text(
            "\n".join(["round,mean_accuracy,seconds", *rows]) + "\n"
        )
    if finished:
        (folder / "summary.json").write_text(json.dumps({"rounds": 10}))
    if failed:
        (folder / "failure.txt").write_text("Traceback")
    return folder


def test_states_and_time_left(tmp_path):
    now = os.path.getmtime(run(tmp_path, "a", 4) / "metrics.csv")
    a = standing(tmp_path / "a", now + 5)
    assert (a.state, a.done, a.rounds, a.left) == ("running", 4, 10, 120.0)
    assert (a.last, a.best) == (pytest.approx(0.54), pytest.approx(0.54))
    assert standing(tmp_path / "a", now + 600).state == "stopped"
    assert standing(tmp_path / "a", now + 600).left is None
    assert standing(run(tmp_path, "b", 10, finished=True), now).state == "finished"
    assert standing(run(tmp_path, "c", 3, failed=True), now + 600).state == "failed"
    waiting = standing(run(tmp_path, "d", 0), now + 600)
    assert waiting.state == "waiting"
    assert math.isnan(waiting.last)
    # a run that failed in its first round
    (tmp_path / "d" / "log.txt").write_text("ended by BadClient\n")
    assert standing(tmp_path / "d", now + 600).state == "stopped"
    broken = run(tmp_path, "e", 1)
    (broken / "config.yaml").write_text("federation: [1")
    assert standing(broken, now).state == "unreadable"


def test_a_lock_tells_more_than_silence(tmp_path):
    folder = run(tmp_path, "a", 4)
    now = os.path.getmtime(folder / "metrics.csv")
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert standing(folder, now + 10**6).state == "running"
    assert standing(folder, now).state == "stopped"


def test_the_table_names_every_run(tmp_path, capsys):
    for name in ("a", "b-with-quite-a-long-name-for-a-run[lr=0.1]"):
        run(tmp_path, name, 10, finished=True)
    assert run_line(f"status {tmp_path}") == 0
    out = capsys.readouterr().out
    assert "b-with-quite-a-long-name-for-a-run[lr=0.1]" in out
    assert out.count("finished") == 2
    assert run_line(f"status {tmp_path / 'a'}") == 0
    assert "10/10" in capsys.readouterr().out


@pytest.mark.parametrize(
    "table", ["mean_accuracy,seconds\n0.5,20\n", "round,seconds\n1,x\n", "round\n\n\0,\n1.5\n"]
)
def test_a_damaged_run_leaves_the_others_in_the_table(tmp_path, capsys, table):
    run(tmp_path, "a", 10, finished=True)
    (run(tmp_path, "b", 2) / "metrics.csv").write_text(table)
    assert run_line(f"status {tmp_path}") == 0
    out = capsys.readouterr().out
    assert "finished" in out and "unreadable" in out


@pytest.mark.parametrize(
    "line",
    [
        "status .",
        "status none",
        "status a b",
        f"status {TOO_LONG}",
        f"report {TOO_LONG}",
        f"export --client 0 --out m.safetensors --run {TOO_LONG}",
    ],
)
def test_what_is_no_folder_of_runs_is_one_line(line, refused):
    refused(line)


SBATCH = "echo Submitted batch job 42"
SQUEUE = "echo '42_0 RUNNING None'; echo '42_1 PENDING Resources'; echo '7 PENDING Priority'"


def test_runs_that_are_queued_or_starting(tmp_path, monkeypatch, capsys, commands):
    monkeypatch.chdir(tmp_path)
    commands(sbatch=SBATCH)
    line = "submit --config kapc_exact_digits --name x --time 1:00:00 --array seed=0-2"
    assert run_line(f"{line} --federation.rounds 10") == 0

    def seen():
        runs = standings(Path("runs"))
        return {run.name: (run.state, run.why, run.rounds) for run in runs}

    names = ("x-seed0", "x-seed1", "x-seed2")
    assert seen() == dict.fromkeys(names, ("submitted", "", 10))  # nobody here knows more
    commands(squeue=SQUEUE)
    wanted = [("starting", "", 10), ("queued", "Resources", 10), ("gone", "", 10)]
    assert seen() == dict(zip(names, wanted, strict=True))
    capsys.readouterr()
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert "queued (Resources)" in out and "0/10" in out and "kapc" in out

    # The first has begun, the second has been stopped near its limit and queued again, the third is
    # over.
    runs = Path("runs")
    with (run(runs, "x-seed0", 0) / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert seen()["x-seed0"][0] == "starting"
        run(Path("other"), "y", 4).joinpath("metrics.csv").rename("runs/x-seed0/metrics.csv")
        assert seen()["x-seed0"][0] == "running"
    (run(runs, "x-seed1", 3) / "lock").touch()
    assert seen()["x-seed1"] == ("queued", "Resources", 10)
    run(runs, "x-seed2", 10, finished=True)
    assert seen()["x-seed2"][0] == "finished"


@pytest.fixture
def study(tmp_path, monkeypatch, capsys):
    """Submits the study `s` of some methods and seeds; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def submit(*words, config="kapc_exact_digits", methods="local, fedavg", seeds="0-1"):
        base = f"base: [{config}, {{fabric.accelerator: cpu}}]"
        text = f"{base}\nmethods: [{methods}]\nseeds: {seeds}\nforced: false\n"
        Path("s.yaml").write_text(text)
        capsys.readouterr()
        line = "study s.yaml --out s --slurm --time 1:00:00"
        return main([*line.split(), *words]), *capsys.readouterr()

    return submit


@pytest.mark.slow
def test_a_run_that_is_queued_is_not_submitted_again(capsys, commands, study):
    count = "echo x >> jobs; echo Submitted batch job $((10 + $(wc -l < jobs)))"
    waits = "for k in 0 1; do for j in 11 12; do echo ${j}_$k PENDING Priority; done; done"
    commands(sbatch=count, squeue=waits)

    def said(*words):
        code, out, err = study(*words)
        assert code == 0, err
        return out

    assert "2 of 4 runs in s; see" in said("--methods", "local")
    script = said("--dry-run")
    assert "runs/fedavg" in script and "runs/local" not in script
    assert "2 of 4 runs in s, 2 of 4 runs are queued or running already; see" in said()
    for words in ((), ("--dry-run",), ("--methods", "local")):
        out = said(*words)
        assert out.startswith("nothing to submit: ") and out.count("\n") == 1
    assert Path("jobs").read_text().count("x") == 2
    assert run_line("status s") == 0
    assert "4 queued" in capsys.readouterr().out

    # Job 12 has left the queue, and left nothing: its runs are submitted again, but for one that
    # goes on elsewhere.
    commands(squeue=waits.replace("11 12", "11"))
    with Path("s/runs/fedavg/seed-0/lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert "1 of 4 runs in s, 3 of 4 runs are queued or running already; see" in said()
    for run in Path("s/runs").glob("*/*"):
        (run / "summary.json").write_text("{}")
    assert said() == "nothing to submit: 4 of 4 runs have ended; see: fl-train status s\n"


def test_a_run_of_two_jobs_stands_as_in_the_one_that_is_there(tmp_path, commands):
    commands(squeue="echo 11 PENDING Priority")
    (tmp_path / "jobs").mkdir()
    runs = [[str(tmp_path / "a"), "kapc", 10]]
    content = {"submitted": "2026-01-01T00:00:00+00:00", "runs": runs}
    # the first as earlier versions called it
    for name, job in (("s", "11"), ("s-12", "12"), ("broken", "x")):
        (tmp_path / "jobs" / f"{name}.json").write_text(json.dumps(content | {"job": job}))
    assert [(one.state, one.why) for one in queued(tmp_path)] == [("queued", "Priority")]


@pytest.mark.slow
def test_a_corrected_place_of_the_data_reaches_the_jobs(commands, study):
    commands(sbatch=SBATCH, squeue="")

    def asked(*words):
        return study(*words, config="kapc_mnist", methods="local", seeds="0-4")

    def roots():
        files = sorted(Path("s/runs/local").glob("*/config.yaml"))
        return [yaml.safe_load(file.read_text())["data"]["root"] for file in files]

    assert asked("--data.root", "wrong")[0] == 0
    assert roots() == ["wrong"] * 5
    # Seed 1 has ended, seed 2 is at work, 3 runs in a job, 4 waits in the queue.
    (Path("s/runs/local/seed-1") / "summary.json").write_text("{}")
    commands(squeue="echo 42_3 RUNNING None; echo 42_4 PENDING Priority")
    with Path("s/runs/local/seed-2/lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert asked("--data.root", "right", "--dry-run")[0] == 0
        assert roots() == ["wrong"] * 5
        code, out, _ = asked("--data.root", "right")
    assert code == 0 and "1 of 5 runs in s, 3 of 5 runs are queued or running already" in out
    assert roots() == ["right", "wrong", "wrong", "wrong", "right"]
    # What a run may not change when it goes on is refused before anything is written or submitted.
    config = Path("s/runs/local/seed-0/config.yaml")
    config.write_text(config.read_text().replace("local_epochs: ", "local_epochs: 1"))
    before = Path("s/study.yaml").read_text()
    code, out, err = asked("--data.root", "third")
    assert (code, out, err.count("\n")) == (2, "", 1) and "federation.local_epochs" in err
    assert (Path("s/study.yaml").read_text(), roots()[0]) == (before, "right")
