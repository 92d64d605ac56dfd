"""The pretended device is as strict as a GPU; its detector and graphs see planted faults; rounds wait little."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from streams import STATE, PretendedGraph, StreamBackend, present
from torch import Tensor, nn
from touchy import Body

from fl_lightning.cli import main
from fl_lightning.engine.federation import Federation
from fl_lightning.storage.store import StreamLane

pytestmark = pytest.mark.usefixtures("only_pretended")
Fit = Callable[..., Path]
ON = torch.device("pretended", 0)


# ---------------------------------------------------------------- the device itself


def test_it_computes_what_the_cpu_does_and_lets_no_other_tensor_in(device: str) -> None:
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 1, 8, 8, generator=draws), torch.arange(6) % 5
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    found = []
    for where in ("cpu", device):
        net = net.to(where)
        loss = nn.functional.cross_entropy(net(x.to(where)), y.to(where))
        found.append([loss, *torch.autograd.grad(loss, list(net.parameters()))])
    assert all(torch.equal(a, b.cpu()) and b.device.type == device for a, b in zip(*found, strict=True))
    vector, ones = torch.zeros(4, device=device), torch.ones(4)
    view = vector[1:3]
    view += 1
    assert vector.tolist() == [0, 1, 1, 0]
    for wrong in (lambda: vector + ones, lambda: vector.normal_(generator=draws), lambda: vector.numpy()):
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


# ---------------------------------------------------------------- detectors detect


def planted(fault: str) -> list[str]:
    """What the detector says of copies beside the device's work, with one thing left out."""
    side = StreamBackend.Stream()
    compute = StreamBackend.current_stream()
    with present() as detector:
        source, back = torch.ones(100, device=ON), torch.empty(100, pin_memory=True)
        if fault != "no wait for what is computed":
            side.wait_stream(compute)
        with StreamBackend.stream(side):
            back.copy_(source, non_blocking=True)
            done = side.record_event()
        if fault == "given back too early":
            del source
        if fault == "written over too early":
            source.zero_()
        if fault != "read too early":
            side.synchronize()
        assert back.sum() == 100
        compute.wait_event(done)
    return detector.found


FAULTS = ("no wait for what is computed", "given back too early", "written over too early", "read too early")


@pytest.mark.parametrize("fault", FAULTS)
def test_the_detector_sees_what_is_left_out(fault: str) -> None:
    assert planted("") == []
    assert planted(fault) != []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["wait_stream", "wait", "synchronize"])
