"""`fl-train plan`: what is traced against what can be worked out by hand, and memory, bytes and seconds from it."""

from __future__ import annotations

import json
import os
import re
import shlex
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fl_lightning.cli import main
from fl_lightning.components import Network
from fl_lightning.config import Component, Config, DataConfig, FederationConfig, ModelConfig
from fl_lightning.core.layout import Layout
from fl_lightning.core.mixing import Mixer
from fl_lightning.engine.federation import Federation
from fl_lightning.engine.worker import Worker
from fl_lightning.errors import BadClient, BadInput
from fl_lightning.methods.base import Method
from fl_lightning.methods.confree import ConFREE
from fl_lightning.methods.ditto import Ditto
from fl_lightning.methods.fedapa import FedAPA
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedora import FEDORA
from fl_lightning.methods.kapc import KAPC
from fl_lightning.methods.pfedme import PFedMe
from fl_lightning.methods.scaffold import SCAFFOLD
from fl_lightning.models import build, head_of
from fl_lightning.parallel import Group, assign_homes
from fl_lightning.planning import rehearsal
from fl_lightning.planning.memory import Setup, memory
from fl_lightning.planning.plan import Planner
from fl_lightning.planning.setting import DataSizes, Hardware, cohorts
from fl_lightning.planning.trace import trace

MLP = Component("fl_lightning.models.mlp.MLP", {"hidden": [32]})
CNN = Component("fl_lightning.models.cnn.CNN")
DIGITS = DataSizes([120] * 10, [30] * 10, (1, 8, 8), 10, 100_000)
IMAGES = DataSizes([500] * 10, [100] * 10, (3, 32, 32), 10, 18_000_000)
GIB = 2**30


class Peeking(nn.Module):
    """Looks at its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return self.out(x if float(x.sum()) >= 0 else -x)


class Failing(Peeking):
    """Can be judged, and not trained."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise ArithmeticError("it is of no use")
        return super().forward(x)


class Exploding(Peeking):
    """Its loss is not finite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x.flatten(1)) * torch.inf


def config(method: str = "fedavg.FedAvg", model: Component = MLP, **federation: Any) -> Config:
    settings = FederationConfig(**({"clients": 10, "batch_size": 16} | federation))
    data = DataConfig(partition="iid")
    return Config(Component(f"fl_lightning.methods.{method}"), [ModelConfig(model)], federation=settings, data=data)


def setup(made: Config, sizes: DataSizes, ranks: int = 1) -> Setup:
    return Planner(made, sizes).setup(Hardware("cpu", 1, ranks, 100 * GIB))


def parts(made: Config, sizes: DataSizes, ranks: int = 1) -> dict[str, float]:
    return {part.name: part.bytes for part in memory(setup(made, sizes, ranks))}


def test_a_trace_finds_what_can_be_worked_out_by_hand() -> None:
    found = trace(MLP, config(), FedAvg(), DIGITS)
    weights = 64 * 32 + 32 + 32 * 10 + 10
    assert found.trained == 4 * weights
    assert found.layers == 2
    assert found.columns >= weights  # blocks are aligned
    # Saved: what relu gives (16 x 32), log_softmax's answer (16 x 10), and the weight of the mean.
    assert found.saved == 4 * (16 * 32 + 16 * 10 + 1)
    assert found.saved < found.step < 4 * found.saved + 2 * found.trained
    assert found.mask.all()
    assert not trace(MLP, config(), KAPC(classifier="own"), DIGITS).mask.all()


def test_a_trace_leaves_no_threads() -> None:
    """A process that has autograd's can fork none that trains, as a study does."""
    trace(MLP, config(), FedAvg(), DIGITS)
    child = os.fork()
    if child == 0:
        try:
            weight = torch.ones(2, requires_grad=True)
            weight.square().sum().backward()
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_what_is_frozen_is_counted_once_and_trained_by_nobody() -> None:
    pytest.importorskip("peft")
    adapted = Network(MLP.class_path, MLP.init_args, adapters={"rank": 2, "head": False})
    found = trace(adapted, config(), FedAvg(), DIGITS)
    assert found.trained == 4 * 2 * (64 + 32)
    assert found.frozen == 4 * (64 * 32 + 32 + 32 * 10 + 10)
    assert found.numbers == 2 * (64 + 32)
    many = parts(config(model=adapted), DIGITS)
    assert many["frozen parts"] == found.frozen and many["clients' vectors"] == 10 * 4 * found.numbers
    assert "frozen parts" not in parts(config(), DIGITS)


