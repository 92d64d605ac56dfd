"""`fl-train plan`: what is traced against what can be worked out by hand, and memory, bytes and seconds from it."""

from __future__ import annotations

import json
import math
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
from fl_lightning.errors import BadInput
from fl_lightning.methods.base import Method
from fl_lightning.methods.ditto import Ditto
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedfomo import FedFomo
from fl_lightning.methods.fedora import FEDORA
from fl_lightning.methods.fedper import FedPer
from fl_lightning.methods.kapc import KAPC
from fl_lightning.methods.pfeddf import PFedDF
from fl_lightning.methods.pfedfda import PFedFDA
from fl_lightning.methods.pfedme import PFedMe
from fl_lightning.methods.scaffold import SCAFFOLD
from fl_lightning.models import build, head_of
from fl_lightning.parallel import Group, assign_homes
from fl_lightning.planning import visits
from fl_lightning.planning.memory import Setup, memory
from fl_lightning.planning.plan import Planner, left_out, newcomers
from fl_lightning.planning.seconds import Link, Observed, Speeds, mixing_of, seconds, work_of
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
    assert found.cost.forward == 2 * (64 * 32 + 32 * 10)
    assert found.cost.backward == 2 * found.cost.forward - 2 * 64 * 32  # no gradient is wanted of the input
    # Saved: what relu gives (16 x 32), log_softmax's answer (16 x 10), and the weight of the mean.
    assert found.saved == 4 * (16 * 32 + 16 * 10 + 1)
    assert found.saved < found.step < 4 * found.saved + 2 * found.trained
    assert found.mask.all()
    assert not trace(MLP, config(), KAPC(classifier="own"), DIGITS).mask.all()


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


@pytest.mark.parametrize(
    ("method", "learns"),
    [("kapc.KAPC", True), ("fedavg.FedAvg", False), ("fedora.FEDORA", False), ("fedamp.FedAMP", True)],
)
def test_relations_that_look_at_inner_products(method: str, learns: bool) -> None:
    made = config(method)
    made = replace(made, method=replace(made.method, init_args={"alpha": 0.1} if learns and "amp" in method else {}))
    assert setup(made, DIGITS).learns is learns


def test_clients_that_train_at_once_are_weighed_together() -> None:
    loop = config(model=CNN, clients=10)
    vmap = replace(loop, fabric=replace(loop.fabric, executor="vmap"))
    one, ten = (parts(made, IMAGES)["a client's visit"] for made in (loop, vmap))
    assert 10 * one < ten < 30 * one
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
@pytest.mark.parametrize("method", [KAPC(), FedAvg()])
def test_bytes_between_ranks_are_those_that_mixing_sends(method: Method, size: int) -> None:
    wide = Component("fl_lightning.models.mlp.MLP", {"hidden": [6000]})
    made = config(f"{type(method).__name__.lower()}.{type(method).__name__}", wide)
    plan = Planner(made, DIGITS).plan(Hardware("cpu", 1, size, GIB))
    model = build(wide, (1, 8, 8), 10)
    layout = Layout(model, head_of(model))
    relation = method.relation()
    segments = layout.segments(layout.mask(lambda b: method.scope(b) == "shared"), by_layer=relation.per_layer)
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
            mixer.gram(segments, len(layout.layers))
            A = torch.full((len(layout.layers), 10, 10), 0.1, dtype=torch.float64)
            mixer.mix(segments, A, clients, {c: row.clone() for c in here})
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


# ---------------------------------------------------------------- seconds: arithmetic, with visits that were never made


STEP, SAMPLE, VISIT, SCORED = 3e-3, 2e-5, 1e-2, 1e-5


