"""What must hold where there is a GPU: a run goes on there from a checkpoint of the CPU, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fl_lightning.callbacks.checkpoint import Checkpoint, restore
from fl_lightning.cli.commands import load
from fl_lightning.parallel import ClientParallelStrategy
from fl_lightning.run import assemble
from fl_lightning.runfolder import RunFolder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(("first", "second"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_run_goes_on_on_another_kind_of_device(fit: Callable[..., Path], first: str, second: str) -> None:
    from lightning.fabric import Fabric

    begun = fit("a", f"--fabric.accelerator {first} --federation.rounds 2")
    rows = {}
    for device in (first, second):
        fabric = Fabric(accelerator=device, devices=1, strategy=ClientParallelStrategy())
        fabric.launch()
        fed = assemble(fabric, load(begun), begun, [Checkpoint()])
        assert restore(fed, begun / "checkpoints") == 2
        rows[device] = {c: state.row.cpu() for c, state in fed.states.items()}
    assert all(torch.equal(rows[first][c], rows[second][c]) for c in rows[first])
    moved = fit("a", f"--fabric.accelerator {second} --federation.rounds 3 --resume")
    stayed = fit("b", f"--fabric.accelerator {first} --federation.rounds 3")
    here, there = (RunFolder(folder).read_metrics()[-1] for folder in (stayed, moved))
    for name in ("train_loss", "coaching_loss"):
        assert there[name] == pytest.approx(here[name], rel=1e-3)
