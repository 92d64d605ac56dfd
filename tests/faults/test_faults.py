"""What clusters do to a run, done to real processes: every run ends in one line, and goes on to the
same numbers."""

import ctypes
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import forked, ranks, refuse, strike
from kills import RUNS, SMALL, campaign, record

SLOW = "--model fl_own_slow.Slow --model.seconds 0.05 --federation.rounds 300"
OWN = '''
import time
from torch import nn


class Slow(nn.Module):
    """Takes its time, so that something can happen in the middle."""

    def __init__(self, seconds: float = 0.0):
        super().__init__()
        self.seconds = seconds
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        time.sleep(self.seconds if self.training else 0)
        return self.out(x.flatten(1))
'''


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """An empty working directory, outside any launcher."""
    import fl_lightning.run  # noqa: F401  (before the fork)

    (tmp_path / "fl_own_slow.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in [n for n in os.environ if n.startswith(("SLURM_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    return tmp_path


def line(name, flags=""):
    """A small run that goes on if it was begun."""
    return [
        "fit",
        *SMALL.split(),
        *RUNS["kapc"].split(),
        *flags.split(),
        "--name",
        name,
        "--resume",
    ]


NOTICES = ("relation: ", "resume: there is no run", "round ")
"""How lines begin that any run may say."""


def told(attempt):
    """Its one line, beside what any run may say."""
    said = [text for text in attempt.err.splitlines() if not text.startswith(NOTICES)]
    assert len(said) == 1, attempt.err
    return said[0].removeprefix("fl-train: error: ")


def resumed(name, flags=""):
    """What a run comes to when it is resumed, to its end."""
    attempt = forked(line(name, flags), Path("resumed.said"))
    assert attempt.wait() == 0, attempt.err
    return record(Path("runs", name))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an unbroken run comes to."""
    folder = tmp_path_factory.mktemp("whole")
    attempt = forked([*line("whole"), "--out", str(folder / "runs")], folder / "said")
    assert attempt.wait() == 0, attempt.err
    return record(folder / "runs" / "whole")


def until(holds, *attempts):
    deadline = time.monotonic() + 180  # on a busy machine
    while not holds():
        assert time.monotonic() < deadline and not any(a.ended() for a in attempts), [
            a.err for a in attempts
        ]
        time.sleep(0.01)


def has_rounds(name, count):
    file = Path("runs", name, "metrics.csv")
    return lambda: file.exists() and file.read_text().count("\n") > count


def contents(folder):
    """What lies below `folder`, but for the note of who ran in it last."""
    files = (path for path in folder.rglob("*") if path.name != "lock")
    return {str(path): path.read_bytes() if path.is_file() else None for path in files}


# ---------------------------------------------------------------- signals


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_lets_the_checkpoint_be_finished(number, code, whole):
    attempt = forked(
        line("a"),
        Path("said"),
        strike("fsync before server", 3, lambda: os.kill(os.getpid(), number)),
    )
    assert attempt.wait() == code
    assert "Traceback" not in attempt.err
    assert (
        sorted(p.name for p in Path("runs/a/checkpoints").glob("manifest*"))[-1]
        == "manifest-round-00003.json"
    )
    assert not list(Path("runs/a").rglob("*.part"))
    assert resumed("a") == whole


# ---------------------------------------------------------------- the folder


@pytest.mark.slow
def test_two_runs_in_one_folder():
    first = forked(line("a", SLOW), Path("first"))
    until(has_rounds("a", 1), first)
    started = time.monotonic()
    second = forked(line("a", SLOW), Path("second"))
    assert second.wait() == 2
    assert time.monotonic() - started < 10
    assert told(second).startswith(f"name='a': another run uses runs/a (process {first.pid} on ")
    first.send(signal.SIGKILL)
    first.wait()
    third = forked(line("a", SLOW), Path("third"))
    rounds = Path("runs/a/metrics.csv").read_text().count("\n")
    until(has_rounds("a", rounds), third)
    third.send(signal.SIGTERM)
    assert third.wait() == 143


@pytest.mark.slow
def test_a_folder_that_cannot_be_written():
    assert forked(line("a", "--federation.rounds 2"), Path("said")).wait() == 0
    before = contents(Path("runs"))
    folders = [Path("runs"), Path("runs/a"), *(p for p in Path("runs/a").rglob("*") if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        for name in ("a", "new"):
            attempt = forked(line(name), Path("said"), powerless)
            assert attempt.wait() == 2
            assert told(attempt).startswith("out='runs': ")
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert contents(Path("runs")) == before


def powerless():
    """Let permissions hold for root too (capset: give up all capabilities)."""
    if os.geteuid() == 0:
        assert ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24)) == 0


@pytest.mark.sampled("before row")
@pytest.mark.parametrize(
    "point", ["fsync before row", "fsync half manifest", "fsync half metrics.csv"]
)
def test_a_disk_that_is_full(point, whole):
    attempt = forked(line("a"), Path("said"), strike(point, 4, refuse))
    assert attempt.wait() == 1
    assert told(attempt).startswith("cannot write runs/a/")
    assert told(attempt).endswith(": No space left on device")
    assert resumed("a") == whole


@pytest.mark.slow
def test_a_table_that_outgrows_what_the_system_allows(whole):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    flags = "--federation.rounds 2000"
    attempt = forked(line("a", flags), Path("said"), limit)
    assert attempt.wait() == 1
    assert told(attempt) == "cannot write runs/a/metrics.csv: File too large"
    assert not Path("runs/a/metrics.csv").read_text().endswith("\n")  # a row was cut short
    done = max(int(p.stem.rpartition("-")[2]) for p in Path("runs/a/checkpoints").glob("manifest*"))
    again = resumed("a", f"--federation.rounds {done + 2}")
    assert [int(row["round"]) for row in again.metrics] == list(range(1, done + 3))
    assert (
        len({(row["round"], row["client"]) for row in again.clients})
        == len(again.clients)
        == 3 * (done + 2)
    )


# ---------------------------------------------------------------- the checkpoint


@pytest.mark.sampled("flipped-server")
@pytest.mark.parametrize(
    "what", ["rows/client-*-round-00006*", "server-round-00006*", "manifest-round-00006*"]
)
@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
def test_a_damaged_checkpoint_is_passed_over(what, how, whole):
    assert forked(line("a", "--federation.rounds 6"), Path("said")).wait() == 0
    file = sorted(Path("runs/a/checkpoints").glob(what))[-1]
    held = file.read_bytes()
    if how == "gone":
        file.unlink()
    else:
        flipped = held[:-40] + bytes([held[-40] ^ 4]) + held[-39:]
        file.write_bytes(held[: len(held) // 2] if how == "cut" else flipped)
    assert resumed("a") == whole
    (said,) = [
        text for text in Path("resumed.said").read_text().splitlines() if "checkpoint" in text
    ] or [""]
    if how == "gone" and "manifest" in what:
        assert said == ""  # nobody knows that there was one
    else:
        assert said.startswith("checkpoint: passed over round 6: ")
        assert file.name in said
        assert said.endswith("; using round 5")


@pytest.mark.slow
def test_no_intact_checkpoint_changes_nothing():
    assert forked(line("a", "--federation.rounds 3"), Path("said")).wait() == 0
    for file in Path("runs/a/checkpoints").glob("server-*"):
        file.write_bytes(b"")
    before = contents(Path("runs"))
    attempt = forked(line("a"), Path("said"))
    assert attempt.wait() == 2
    assert told(attempt).startswith(
        "run='runs/a': it has no intact checkpoint (round 3: server-round-0"
    )
    assert contents(Path("runs")) == before
    shutil.rmtree("runs/a/checkpoints")
    attempt = forked(line("a"), Path("said"))
    assert attempt.wait() == 2
    assert "checkpoints are gone" in told(attempt)


@pytest.mark.slow
def test_a_table_with_a_hole_is_not_continued():
    assert forked(line("a", "--federation.rounds 3"), Path("said")).wait() == 0
    file = Path("runs/a/metrics.csv")
    rows = file.read_text().splitlines(keepends=True)
    for text, what in (
        (rows[:2] + rows[3:], "lacks"),
        ([*rows[:3], "x,y\n"], "lacks"),
        ([*rows, rows[1]], "twice"),
    ):
        file.write_text("".join(text))
        attempt = forked(line("a"), Path("said"))
        assert attempt.wait() == 2
        assert "metrics.csv" in told(attempt) and what in told(attempt)


# ---------------------------------------------------------------- ranks


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_is_named(rank):
    several = ranks(2, line("a", SLOW), Path("said"))
    until(has_rounds("a", 1), *several)
    several[rank].send(signal.SIGKILL)
    start = time.monotonic()
    other = several[1 - rank]
    assert other.wait() == 1
    assert time.monotonic() - start < 20
    assert told(other) == f"rank {rank} is gone; the run can be continued with --resume"
    again = ranks(2, line("a", f"{SLOW} --federation.rounds 4"), Path("said"))
    assert [a.wait() for a in again] == [0, 0], [a.err for a in again]
    assert [row["round"] for row in record(Path("runs/a")).metrics] == ["1", "2", "3", "4"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_named(rank):
    several = ranks(2, line("a", f"{SLOW} --fabric.timeout 5"), Path("said"))
    until(has_rounds("a", 1), *several)
    several[rank].send(signal.SIGSTOP)
    start = time.monotonic()
    other = several[1 - rank]
    try:
        assert other.wait() == 1
    finally:
        several[rank].send(signal.SIGKILL)
    assert 4 < time.monotonic() - start < 30
    said = told(other)
    assert (
        said == f"rank {rank} gave no sign of life for 5 s; the run can be continued with --resume"
    )


@pytest.mark.slow
def test_a_rank_with_a_full_disk_is_told_from_one_that_died():
    several = ranks(2, line("a", SLOW), Path("said"), strike("fsync before row", 2, refuse), rank=1)
    assert [a.wait() for a in several] == [1, 1]
    assert told(several[1]).endswith("No space left on device")
    assert told(several[0]).startswith("rank 1 is gone; ")


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_fl_train_has_started_is_lost(number):
    words = [
        str(Path(sys.executable).with_name("fl-train")),
        *line("a", f"{SLOW} --fabric.devices 2"),
    ]
    words += ["--fabric.timeout", "5"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        until(has_rounds("a", 1))
        signs = [
            p
            for p in _children(process.pid)
            if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()
        ]
        assert len(signs) == 2
        os.kill(max(signs), number)
        start = time.monotonic()
        _, err = process.communicate(timeout=200)
    said = [text for text in err.splitlines() if not text.startswith(NOTICES)]
    assert process.returncode == 1, err
    assert time.monotonic() - start < 45
    silent = "rank 1 gave no sign of life for 5 s"  # a busy machine may find this out first
    reasons = (
        [silent]
        if number == signal.SIGSTOP
        else [silent, "rank 1 died (killed by SIGKILL)", "rank 1 is gone"]
    )
    assert said in [
        [f"fl-train: error: {reason}; the run can be continued with --resume"] for reason in reasons
    ]
    assert not any(Path(f"/proc/{p}").exists() for p in signs)
    done = subprocess.run(
        [*words, "--federation.rounds", "5"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def _children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# ---------------------------------------------------------------- data, W&B


@pytest.mark.slow
def test_data_that_cannot_be_read_in_the_middle(whole):
    def worn():
        from fl_lightning.data import part

        real, calls = part.ClientSamples.__getitems__, [0]

        def read(self, rows):
            calls[0] += 1
            if calls[0] == 60:
                raise OSError("the disk has let go of a sector")
            return real(self, rows)

        part.ClientSamples.__getitems__ = read

    attempt = forked(line("a", "--data.resident never"), Path("said"), worn)
    assert attempt.wait() == 1
    assert "OSError: the disk has let go of a sector (traceback in failure.txt)" in told(attempt)
    assert told(attempt).startswith("client ")
    assert resumed("a") == whole


# ---------------------------------------------------------------- secrets

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.slow
def test_the_wandb_key_is_nowhere(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    logged = "--federation.rounds 2 --loggers wandb,tensorboard"
    attempt = forked(line("a", logged), Path("said"))
    assert attempt.wait() == 0, attempt.err
    assert "wandb" in {p.name for p in Path("runs/a").iterdir()}
    for place in (
        f"--loggers.wandb.project {KEY}",
        f"--loggers.wandb.tags [{KEY}]",
        f"--model.hidden {KEY}",
        f"--loggers.wandb.api_key {KEY}",
        f"--{KEY} 1",
        f"--config {KEY}",
    ):
        attempt = forked(line("b", place), Path("said-2"))
        assert attempt.wait() == 2, place
        assert "***" in told(attempt) and KEY not in attempt.err
    assert not Path("runs/b").exists()
    attempt = forked(line("c"), Path("said-3"), strike("fsync before manifest", 2, broken))
    assert attempt.wait() == 70
    assert "Traceback" in attempt.err and "***" in attempt.err and KEY not in attempt.err
    for path in Path().rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


def broken():
    raise LookupError(f"a bug that talks of {KEY}")


def test_a_key_that_only_looks_like_one_is_refused_too():
    attempt = forked(line("a", f"--loggers.wandb.group {KEY}"), Path("said"))
    assert attempt.wait() == 2
    assert told(attempt) == (
        "loggers.wandb.group='***': it holds a W&B key: remove it, and set "
        "WANDB_API_KEY in the environment"
    )


# ---------------------------------------------------------------- kills


@pytest.mark.slow
@pytest.mark.alone
def test_six_kills(tmp_path):
    log = campaign(6, 1, tmp_path)
    assert log.failures == []
    counts = json.loads(json.dumps(log.counts()))
    assert counts["kills"] == counts["resumed"] == 6
    assert counts["2 ranks, writing"] and counts["1 rank, writing"] and counts["1 rank, random"]
    assert counts["runs compared"] >= 2
