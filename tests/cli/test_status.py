"""`fl-train status`: states, times and refusals."""

from __future__ import annotations

import fcntl
import json
import math
import os
from pathlib import Path

import pytest
import yaml

from fl_lightning.cli import main
from fl_lightning.lab.queue import queued
from fl_lightning.lab.status import standing, standings

CONFIG = "method: {name: kapc, init_args: {}}\nfederation: {rounds: 10}\n"


def run(out: Path, name: str, rounds: int, finished: bool = False, failed: bool = False) -> Path:
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


def test_states_and_time_left(tmp_path: Path) -> None:
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


def test_a_lock_tells_more_than_silence(tmp_path: Path) -> None:
    folder = run(tmp_path, "a", 4)
    now = os.path.getmtime(folder / "metrics.csv")
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert standing(folder, now + 10**6).state == "running"
    assert standing(folder, now).state == "stopped"


def test_the_table_names_every_run(tmp_path: Path, capsys) -> None:
    for name in ("a", "b-with-quite-a-long-name-for-a-run-folder"):
        run(tmp_path, name, 10, finished=True)
    assert main(["status", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "b-with-quite-a-long-name-for-a-run-folder" in out
    assert out.count("finished") == 2
    assert main(["status", str(tmp_path / "a")]) == 0
    assert "10/10" in capsys.readouterr().out


def test_no_runs_is_one_line(tmp_path: Path, capsys) -> None:
    for words in ([str(tmp_path)], [str(tmp_path / "none")], ["a", "b"]):
        assert main(["status", *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_names_with_brackets_are_shown_whole(tmp_path: Path, capsys) -> None:
    run(tmp_path, "x[lr=0.1]", 10, finished=True)
    assert main(["status", str(tmp_path)]) == 0
    assert "x[lr=0.1]" in capsys.readouterr().out


@pytest.mark.parametrize(
    "table", ["mean_accuracy,seconds\n0.5,20\n", "round,seconds\n1,x\n", "round\n\n\0,\n1.5\n"]
)
def test_a_damaged_run_leaves_the_others_in_the_table(tmp_path: Path, capsys, table: str) -> None:
    run(tmp_path, "a", 10, finished=True)
    (run(tmp_path, "b", 2) / "metrics.csv").write_text(table)
    assert main(["status", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "finished" in out and "unreadable" in out


def test_a_name_that_can_be_no_folder_is_one_line(tmp_path: Path, capsys) -> None:
    for words in (
        ["status"],
        ["report"],
        ["export", "--client", "0", "--out", str(tmp_path / "m.safetensors"), "--run"],
    ):
        assert main([*words, "x" * 300]) == 2
        assert capsys.readouterr().err.count("\n") == 1


SBATCH = "#!/bin/bash\necho Submitted batch job 42\n"
SQUEUE = (
    "#!/bin/bash\necho '42_0 RUNNING None'; echo '42_1 PENDING Resources'; echo '7 PENDING "
    "Priority'\n"
)


def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, **commands: str) -> None:
    """Commands that answer as SLURM's do."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in commands.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")


def test_runs_that_are_queued_or_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    slurm(tmp_path, monkeypatch, sbatch=SBATCH)
    line = (
        "submit --config kapc_exact_digits --time 1:00:00 --array seed=0-2 --federation.rounds 10"
    )
    assert main(line.split()) == 0

    def seen() -> dict[str, tuple[str, str, int]]:
        return {
            s.name.removeprefix("kapc_exact_digits-"): (s.state, s.why, s.rounds)
            for s in standings(Path("runs"))
        }

    names = ("seed0", "seed1", "seed2")
    assert seen() == dict.fromkeys(names, ("submitted", "", 10))  # nobody here knows more
    slurm(tmp_path, monkeypatch, squeue=SQUEUE)
    wanted = [("starting", "", 10), ("queued", "Resources", 10), ("gone", "", 10)]
    assert seen() == dict(zip(names, wanted, strict=True))
    capsys.readouterr()
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert "queued (Resources)" in out and "0/10" in out and "kapc" in out

    # The first has begun, the second has been stopped near its limit and queued again, the third is
    # over.
    with (run(Path("runs"), "kapc_exact_digits-seed0", 0) / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert seen()["seed0"][0] == "starting"
        run(Path("runs"), "x", 4).joinpath("metrics.csv").rename(
            "runs/kapc_exact_digits-seed0/metrics.csv"
        )
        assert seen()["seed0"][0] == "running"
    (run(Path("runs"), "kapc_exact_digits-seed1", 3) / "lock").touch()
    assert seen()["seed1"] == ("queued", "Resources", 10)
    run(Path("runs"), "kapc_exact_digits-seed2", 10, finished=True)
    assert seen()["seed2"][0] == "finished"


def test_a_study_counts_what_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    slurm(tmp_path, monkeypatch, sbatch=SBATCH, squeue=SQUEUE)
    text = (
        "base: [kapc_exact_digits, {fabric.accelerator: cpu}]\nmethods: [fedprox]\nseeds: [0, "
        "1]\nforced: false\n"
    )
    Path("s.yaml").write_text(text)
    assert (
        main(
            [
                "study",
                "s.yaml",
                "--out",
                "s",
                "--slurm",
                "--time",
                "1:00:00",
                "--sbatch",
                "--qos=low",
            ]
        )
        == 0
    )
    assert "#SBATCH --qos=low" in Path("s/jobs/s.sbatch").read_text()
    capsys.readouterr()
    assert main(["status", "s"]) == 0
    out = capsys.readouterr().out
    assert "1 starting, 1 queued" in out and "seed 0 starting" in out


def test_a_run_that_is_queued_is_not_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    count = "#!/bin/bash\necho x >> jobs; echo Submitted batch job $((10 + $(wc -l < jobs)))\n"
    waits = (
        "#!/bin/bash\nfor k in 0 1; do for j in 11 12; do echo ${j}_$k PENDING Priority; done; "
        "done\n"
    )
    slurm(tmp_path, monkeypatch, sbatch=count, squeue=waits, sinfo="#!/bin/bash\nexit 1\n")
    text = (
        "base: [kapc_exact_digits, {fabric.accelerator: cpu}]\nmethods: [local, fedavg]\nseeds: "
        "[0, 1]\nforced: false\n"
    )
    Path("s.yaml").write_text(text)

    def said(*words: str) -> str:
        capsys.readouterr()
        assert main(["study", "s.yaml", "--out", "s", "--slurm", "--time", "1:00:00", *words]) == 0
        return capsys.readouterr().out

    assert "2 of 4 runs in s; see" in said("--methods", "local")
    script = said("--dry-run")
    assert "runs/fedavg" in script and "runs/local" not in script
    assert "2 of 4 runs in s, 2 of 4 runs are queued or running already; see" in said()
    for words in ((), ("--dry-run",), ("--methods", "local")):
        out = said(*words)
        assert out.startswith("nothing to submit: ") and out.count("\n") == 1
    assert Path("jobs").read_text().count("x") == 2
    capsys.readouterr()
    assert main(["status", "s"]) == 0
    assert "4 queued" in capsys.readouterr().out

    # Job 12 has left the queue, and left nothing: its runs are submitted again, but for one that
    # goes on elsewhere.
    slurm(tmp_path, monkeypatch, squeue=waits.replace("11 12", "11"))
    with Path("s/runs/fedavg/seed-0/lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert "1 of 4 runs in s, 3 of 4 runs are queued or running already; see" in said()
    for run in Path("s/runs").glob("*/*"):
        (run / "summary.json").write_text("{}")
    assert said() == "nothing to submit: 4 of 4 runs have ended; see: fl-train status s\n"


def test_a_run_of_two_jobs_stands_as_in_the_one_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(tmp_path, monkeypatch, squeue="#!/bin/bash\necho 11 PENDING Priority\n")
    (tmp_path / "jobs").mkdir()
    content = {
        "submitted": "2026-01-01T00:00:00+00:00",
        "runs": [[str(tmp_path / "a"), "kapc", 10]],
    }
    # the first as earlier versions called it
    for name, job in (("s", "11"), ("s-12", "12"), ("broken", "x")):
        (tmp_path / "jobs" / f"{name}.json").write_text(json.dumps({**content, "job": job}))
    assert [(one.state, one.why) for one in queued(tmp_path)] == [("queued", "Priority")]


def test_a_corrected_place_of_the_data_reaches_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    slurm(
        tmp_path, monkeypatch, sbatch=SBATCH, squeue="#!/bin/bash\n", sinfo="#!/bin/bash\nexit 1\n"
    )
    text = (
        "base: [kapc_mnist, {fabric.accelerator: cpu}]\nmethods: [local]\nseeds: 0-4\nforced: "
        "false\n"
    )
    Path("s.yaml").write_text(text)

    def asked(*words: str) -> int:
        capsys.readouterr()
        return main(["study", "s.yaml", "--out", "s", "--slurm", "--time", "1:00:00", *words])

    def roots() -> list[str]:
        files = sorted(Path("s/runs/local").glob("*/config.yaml"))
        return [yaml.safe_load(file.read_text())["data"]["root"] for file in files]

    assert asked("--data.root", "wrong") == 0
    assert roots() == ["wrong"] * 5
    # Seed 1 has ended, seed 2 is at work, 3 runs in a job, 4 waits in the queue.
    (Path("s/runs/local/seed-1") / "summary.json").write_text("{}")
    slurm(
        tmp_path,
        monkeypatch,
        squeue="#!/bin/bash\necho 42_3 RUNNING None; echo 42_4 PENDING Priority\n",
    )
    with Path("s/runs/local/seed-2/lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert asked("--data.root", "right", "--dry-run") == 0
        assert roots() == ["wrong"] * 5
        assert asked("--data.root", "right") == 0
    assert "1 of 5 runs in s, 3 of 5 runs are queued or running already" in capsys.readouterr().out
    assert roots() == ["right", "wrong", "wrong", "wrong", "right"]
    # What a run may not change when it goes on is refused before anything is written or submitted.
    config = Path("s/runs/local/seed-0/config.yaml")
    config.write_text(config.read_text().replace("local_epochs: ", "local_epochs: 1"))
    before = Path("s/study.yaml").read_text()
    assert asked("--data.root", "third") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and "federation.local_epochs" in err
    assert (Path("s/study.yaml").read_text(), roots()[0]) == (before, "right")