def test_activations_grow_with_the_batch() -> None:
    small, large = (trace(CNN, config(batch_size=size), FedAvg(), IMAGES) for size in (16, 32))
    assert large.saved == pytest.approx(2 * small.saved, rel=0.01)
    assert large.step > small.step


@pytest.mark.slow
def test_numbers_of_16_bits_take_half() -> None:
    made = config("kapc.KAPC", CNN)
    half = replace(made, fabric=replace(made.fabric, precision="bf16-true"))
    whole, halved = parts(made, IMAGES), parts(half, IMAGES)
    assert halved["clients' vectors"] == pytest.approx(whole["clients' vectors"] / 2, rel=0.01)
    assert halved["a client's visit"] == pytest.approx(whole["a client's visit"] / 2, rel=0.1)


def test_what_is_kept_of_a_client_is_counted() -> None:
    """What is kept, the engine's own policy says (tests/test_storage_policy.py)."""
    row = parts(config(), DIGITS)["clients' vectors"] / 10
    assert row == 4 * trace(MLP, config(), FedAvg(), DIGITS).numbers
    few = config(participation=0.2, rounds=1000)
    assert parts(few, DIGITS)["clients' vectors"] == 2 * row  # one global model: a cohort's vectors, and those again
    own = config("kapc.KAPC", participation=0.2, rounds=1000)
    assert parts(own, DIGITS)["clients' vectors"] == 10 * row
    after = replace(few, evaluation=replace(few.evaluation, judge="after"))
    assert parts(after, DIGITS)["clients' vectors"] == 10 * row
    mixes = config("ktpflmodels.KTPFLModels", participation=0.2, rounds=1000)
    before = replace(mixes, evaluation=replace(mixes.evaluation, judge="before"))
    assert parts(before, DIGITS)["models for the judge"] == 10 * row
    assert parts(mixes, DIGITS)["models for the judge"] == 0
    once = config("kapc.KAPC", participation=0.2, rounds=1)
    assert parts(once, DIGITS)["clients' vectors"] == 2 * row
    chosen = {"layerselection": Component("fl_lightning.callbacks.selection.LayerSelection")}
    assert parts(replace(own, callbacks=chosen), DIGITS)["received copies"] == 10 * row
    kept = replace(few, optimizer=replace(few.optimizer, momentum=0.9, keep_state=True))
    assert parts(kept, DIGITS)["clients' vectors"] == 10 * row
    assert parts(kept, DIGITS)["kept optimiser state"] > 9 * row
    never = replace(own, data=replace(own.data, resident="never"))
    assert parts(never, DIGITS)["data"] == 0 < parts(own, DIGITS)["data"]


@pytest.mark.slow
def test_vectors_in_the_bank_take_no_memory_of_the_gpu() -> None:
    """They do beside it, in blocks of a power of 2, with what clients receive; two visits' are on the device."""
    made = config("kapc.KAPC", CNN)
    planner = Planner(made, IMAGES)
    gpu = Hardware("cuda", 1, 1, GIB)
    banked = {name: replace(made, fabric=replace(made.fabric, bank=name)) for name in ("memory", "host", "disk")}
    plans = {name: planner.plan(gpu, changed) for name, changed in banked.items()}
    found = {name: {item.name: item.bytes for item in plan.memory} for name, plan in plans.items()}
    row = found["memory"]["clients' vectors"] / 10
    host = found["host"]
    assert host["clients' vectors"] == host["composed vectors"] == found["disk"]["clients' vectors"] == 0
    assert host["a client's visit"] == found["memory"]["a client's visit"] + 4 * row
    assert plans["host"].host - plans["memory"].host == 20 * 2**22
    assert plans["disk"].host == plans["memory"].host
    tight = replace(gpu, capacity=0.5 * (plans["memory"].total + plans["host"].total))
    assert "--fabric.bank host" in [way.change for way in planner.ways(tight) if way.fits]
    cpu = {item.name: item.bytes for item in planner.plan(Hardware("cpu", 1, 1, GIB), banked["host"]).memory}
    assert cpu["clients' vectors"] == 10 * row


