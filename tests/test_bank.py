"""Rows in mapped files: the same numbers as in memory, nothing left behind, and the memory is really spared."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning.bank import Bank
from fl_lightning.callbacks.base import Callback
from fl_lightning.callbacks.checkpoint import Checkpoint, restore
from fl_lightning.callbacks.compression import Quantize
from fl_lightning.errors import BadInput, RunFailed
from fl_lightning.federation import Federation
from fl_lightning.methods.kapc import KAPC
from fl_lightning.payload import Payload

Make = Callable[..., Federation]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("disk", [False, True])
def test_a_kept_row_is_a_copy_that_can_be_written_to(tmp_path: Path, dtype: torch.dtype, disk: bool) -> None:
    bank = Bank(tmp_path if disk else None, torch.device("cpu"))
    row = torch.randn(1000).to(dtype)
    kept, other = bank.keep(row), bank.keep(row)
    assert torch.equal(kept, row) and kept.dtype == dtype and kept.data_ptr() % 64 == 0
    kept += 1
    assert torch.equal(kept, row + 1) and torch.equal(other, row)
    assert not list(tmp_path.iterdir())  # its file has no name


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunFailed, match="No space left"):
        Bank(tmp_path, torch.device("cpu")).keep(torch.zeros(4))
    assert not list(tmp_path.iterdir())


def test_not_on_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"fabric\.bank.*cuda"):
        Bank(tmp_path, torch.device("cuda"))


def test_a_federation_whose_rows_lie_on_disk(federation: Make, tmp_path: Path) -> None:
    """Unbroken and resumed, with a server's copy beside each row."""
    feds = []
    for disk in (False, True):
        fed = federation(KAPC(), net="norm", rounds=3, participation=0.5, callbacks=[Quantize(), Checkpoint()])
        fed.folder = tmp_path / str(disk)
        fed.folder.mkdir()
        fed.bank = Bank(fed.folder if disk else None, torch.device("cpu"))
        fed.fit()
        feds.append(fed)
    memory, disk_ = feds
    again = federation(KAPC(), net="norm", rounds=3, participation=0.5, callbacks=[Quantize()])
    again.bank = Bank(disk_.folder, torch.device("cpu"))
    restore(again, disk_.folder / "checkpoints")
    for other in (disk_, again):
        for c, state in memory.states.items():
            assert torch.equal(state.row, other.states[c].row)
            assert torch.equal(state.received, other.states[c].received)


@pytest.mark.parametrize("callbacks", [[], [Quantize()]], ids=["one copy", "two copies"])
def test_a_client_that_failed_stays_in_the_bank(federation: Make, callbacks: list[Callback]) -> None:
    class Fault(Callback):
        def on_upload(self, fed: Federation, client: int, payload: Payload) -> None:
            if client == 1 and fed.server.round == 1:
                raise ArithmeticError

    fed = federation(KAPC(), rounds=2, on_bad_client="skip", callbacks=[*callbacks, Fault()])
    fed.round(1)
    places = {c: (s.row.data_ptr(), s.received.data_ptr()) for c, s in fed.states.items()}
    before = fed.states[1].row.clone()
    fed.round(2)
    assert {c: (s.row.data_ptr(), s.received.data_ptr()) for c, s in fed.states.items()} == places
    assert torch.equal(fed.states[1].row, before)


MEASURE = """
import re, sys
from fl_lightning.cli import main
from fl_lightning.federation import Federation

whole = Federation.round

def round(self, t):
    record = whole(self, t)
    status = open("/proc/self/status").read()
    print("ANON", int(re.search(r"RssAnon:\\s+(\\d+)", status)[1]) // 1024)
    return record

Federation.round = round
flags = "--config kapc_digits --loggers null --callbacks null --method local --federation.rounds 1"
flags += " --federation.clients 60 --federation.local_epochs 0 --evaluation.models [] --data.alpha 100"
flags += " --data.min_samples 1 --model.hidden [2000,500]"
assert main(["fit", *flags.split(), "--fabric.bank", sys.argv[1], "--out", sys.argv[2]]) == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_rows_on_disk_take_no_memory_of_their_own(tmp_path: Path) -> None:
    """60 models of 4.5 MB: what the process holds beside mapped files differs by most of their 270 MB."""
    held = {}
    for bank in ("memory", "disk"):
        line = [sys.executable, "-c", MEASURE, bank, str(tmp_path / bank)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        held[bank] = int(done.stdout.partition("ANON")[2].split()[0])
    assert held["memory"] - held["disk"] > 200, held