def pretended(made: Setup, train: list[int], limit: float, kind: int = 0, slower: float = 1.0) -> Observed:
    """A round of clients with so many samples, on a machine that takes known seconds for everything."""
    work = work_of(made.config, train, [30] * len(train), limit).sum(0)
    mixed = mixing_of(made, len(train), len(train))
    client = slower * float(work @ [VISIT, STEP, SAMPLE, 0])
    return Observed(kind, work, mixed, client, float(work @ [1e-3, 0, 0, SCORED]), float(mixed @ [1e-2, 1e-3, 1e-4]))


ROUNDS = [([100, 130], 1), ([100, 100, 110, 130], 1), ([100, 100, 110, 130], 2), ([100, 110, 130], math.inf)]


def test_a_whole_round_follows_from_short_ones() -> None:
    made = setup(config("kapc.KAPC", local_epochs=3), replace(DIGITS, train=list(range(100, 200, 10))))
    speeds = Speeds.fit([pretended(made, *round) for round in ROUNDS])
    found = seconds(made, speeds, Link(), 0.0, 0)
    whole = pretended(made, made.sizes.train, math.inf)
    assert found["clients"] == pytest.approx(whole.client, rel=1e-6)
    assert found["evaluation"] == pytest.approx(whole.evaluation, rel=1e-6)
    assert found["server"] == pytest.approx(whole.server, rel=1e-6)
    assert found["exchange"] == 0
    seldom = replace(made, config=replace(made.config, evaluation=replace(made.config.evaluation, every=4)))
    assert seconds(seldom, speeds, Link(), 0.0, 0)["evaluation"] == pytest.approx(whole.evaluation / 4, rel=1e-6)


def test_clients_that_train_at_once_take_as_many_steps_as_the_longest() -> None:
    work = work_of(config(batch_size=16, local_epochs=1), [160, 16, 32], [1, 2, 3], width=2)
    assert work.tolist() == [[1, 10, 160, 1], [1, 10, 160, 2], [1, 2, 32, 3]]
    made = setup(config(), replace(DIGITS, train=[160, *[16] * 9]))
    speeds = Speeds.fit([pretended(made, *round) for round in ROUNDS])
    stacked = replace(made, config=replace(made.config, fabric=replace(made.config.fabric, executor="vmap")))
    one = float(work_of(made.config, [160], [30])[0] @ [VISIT, STEP, SAMPLE, 0])
    assert seconds(stacked, speeds, Link(), 0.0, 0)["clients"] == pytest.approx(10 * one)


def test_no_seconds_come_out_negative() -> None:
    """Noise would have it that a visit or a step takes less than nothing."""
    made = setup(config("kapc.KAPC"), DIGITS)
    odd = zip(ROUNDS, (3, 1, 2, 9), (4, 3, 2, 1), strict=True)
    noisy = [replace(pretended(made, *r), client=c, server=s) for r, c, s in odd]
    speeds = Speeds.fit(noisy)
    assert (speeds.client >= 0).all() and (speeds.server >= 0).all()


def test_fine_tuning_takes_steps_in_evaluation() -> None:
    made = setup(config(), DIGITS)
    rounds = [replace(o, evaluation=float(o.work @ [0, 2e-3, 0, 1e-4])) for o in (pretended(made, *r) for r in ROUNDS)]
    assert Speeds.fit(rounds, finetuned=True).evaluation[0] == pytest.approx([0, 2e-3, 0, 1e-4], abs=1e-9)
    assert Speeds.fit(rounds).evaluation[0][1] == 0


def test_seconds_follow_the_busiest_rank() -> None:
    """One client with most of the data fills a rank; of alike ones a rank of two has half; exchanges are added."""
    uneven = replace(DIGITS, train=[910, *[10] * 9])
    one, two = (setup(config(), uneven, ranks) for ranks in (1, 2))
    speeds = Speeds.fit([pretended(one, *round) for round in ROUNDS])
    alone = float(work_of(one.config, [910], [30])[0] @ [VISIT, STEP, SAMPLE, 0])
    assert seconds(two, speeds, Link(), 0.0, 0)["clients"] == pytest.approx(alone, rel=1e-6)
    assert seconds(one, speeds, Link(), 0.0, 0)["clients"] > alone + 9 * VISIT
    even = (seconds(setup(config(), DIGITS, ranks), speeds, Link(0.5, 100.0), 1000.0, 3) for ranks in (1, 2))
    first, second = even
    assert second["clients"] == pytest.approx(first["clients"] / 2)
    assert second["exchange"] == pytest.approx(1000 / 2 / 100 + 3 * 0.5)