def test_further_vectors_of_a_client_are_counted() -> None:
    """SCAFFOLD's c_i, the server's copy of it, c and its successor; Ditto trains two."""
    vector = 4 * trace(MLP, config(), FedAvg(), DIGITS).numbers
    plain, scaffold, ditto = (
        parts(config(name), DIGITS) for name in ("fedavg.FedAvg", "scaffold.SCAFFOLD", "ditto.Ditto")
    )
    assert plain["clients' vectors"] == 10 * vector and plain["received copies"] == 0
    assert scaffold["clients' vectors"] == ditto["clients' vectors"] == 20 * vector
    assert scaffold["received copies"] == 10 * vector and ditto["received copies"] == 0
    assert scaffold["server"] == plain["server"] + 2 * vector and ditto["server"] == plain["server"]
    # Of SCAFFOLD c - c_i for its steps and room for the term; of Ditto room for the pull of the second of its phases.
    steps = {m: trace(MLP, config(), m, DIGITS).step for m in (FedAvg(), SCAFFOLD(), Ditto())}
    assert steps[SCAFFOLD()] - vector >= steps[Ditto()] > steps[FedAvg()]
    made = config("ditto.Ditto")
    kept = replace(made, optimizer=replace(made.optimizer, momentum=0.9, keep_state=True))
    one = replace(kept, method=config().method)
    assert parts(kept, DIGITS)["kept optimiser state"] == 2 * parts(one, DIGITS)["kept optimiser state"] > 0
    two, alone = (
        Planner(config(name), DIGITS).plan(Hardware("cpu", 1, 2, GIB)).wire
        for name in ("scaffold.SCAFFOLD", "fedavg.FedAvg")
    )
    assert two["the mix to every rank"] == 2 * alone["the mix to every rank"]


def test_what_a_client_goes_back_to_when_it_fails_is_counted() -> None:
    """A copy of its vectors, where they are kept at all."""
    for name, copies in (("kapc.KAPC", 1), ("ditto.Ditto", 2), ("fedavg.FedAvg", 0)):
        made = config(name)
        tolerant = replace(made, federation=replace(made.federation, on_bad_client="skip"))
        row = 4 * trace(MLP, config(), FedAvg(), DIGITS).numbers
        before, after = (parts(c, DIGITS)["a client's visit"] for c in (made, tolerant))
        assert after - before == copies * row


def test_what_a_method_keeps_with_the_server_is_counted() -> None:
    """KT-pFL's coefficients (N, N) and pFedHN's network with its momenta, whose last layer alone is 100 D."""
    vector = 4 * trace(MLP, config(), FedAvg(), DIGITS).numbers
    server = {name: parts(config(name), DIGITS)["server"] for name in ("local.Local", "ktpfl.KTPFL", "pfedhn.PFedHN")}
    assert server["ktpfl.KTPFL"] >= server["local.Local"] + 8 * 100
    assert server["pfedhn.PFedHN"] > 2 * 100 * vector


def test_phases_that_a_method_makes_of_data_are_followed_without_them() -> None:
    """FEDORA scores on validation data to say how strongly it pulls: no data are counted, and a pull is."""
    plain, pulls = (trace(CNN, config(), m, IMAGES) for m in (FedAvg(), KAPC()))
    assert trace(CNN, config(), FEDORA(selection="paper"), IMAGES).step == pulls.step > plain.step