def test_the_bank_would_race_without_each_of_its_waits(fault: str, fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "wait_stream":
        monkeypatch.setattr(StreamBackend.Stream, "wait_stream", lambda self, other: None)
    elif fault == "wait":
        real = StreamLane.copy
        monkeypatch.setattr(StreamLane, "copy", lambda *args: [real(*args), lambda: None][1])
    else:
        monkeypatch.setattr(StreamLane, "synchronize", lambda self: None)
    flags = "--fabric.accelerator pretended --fabric.bank host --federation.rounds 2 --data.fraction 0.1"
    with present() as detector:
        fit("raced", flags, "--federation.clients 3 --callbacks checkpoint")
    assert detector.found != []


def test_a_graph_runs_no_python_and_leaves_nothing_in_its_memory(device: str) -> None:
    vector, calls, left = torch.zeros(3, device=device), [], []

    def step() -> None:
        calls.append(1)
        left[:] = [vector * 2]
        vector.add_(left[0] + 1)

    graph = PretendedGraph()
    with StreamBackend.graph(graph):
        step()
    assert vector.tolist() == [0, 0, 0]  # a device only records
    graph.replay()
    graph.replay()
    assert vector.tolist() == [4, 4, 4] and len(calls) == 1
    assert left[0].isnan().all()


@pytest.mark.parametrize("wrong", [lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: torch.ones(3).to(x.device)])
def test_a_graph_cannot_be_recorded_over_a_wait(wrong: Callable[[Tensor], Any], device: str) -> None:
    vector = torch.zeros(3, device=device)
    with pytest.raises(RuntimeError, match="not permitted"), StreamBackend.graph(PretendedGraph()):
        wrong(vector)


# ---------------------------------------------------------------- models that cannot be recorded


@pytest.mark.sampled("[Reads-graph")
@pytest.mark.parametrize(
    ("model", "executor", "said"),
    [
        ("Counts", "graph", "changes its steps_taken"),
        ("Counts", "vmap", "changes its steps_taken"),
        ("CountsElsewhere", "graph", "goes by what Python counts or draws"),
        ("Reads", "graph", "cannot be recorded"),
        ("DrawsInPython", "vmap", "draws random numbers"),
        ("DrawsInPython", "graph", "draws random numbers"),
        ("DrawsInNumpy", "vmap", "draws random numbers"),
    ],
)
def test_what_no_graph_can_hold_trains_in_the_loop_and_one_line_says_why(
    model: str, executor: str, said: str, fit: Fit, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--model touchy.{model} --fabric.accelerator {device} --federation.rounds 1 --data.fraction 0.1"
    fit("it", flags, f"--fabric.executor {executor}")
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fabric.executor")]
    assert said in line and line.endswith("trains in the loop")


# ---------------------------------------------------------------- a device that fails


@pytest.mark.sampled("[skip]")
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_device_that_is_lost_ends_the_run_and_no_client_is_blamed(
    policy: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Body, "touch", lose)
    line = f"fit --config kapc_exact_digits --name lost --loggers null --callbacks null --fabric.accelerator {device}"
    line += f" --model touchy.Body --federation.on_bad_client {policy} --data.fraction 0.1"
    assert main(line.split()) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the device pretended:0 failed in round" in said and "illegal memory access" in said
    assert "more lines" not in said and not (tmp_path / "runs" / "lost" / "failures.csv").exists()


def lose(self: nn.Module, x: Tensor) -> Tensor:
    STATE.dead = self.training and len(x) > 2  # not while operations are counted
    return x


@pytest.mark.slow
def test_clients_that_do_not_fit_at_once_train_one_by_one(fit: Fit, device: str, monkeypatch: Any) -> None:
    """As many as they are, `vmap` would take the same room for one of them."""
    from fl_lightning.training.executors.vmap import Vmap

    def full(self: Vmap, jobs: Any) -> Any:
        raise torch.OutOfMemoryError("pretended out of memory")

    flags = f"--fabric.accelerator {device} --federation.rounds 1 --data.fraction 0.2"
    loop = fit("loop", flags)
    monkeypatch.setattr(Vmap, "train", full)
    stacked = fit("vmap", flags, "--fabric.executor vmap")
    assert (stacked / "clients.csv").read_text().count("\n") == (loop / "clients.csv").read_text().count("\n")
    assert not (stacked / "failure.txt").exists()


# ---------------------------------------------------------------- waiting


def waits(fit: Fit, name: str, flags: str) -> int:
    """How often the host waits for the device from the begin of the second round to that of the third."""
    begun: list[int] = []
    real = Federation.round

    def counted(self: Federation, *args: Any) -> Any:
        begun.append(STATE.waits.total())
        return real(self, *args)

    with present(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Federation, "round", counted)
        fit(name, f"--fabric.accelerator pretended {flags} --federation.rounds 3")
    return begun[2] - begun[1]


@pytest.mark.parametrize(
    "flags",
    [
        "--method fedavg",
        "--method kapc",
        "--method ditto --optimizer.momentum 0.9 --optimizer.keep_state true",
        "--method kapc --callbacks layerselection,quantize --callbacks.layerselection.mu 0.5",
        "--method fedavg --fabric.executor vmap",
        "--method fedavg --fabric.executor graph",
    ],
    ids=["fedavg", "kapc", "kept", "selected", "vmap", "graph"],
)
@pytest.mark.sampled("[fedavg]")
def test_a_round_waits_as_often_whatever_the_number_of_clients_and_steps(fit: Fit, flags: str) -> None:
    small = f"{flags} --federation.clients 2 --data.fraction 0.1 --data.min_samples 4"
    few = waits(fit, "few", small)
    steps = waits(fit, "steps", f"{small} --federation.batch_size 8 --federation.local_epochs 3")
    clients = waits(fit, "clients", small.replace("clients 2", "clients 4"))
    assert few == steps
    per_client = 2 if "layerselection" in flags else 0  # its host chooses what is sent
    assert clients - few <= per_client * 2
    assert 0 < few <= 10