def test_a_cohort_that_leaves_a_rank_idle_is_rebalanced_as_the_engine_does() -> None:
    few = setup(config(clients=4, participation=0.5, rounds=8), replace(DIGITS, train=[120] * 4, test=[30] * 4), 2)
    speeds = Speeds.fit([pretended(few, *round) for round in ROUNDS])
    visit = float(work_of(few.config, [120], [30])[0] @ [VISIT, STEP, SAMPLE, 0])
    assert any(few.home[c[0]] == few.home[c[1]] for c in cohorts(few.config))  # both clients of a round on one rank
    assert seconds(few, speeds, Link(), 0.0, 0)["clients"] == pytest.approx(visit)


def test_each_architecture_has_seconds_of_its_own() -> None:
    two = replace(config("local.Local"), models=[ModelConfig(MLP, 4), ModelConfig(MLP, 6)])
    made = setup(two, DIGITS)
    speeds = Speeds.fit([pretended(made, *r, kind, 1.0 + 4 * kind) for r in ROUNDS for kind in (0, 1)])
    visit = float(work_of(two, [120], [30])[0] @ [VISIT, STEP, SAMPLE, 0])
    assert seconds(made, speeds, Link(), 0.0, 0)["clients"] == pytest.approx((4 + 6 * 5) * visit)


def run(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["plan", *shlex.split(words)]) == 0
    return capsys.readouterr().out


def test_the_table_and_the_numbers_for_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    line = "--config kapc_digits --loggers null --nodes 2 --gpus-per-node 2"
    text = run(line, capsys)
    for word in ("clients' vectors", "a client's visit", "peak", "2 x 2 GPUs", "fits in 80.0 GiB", "seconds: unknown"):
        assert word in text
    told = json.loads(run(f"{line} --json", capsys))
    assert told["fits"] is True
    assert told["hardware"]["nodes"] == 2
    assert told["round_seconds"] is None and told["seconds"] == {} and "no such accelerator" in told["basis"]
    assert not told["assumed_data"]
    assert list(tmp_path.iterdir()) == []  # a plan leaves nothing behind
    assert told["left_out"] == {"phases": "Coached by lam on every layer that was received"}
    assert "not in these: what KAPC does in phases (Coached by lam" in text
    text = run("--config kapc_digits --loggers null --node-memory 0.5 --no-run", capsys)
    assert "DOES NOT FIT" in text and "seconds: unknown: nothing was run" in text


def test_a_plan_says_what_its_operations_leave_out() -> None:
    """Hooks with work of their own, inherited ones too; not those that only say who is judged or what travels."""
    assert left_out(FedAvg()) == left_out(FedPer()) == {}
    assert left_out(PFedDF()) == {"aggregate": "The means, then a student of all from each"}
    assert list(left_out(FedFomo())) == ["broadcast", "receive", "upload", "aggregate"]
    assert {"personal", "upload"} <= left_out(PFedFDA()).keys()


