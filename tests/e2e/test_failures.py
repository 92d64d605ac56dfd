"""A run that fails half-way says so, ends, and keeps what it had."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from lines import run_line

from fl_lightning.cli import main
from fl_lightning.methods.fedavg import FedAvg

BURSTING = "--model fl_own_models.Bursting --federation.batch_size 1000 --federation.rounds 4"


def test_a_failing_client_is_named_and_the_rounds_before_it_are_kept(
    fit,
    small,
    table,
    bursts,
    record,
    capsys,
):
    whole = record(fit("whole", BURSTING))
    # operations are counted on two passes; five clients in round 1, three in round 2
    bursts.at = 2 + 5 + 3
    capsys.readouterr()
    assert main(small("a", BURSTING)) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith(
        "fl-train: error: client 2 failed in round 2, stage training: ArithmeticError: it burst "
    )
    assert not any("Traceback" in line for line in err)
    folder = Path("runs/a")
    assert "on a second line" in (folder / "failure.txt").read_text()
    assert [row["round"] for row in table(folder)] == ["1"]
    assert len(table(folder, "clients.csv")) == 5
    assert [file.name for file in (folder / "relation").iterdir()] == ["round-0001.npz"]
    assert not (folder / "summary.json").exists()
    bursts.at = 0
    assert record(fit("a", BURSTING, "--resume")) == whole


def test_training_that_leaves_the_numbers_is_told(small, capsys):
    """An unstable step on the relation (nothing projects it back) does not go on with garbage."""
    flags = (
        "--method.solver step --method.rho_units absolute --method.projection none --method.eta_r "
        "1e30"
    )
    assert main(small("a", flags, "--method.relation_steps 30")) == 1
    assert "unstable" in capsys.readouterr().err.splitlines()[-1]


def test_a_disk_that_refuses(small, workplace, capsys):
    assert main(small("a")) == 0
    capsys.readouterr()
    shutil.rmtree(workplace / "runs" / "a" / "relation")
    (workplace / "runs" / "a" / "relation").write_text("in the way")
    assert main(small("a", "--resume", "--federation.rounds", "9")) == 1
    assert "cannot write runs/a/relation" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_leaves_no_process_behind(how, fl_train, small, workplace):
    """To end the process that was started is enough, however many it has started itself.

    It is started as a script starts a job in the background, which ignores Ctrl-C.
    """
    line = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
    line = [
        *line,
        fl_train,
        *small(
            "a",
            "--model fl_own_models.Slow --model.seconds 0.03 --federation.rounds 300",
            "--fabric.devices 2",
        ),
    ]
    metrics = workplace / "runs" / "a" / "metrics.csv"
    with subprocess.Popen(line, cwd=workplace, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not metrics.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        ranks = children(process.pid)
        assert len(ranks) >= 2
        process.send_signal(how)
        _, err = process.communicate(timeout=90)
    assert process.returncode == (143 if how == signal.SIGTERM else -9), err
    assert "Traceback" not in err
    gone = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < gone, "a rank goes on"
        time.sleep(0.1)


def children(pid):
    """Process ids of the children of `pid` (Linux)."""
    if not os.path.isdir("/proc"):
        pytest.skip("no /proc to look at")
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found.append(int(status.parent.name))
    return found


def test_memory_that_ends_beside_the_visits_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    def broadcast(self, server):
        raise torch.OutOfMemoryError("2 GiB wanted\nand a long report")

    monkeypatch.setattr(FedAvg, "broadcast", broadcast)
    flags = (
        "--method fedavg --loggers null --callbacks null --fabric.accelerator cpu "
        "--federation.rounds 1"
    )
    assert run_line(f"fit --config kapc_exact_digits --out {tmp_path} {flags}") == 1
    err = capsys.readouterr().err.strip().splitlines()
    assert (
        err[-1]
        == "fl-train: error: out of memory: 2 GiB wanted; fl-train plan says what a run takes"
    )
