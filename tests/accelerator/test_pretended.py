"""The pretended device is as strict as a GPU, and a run on it ends as one whose device is lost or
full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended import STATE
from torch import Tensor, nn
from touchy import Body

from fl_lightning.cli import main

pytestmark = pytest.mark.usefixtures("only_pretended")
Fit = Callable[..., Path]


# ---------------------------------------------------------------- the device itself


def test_it_computes_what_the_cpu_does_and_lets_no_other_tensor_in(device: str) -> None:
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 1, 8, 8, generator=draws), torch.arange(6) % 5
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
    )
    found = []
    for where in ("cpu", device):
        net = net.to(where)
        loss = nn.functional.cross_entropy(net(x.to(where)), y.to(where))
        found.append([loss, *torch.autograd.grad(loss, list(net.parameters()))])
    assert all(
        torch.equal(a, b.cpu()) and b.device.type == device for a, b in zip(*found, strict=True)
    )
    vector, ones = torch.zeros(4, device=device), torch.ones(4)
    view = vector[1:3]
    view += 1
    assert vector.tolist() == [0, 1, 1, 0]
    for wrong in (
        lambda: vector + ones,
        lambda: vector.normal_(generator=draws),
        lambda: vector.numpy(),
    ):
        with pytest.raises((RuntimeError, TypeError)):
            wrong()
    assert vector[torch.tensor([1])].tolist() == [1]  # indices may come from the host


def test_its_memory_is_counted_and_ends(device: str) -> None:
    before = STATE.held
    vector = torch.zeros(1000, device=device)
    assert STATE.held == before + 4000
    STATE.limit = STATE.held + 100
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(26, device=device)
    del vector
    assert STATE.held == before


# ---------------------------------------------------------------- a device that fails


@pytest.mark.sampled("[skip]")
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_device_that_is_lost_ends_the_run_and_no_client_is_blamed(
    policy: str,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Body, "touch", lose)
    line = (
        f"fit --config kapc_exact_digits --name lost --loggers null --callbacks null "
        f"--fabric.accelerator {device}"
    )
    line += f" --model touchy.Body --federation.on_bad_client {policy} --data.fraction 0.1"
    assert main(line.split()) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the device pretended:0 failed in round" in said and "illegal memory access" in said
    assert "more lines" not in said and not (tmp_path / "runs" / "lost" / "failures.csv").exists()


def lose(self: nn.Module, x: Tensor) -> Tensor:
    STATE.dead = self.training and len(x) > 2  # not while operations are counted
    return x


@pytest.mark.slow
def test_clients_that_do_not_fit_at_once_train_one_by_one(
    fit: Fit, device: str, monkeypatch: Any
) -> None:
    """As many as they are, `vmap` would take the same room for one of them."""
    from fl_lightning.training.executors.vmap import Vmap

    def full(self: Vmap, jobs: Any) -> Any:
        raise torch.OutOfMemoryError("pretended out of memory")

    flags = f"--fabric.accelerator {device} --federation.rounds 1 --data.fraction 0.2"
    loop = fit("loop", flags)
    monkeypatch.setattr(Vmap, "train", full)
    stacked = fit("vmap", flags, "--fabric.executor vmap")
    assert (stacked / "clients.csv").read_text().count("\n") == (
        loop / "clients.csv"
    ).read_text().count("\n")
    assert not (stacked / "failure.txt").exists()