def test_own_steps_are_followed() -> None:
    """pFedMe's holds a flat gradient beside what a step of the optimiser holds, which tells what is saved."""
    plain, own = (trace(MLP, config(), m, DIGITS) for m in (FedAvg(), PFedMe()))
    assert own.saved == plain.saved
    assert own.step >= plain.step + plain.vector


def test_what_inner_products_take_of_memory_is_counted() -> None:
    """Of updates the updates; beside models, too, copies of these from the mix to the answers."""
    vector = 4 * trace(MLP, config(), FedAvg(), DIGITS).numbers
    fedapa, confree, plain = (
        parts(config(name), DIGITS) for name in ("fedapa.FedAPA", "confree.ConFREE", "fedper.FedPer")
    )
    assert fedapa["mixed models"] == 10 * vector and "mixed models" not in confree
    assert confree["mixing"] - plain["mixing"] == 10 * vector + 8 * (3 + 3) * (10 * 10 + 10 + 1)


def test_clients_that_train_at_once_are_weighed_together() -> None:
    loop = config(model=CNN, clients=10)
    vmap = replace(loop, fabric=replace(loop.fabric, executor="vmap"))
    one, ten = (parts(made, IMAGES)["a client's visit"] for made in (loop, vmap))
    assert 10 * one < ten < 3 * 16 * one  # a pass for ten clients is 16 wide on a CPU
    turned = replace(vmap, fabric=replace(vmap.fabric, channels_last=True))
    assert parts(turned, IMAGES)["a client's visit"] == one + 4 * 16 * 3 * 32 * 32  # in the loop, on a turned copy
    adam = replace(vmap, optimizer=replace(vmap.optimizer, name="adam"))
    assert parts(adam, IMAGES)["a client's visit"] < 2 * one  # it trains in the loop


def test_ranks_share_vectors_and_data() -> None:
    one, two = (parts(config("kapc.KAPC", CNN), IMAGES, ranks) for ranks in (1, 2))
    for name in ("clients' vectors", "data", "composed vectors"):
        assert two[name] == one[name] / 2
    assert two["samples as read"] == one["samples as read"]


def test_the_cube_of_a_million_clients_is_weighed_without_being_made() -> None:
    many = DataSizes([10] * 10**5, [1] * 10**5, (1, 8, 8), 10, 0)
    made = config("kapc.KAPC", clients=10**5, participation=1e-4)
    assert parts(made, many)["server"] > 8 * 2 * 10**10


def test_cohorts_are_those_that_the_engine_draws(federation: Callable[..., Federation]) -> None:
    fed = federation(FedAvg(), clients=20, participation=0.3)
    drawn = cohorts(fed.run.config)
    assert [c.tolist() for c in drawn] == [fed.cohort(t) for t in range(1, len(drawn) + 1)]


class Counting(Group):
    """One of several threads that stand for processes; counts the bytes that it sends to others."""

    def __init__(self, rank: int, size: int, table: dict[Any, Any], gate: threading.Barrier) -> None:
        self.rank, self.size, self.device = rank, size, torch.device("cpu")
        self.table, self.gate, self.calls, self.sent = table, gate, 0, 0

    def _everyones(self, item: Any) -> list[Any]:
        self.calls += 1
        self.table[self.calls, self.rank] = item
        self.gate.wait(timeout=60)
        return [self.table[self.calls, r] for r in range(self.size)]

    def gather_objects(self, item: Any) -> list[Any]:
        return self._everyones(item)

    def all_to_all(self, parts: list[torch.Tensor], send_sizes: Any, receive_sizes: Any) -> list[torch.Tensor]:
        send = torch.cat(parts)
        self.sent += (send.numel() - send_sizes[self.rank]) * send.element_size()
        return [p[self.rank] for p in self._everyones(send.split(list(send_sizes)))]

    def gather_parts(self, parts: list[torch.Tensor], sizes: Any) -> list[torch.Tensor]:
        part = torch.cat(parts)
        self.sent += part.numel() * part.element_size() * (self.size - 1)
        return self._everyones(part)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sent += 2 * tensor.numel() * tensor.element_size() * (self.size - 1) // self.size  # as a ring does it
        return torch.stack(self._everyones(tensor)).sum(0)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", [KAPC(), FedAvg(), FedAPA(), ConFREE()])
