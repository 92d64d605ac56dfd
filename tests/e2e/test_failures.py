"""A run that fails half-way says so, ends, and keeps what it had."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from lines import run_line

from fl_lightning.cli import main
from fl_lightning.methods.fedavg import FedAvg


def test_training_that_leaves_the_numbers_is_told(small, capsys):
    """An unstable step on the relation (nothing projects it back) does not go on with garbage."""
    flags = (
        "--method.solver step --method.rho_units absolute --method.projection none --method.eta_r "
        "1e30"
    )
    assert main(small("a", flags, "--method.relation_steps 30")) == 1
    assert "unstable" in capsys.readouterr().err.splitlines()[-1]


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
        == "fl-train: error: out of memory: 2 GiB wanted; fl-train plan estimates what a run needs"
    )