def test_unseen_clients_are_counted_by_themselves(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Each of them from each number of samples; no more labels than it has samples; and nobody, nothing."""
    monkeypatch.chdir(tmp_path)
    assert newcomers(setup(config(), DIGITS)) == {}
    made = config(local_epochs=2)
    made.data.held_out_clients, made.evaluation.newcomer_rounds = 0.2, 3
    made.evaluation.newcomer_samples = [0, 3, 10**6]
    cost = trace(MLP, made, FedAvg(), DIGITS).cost
    assert newcomers(setup(made, DIGITS)) == {
        "training": 3 * 2 * cost.step * 2 * (0 + 3 * DIGITS.classes + DIGITS.train[0]),
        "evaluation": 2 * 3 * 4 * cost.forward * DIGITS.test[0],
    }
    line = "--config kapc_digits --loggers null --no-run --data.held_out_clients 0.2"
    assert "after the last round, 2 unseen clients: at most" in run(line, capsys)


@pytest.mark.slow
def test_visits_are_run_and_say_what_they_rest_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(visits, "BUDGET", 0.0)
    told = json.loads(run("--config kapc_digits --loggers null --fabric.accelerator cpu --devices 2 --json", capsys))
    assert told["round_seconds"] == pytest.approx(sum(told["seconds"].values()))
    assert all(told["seconds"][name] > 0 for name in ("clients", "evaluation", "server", "exchange"))
    assert "measured between two processes" in told["basis"]
    assert list(tmp_path.iterdir()) == []


def test_data_that_are_not_here_are_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(visits, "BUDGET", 0.0)
    line = "--config kapc_mnist --loggers null --data.download false --fabric.accelerator cpu --federation.clients 20"
    text = run(f"{line} --method ktpfl --data.public fashionmnist --method.samples 40 --samples 70", capsys)
    assert "70 training samples a client are assumed" in text
    assert "on made-up data" in text and "seconds of a round" in text


@pytest.mark.parametrize(
    ("extra", "executor", "at_once"), [({}, "loop", 1), ({"judge": "finetuned"}, "loop", 1), ({}, "vmap", 10)]
)
def test_visits_are_rounds_of_the_real_engine(
    extra: dict[str, Any], executor: str, at_once: int, monkeypatch: Any
) -> None:
    """Cut after some batches; what was run is counted right, by the engine's own count of steps."""
    monkeypatch.setattr(visits, "BUDGET", 0.0)
    done: list[tuple[int, int]] = []
    real = Worker._train

    def counted(self: Worker, visits: Any, jobs: Any) -> Any:
        found = real(self, visits, jobs)
        done.extend((fit.steps, fit.samples) for fit in found.values())
        return found

    monkeypatch.setattr(Worker, "_train", counted)
    made = config("kapc.KAPC", local_epochs=2)
    made = replace(made, evaluation=replace(made.evaluation, **extra), fabric=replace(made.fabric, executor=executor))
    observed = visits.rehearse(setup(made, DIGITS), 1)
    few = 8 if at_once > 1 else 2  # made-up data have 8 clients, all of which train at once
    assert [o.work[0] for o in observed] == [few, few]
    assert set(done) == {(2, 32)}  # one batch of 16 in each of two epochs
    assert all(o.work[1:3].tolist() == [2 * few, 32 * few] for o in observed)
    assert all(o.client > 0 and o.evaluation > 0 and o.server > 0 for o in observed)


def test_a_run_that_fails_has_no_seconds() -> None:
    made = config(model=Component(f"{__name__}.Exploding"))
    planner, hardware = Planner(made, DIGITS), Hardware("cpu", 1, 1, 100 * GIB)
    timing = visits.timed(planner.setup(hardware), planner.plan(hardware))
    assert timing.round_seconds is None
    assert "the visits failed: client" in timing.basis and "not finite" in timing.basis


def test_what_is_too_large_to_try_is_not_tried() -> None:
    planner, hardware = Planner(config(), DIGITS), Hardware("cpu", 1, 1, 100 * GIB)
    plan = planner.plan(hardware)
    huge = replace(plan, memory=[*plan.memory, replace(plan.memory[-1], bytes=2.0**50)])
    assert "too large to try" in visits.timed(planner.setup(hardware), huge).basis


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
    config_words = "" if "--config" in words else "--config kapc_digits --loggers null "
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