def test_bytes_between_ranks_are_those_that_mixing_sends(method: Method, size: int) -> None:
    wide = Component("fl_lightning.models.mlp.MLP", {"hidden": [6000]})
    made = config(f"{type(method).__name__.lower()}.{type(method).__name__}", wide)
    planner, hardware = Planner(made, DIGITS), Hardware("cpu", 1, size, GIB)
    plan, products = planner.plan(hardware), planner.setup(hardware).products
    model = build(wide, (1, 8, 8), 10)
    layout = Layout(model, head_of(model))
    relation = method.relation()
    mask = layout.mask(lambda b: method.scope(b) == "shared")
    segments = layout.segments(mask, by_layer=relation.per_layer)
    row, _ = layout.read(model)
    home, clients = assign_homes(DIGITS.train, size), list(range(10))
    table: dict[Any, Any] = {}
    gate = threading.Barrier(size)

    def job(group: Counting) -> int:
        here = {c: row.clone() for c in clients if home[c] == group.rank}
        mixer = Mixer(group, home, here, clients)
        if relation.is_global:
            mixer.mean(segments, torch.full((1, 10), 0.1), row.clone())
        else:
            A = torch.full((len(layout.layers), 10, 10), 0.1, dtype=torch.float64)
            mixer.mix(segments, A, clients, {c: row.clone() for c in here})
        for each in products:  # a client has at most two of the vectors
            vectors = {k: row.clone() for k in range(each.vectors) if home[k % 10] == group.rank}
            mixer = Mixer(group, [*home, *home], vectors, range(each.vectors))
            whole = layout.segments(mask, by_layer=each.by_layer)
            mixer.gram(whole, len(layout.layers) if each.by_layer else 1)
        return group.sent

    with ThreadPoolExecutor(size) as pool:
        sent = sum(pool.map(job, [Counting(r, size, table, gate) for r in range(size)]))
    models = sum(v for k, v in plan.wire.items() if k != "results")
    # Tiles are not of one size and clients do not always divide by the ranks: the formula takes the mean.
    assert models == pytest.approx(sent, rel=0.1)


@pytest.mark.slow
def test_what_does_not_fit_is_told_with_what_would() -> None:
    planner = Planner(config("kapc.KAPC", CNN, clients=10), IMAGES)
    tight = Hardware("cpu", 1, 1, 0.95 * planner.plan(Hardware("cpu", 1, 1, GIB)).total)
    assert not planner.plan(tight).fits
    ways = planner.ways(tight)
    assert any(way.fits for way in ways)
    assert [way.fits for way in ways] == sorted((way.fits for way in ways), reverse=True)
    assert all(way.total < planner.plan(tight).total for way in ways)
    assert any("bf16-true" in way.change for way in ways)


def test_several_architectures_are_added_up() -> None:
    large = Component("fl_lightning.models.mlp.MLP", {"hidden": [64]})
    two = replace(config("kapc.KAPC"), models=[ModelConfig(MLP, 4), ModelConfig(large, 6)])
    rows = parts(two, DIGITS)["clients' vectors"]
    small, big = (trace(m, config(), FedAvg(), DIGITS).numbers for m in (MLP, large))
    assert rows == pytest.approx(4 * (4 * small + 6 * big))


# ---------------------------------------------------------------- the command, and a rehearsed round


def run(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["plan", *shlex.split(words)]) == 0
    return capsys.readouterr().out


def test_the_table_and_the_numbers_for_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    line = "--config kapc_exact_digits --loggers null --nodes 2 --gpus-per-node 2"
    text = run(line, capsys)
    for word in ("clients' vectors", "a client's visit", "peak", "2 x 2 GPUs", "fits in 80.0 GiB", "seconds: unknown"):
        assert word in text
    told = json.loads(run(f"{line} --json", capsys))
    assert told["fits"] is True
    assert told["hardware"]["nodes"] == 2
    assert told["round_seconds"] is None and told["seconds"] == {} and "no such accelerator" in told["basis"]
    assert not told["assumed_data"]
    assert list(tmp_path.iterdir()) == []  # a plan leaves nothing behind
    text = run("--config kapc_exact_digits --loggers null --node-memory 0.5 --no-run", capsys)
    assert "DOES NOT FIT" in text and "seconds: unknown: nothing was run" in text


def test_seconds_are_of_a_round_that_was_run_and_say_so(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    line = "--config kapc_exact_digits --loggers null --fabric.accelerator cpu --data.fraction 0.4"
    told = json.loads(run(f"{line} --federation.local_epochs 1 --json", capsys))
    assert told["round_seconds"] == pytest.approx(sum(told["seconds"].values()))
    assert all(told["seconds"][name] > 0 for name in ("clients", "evaluation", "server"))
    assert told["basis"] == "from a round of 10 of 10 clients, run in one process of this machine"  # nothing is scaled
    monkeypatch.setattr(rehearsal, "BUDGET", 0.0)
    text = run(f"{line} --devices 2", capsys)
    assert "seconds of a round here, in one process: " in text
    cut = r"a round of 2 of 10 clients, run in one process of this machine, cut to \d+% of their local training; scaled"
    assert re.search(cut, text)
    assert "how long 2 processes take was not measured" in text
    assert list(tmp_path.iterdir()) == []


def test_data_that_are_not_here_are_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rehearsal, "BUDGET", 0.0)
    line = "--config kapc_mnist --loggers null --data.download false --fabric.accelerator cpu --federation.clients 20"
    text = run(f"{line} --method ktpfl --data.public fashionmnist --method.samples 40 --samples 70", capsys)
    assert "70 training samples a client are assumed" in text
    assert "on made-up data" in text and "seconds of a round" in text


@pytest.mark.parametrize(("executor", "few"), [("loop", 2), ("vmap", 8)])
def test_a_short_round_is_scaled_by_what_the_engine_trained(executor: str, few: int, monkeypatch: Any) -> None:
    """Seconds of the rehearsed round, by known rates, give those of the cohort; the server's are as they were."""
    monkeypatch.setattr(rehearsal, "BUDGET", 0.0)
    done: list[int] = []
    real, round_of = Worker._train, Federation.round

    def counted(self: Worker, visits: Any, jobs: Any) -> Any:
        found = real(self, visits, jobs)
        done.extend(fit.samples for fit in found.values())
        return found

    def timed(self: Federation, number: int, cohort: list[int]) -> Any:
        done.clear()
        record = round_of(self, number, cohort)
        client, evaluation = 1e-3 * sum(done), 1e-4 * 30 * len(cohort)
        return replace(
            record,
            metrics={"seconds_client": client, "seconds_evaluation": evaluation, "seconds": client + evaluation + 5},
        )

    monkeypatch.setattr(Worker, "_train", counted)
    monkeypatch.setattr(Federation, "round", timed)
    made = config("kapc.KAPC", local_epochs=2)
    made = replace(made, fabric=replace(made.fabric, executor=executor), evaluation=replace(made.evaluation, every=3))
    timing = rehearsal.rehearse(setup(made, DIGITS))
    assert sum(done) == 32 * few  # a batch of 16 in each of two epochs
    assert timing.seconds == pytest.approx(
        {"clients": 1e-3 * 2 * sum(DIGITS.train), "evaluation": 1e-4 * sum(DIGITS.test) / 3, "server": 5.0}
    )
    assert f"a round of {few} of 10 clients" in timing.basis
    assert f"cut to {16 / 120:.0%} of their local training" in timing.basis


def test_local_steps_and_parts_of_epochs_are_counted(monkeypatch: Any) -> None:
    for federation in ({"local_epochs": None, "local_steps": 20}, {"local_epochs": 0.5}):
        timing = rehearsal.rehearse(setup(config(**federation), DIGITS))
        assert timing.basis == (
            "from a round of 8 of 10 clients, run in one process of this machine, on made-up data; "
            "scaled to the cohort by samples, but for the server's part, that of 8 clients"
        )


def test_privacy_is_planned_for_the_rounds_of_the_run(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Not for those of the rehearsal, which goes on while there is time: noise is as much as the run's."""
    monkeypatch.chdir(tmp_path)
    line = "--config kapc_digits --method fedavg --loggers null --fabric.accelerator cpu --federation.rounds 5"
    target = "--callbacks.localprivacy.clip 1 --callbacks.localprivacy.epsilon_target 8"
    assert json.loads(run(f"{line} {target} --json", capsys))["round_seconds"] > 0


def test_models_that_diverge_later_do_not_spoil_the_seconds(monkeypatch: Any) -> None:
    """A rehearsal trains the same models for longer than the run does."""
    made = config(model=Component(f"{__name__}.Exploding"))
    planner, hardware = Planner(made, DIGITS), Hardware("cpu", 1, 1, 100 * GIB)
    calls: list[int] = []

    def rounds(self: Any, chosen: list[int], limit: int) -> list[float]:
        calls.append(limit)
        if len(calls) > 2:
            raise BadClient(1, 27, "training", "its model is not finite")
        return [0.2, 0.1, 0.05]

    monkeypatch.setattr(rehearsal._Rehearsal, "_round", rounds)
    timing = rehearsal.timed(planner.setup(hardware), planner.plan(hardware))
    assert calls == [1, 1, 2] and timing.seconds["server"] == 0.05
    since = "client 1 failed in round 27, stage training: its model is not finite"
    assert timing.basis.endswith(f"; a longer rehearsal ended since {since}")


def test_a_run_that_fails_has_no_seconds() -> None:
    made = config(model=Component(f"{__name__}.Exploding"))
    planner, hardware = Planner(made, DIGITS), Hardware("cpu", 1, 1, 100 * GIB)
    timing = rehearsal.timed(planner.setup(hardware), planner.plan(hardware))
    assert timing.round_seconds is None
    assert "the rehearsal failed: client" in timing.basis and "not finite" in timing.basis


def test_what_is_too_large_to_try_is_not_tried() -> None:
    planner, hardware = Planner(config(), DIGITS), Hardware("cpu", 1, 1, 100 * GIB)
    plan = planner.plan(hardware)
    huge = replace(plan, memory=[*plan.memory, replace(plan.memory[-1], bytes=2.0**50)])
    assert "too large to try" in rehearsal.timed(planner.setup(hardware), huge).basis


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--config nosuch.yaml", "config"),
        ("--nosuch 3", "nosuch"),
        ("--devices 11", "at most one for each of the 10 clients"),
        ("--nodes 4 --gpus-per-node 4", "at most one for each of the 10 clients"),
        ("--nodes 0", "nodes"),
        ("--devices -1", "devices"),
        ("--devices 2 --gpus-per-node 2", "gpus_per_node"),
        ("--node-memory 0", "node_memory"),
        ("--federation.rounds none", "federation.rounds"),
    ],
)
def test_bad_input_is_one_line(words: str, said: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    config_words = "" if "--config" in words else "--config kapc_exact_digits --loggers null "
    assert main(["plan", *shlex.split(config_words + words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


def test_a_model_that_looks_at_its_numbers_is_traced_on_real_ones() -> None:
    found = trace(Component(f"{__name__}.Peeking"), config(), FedAvg(), DIGITS)
    assert found.trained == 4 * 650
    assert 0 < found.saved < found.step


def test_a_model_whose_step_fails_is_bad_input() -> None:
    with pytest.raises(BadInput, match="its training step fails: ArithmeticError"):
        trace(Component(f"{__name__}.Failing"), config(), FedAvg(), DIGITS)
