"""Vectors beside the device or in files: the same numbers as in memory, nothing left behind, memory
spared."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from fl_lightning.callbacks.base import Callback, Transform
from fl_lightning.callbacks.checkpoint import Checkpoint, restore
from fl_lightning.callbacks.compression import Quantize
from fl_lightning.core.client import Client
from fl_lightning.core.payload import Payload
from fl_lightning.core.run import RunContext
from fl_lightning.engine.federation import Federation
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.methods.fedamp import FedAMP
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedora import FEDORA
from fl_lightning.methods.fedper import FedPer
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.kapc import KAPC
from fl_lightning.methods.scaffold import SCAFFOLD
from fl_lightning.storage.state import ClientState
from fl_lightning.storage.store import Lane, Place, VectorStore

Make = Callable[..., Federation]
CPU = torch.device("cpu")


class Fault(Transform):
    """Fails when these clients upload in these rounds, (round, client), the first time."""

    def __init__(self, when: list[tuple[int, int]]) -> None:
        self.when = when

    def on_upload(self, client: Client, payload: Payload) -> None:
        if (now := (client.round, client.id)) in self.when:
            self.when.remove(now)
            raise ArithmeticError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("place", get_args(Place))
def test_a_kept_vector_is_a_copy_that_can_be_written_to(
    tmp_path: Path, dtype: torch.dtype, place: Place
) -> None:
    store = VectorStore(place, tmp_path, CPU)
    vector = torch.randn(1000).to(dtype)
    kept, other = store.allocate(vector), store.allocate(vector)
    assert torch.equal(kept, vector) and kept.dtype == dtype and kept.data_ptr() % 64 == 0
    kept += 1
    assert torch.equal(kept, vector + 1) and torch.equal(other, vector)
    assert not list(tmp_path.iterdir())  # its file has no name


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunFailed, match="No space left"):
        VectorStore("disk", tmp_path, CPU).allocate(torch.zeros(4))
    assert not list(tmp_path.iterdir())


class Late(Lane):
    """Copies at the last moment that is allowed: what does not wait for them finds the old
    numbers."""

    def __init__(self) -> None:
        self.begun: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        if into is not source:
            self.begun.append((into, source))
        return partial(self._up_to, len(self.begun))

    def _up_to(self, count: int) -> None:
        for k, (into, source) in enumerate(self.begun[:count]):
            if into.numel():
                into.copy_(source)
                self.begun[k] = (into[:0], source[:0])

    def synchronize(self) -> None:
        self._up_to(len(self.begun))
        self.begun = []


def stores(folder: Path) -> dict[str, VectorStore]:
    return {
        "memory": VectorStore("memory", folder, CPU),
        "disk": VectorStore("disk", folder, CPU),
        "host": VectorStore("host", folder, CPU),
        "late": VectorStore("host", folder, CPU, Late()),
    }


def same(one: RunContext, other: RunContext) -> bool:
    return one.states.keys() == other.states.keys() and all(
        equal(state.vectors, other.states[c].vectors)
        and equal(state.received, other.states[c].received)
        and copies(state) == copies(other.states[c])
        and equal(dict(enumerate(state.buffers)), dict(enumerate(other.states[c].buffers)))
        and equal(state.memory, other.states[c].memory)
        for c, state in one.states.items()
    )


def equal(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(v, other[k]) for k, v in one.items())


def copies(state: ClientState) -> list[str]:
    """Slots of which the server's copy is a tensor of its own."""
    return [slot for slot, vector in state.received.items() if vector is not state.vectors[slot]]


@pytest.mark.parametrize("place", ["disk", "host", "late"])
def test_a_federation_whose_vectors_lie_elsewhere(
    federation: Make, tmp_path: Path, place: str
) -> None:
    """Unbroken and resumed, with a server's copy beside each vector."""
    runs = []
    for bank in ("memory", place):
        fed = federation(
            KAPC(), net="norm", rounds=3, participation=0.5, callbacks=[Quantize(), Checkpoint()]
        )
        fed.run.folder = tmp_path / bank
        fed.run.folder.mkdir()
        fed.run.store = stores(fed.run.folder)[bank]
        fed.fit()
        runs.append(fed.run)
    again = federation(KAPC(), net="norm", rounds=3, participation=0.5, callbacks=[Quantize()]).run
    again.store = stores(runs[1].folder)[place]
    restore(again, runs[1].folder / "checkpoints")
    assert same(runs[0], runs[1])
    assert same(runs[0], again)


def retried() -> Callback:
    return Fault([(2, 1), (2, 4), (3, 0)])


VARIANTS: dict[str, dict[str, Any]] = {
    "kapc": {"method": KAPC()},
    "global": {"method": FedAvg(), "evaluation": {"judge": "finetuned"}},
    "one's own head": {"method": FedPer(), "participation": 0.5},
    "all known": {"method": FedAMP(), "participation": 0.5},
    "validation": {"method": FEDORA(selection="paper"), "data": {"validation": 0.2}},
    "prototypes": {"method": FedProto(), "net": "norm"},
    "two vectors": {"method": SCAFFOLD(), "participation": 0.5},
    "kept momentum": {"method": KAPC(), "optimizer": {"momentum": 0.9, "keep_state": True}},
    "many at once": {"method": KAPC(), "fabric": {"executor": "vmap"}},
    "again": {"method": KAPC(), "on_bad_client": "retry", "callbacks": retried},
    "without": {"method": KAPC(), "on_bad_client": "skip", "callbacks": retried},
}


@pytest.mark.sampled("kept", "prototypes-late", "kapc-late", "many")
@pytest.mark.parametrize("place", ["host", "late"])
@pytest.mark.parametrize("name", VARIANTS)
def test_no_number_depends_on_where_vectors_lie(
    federation: Make, tmp_path: Path, name: str, place: str
) -> None:
    runs = []
    for bank in ("memory", place):
        variant = dict(VARIANTS[name])
        hung = [variant.pop("callbacks")()] if "callbacks" in variant else []
        fed = federation(variant.pop("method"), rounds=4, clients=5, callbacks=hung, **variant)
        fed.run.store = stores(tmp_path)[bank]
        summary = fed.fit()
        runs.append((fed.run, summary["final_accuracies"]))
    (memory, scores), (other, others) = runs
    assert same(memory, other) and scores == others
    assert all(
        equal(a.vectors, b.vectors) for a, b in zip(memory.groups, other.groups, strict=True)
    )
    assert equal(memory.server.memory, other.server.memory)


def test_what_was_fetched_in_vain_is_used_again(tmp_path: Path) -> None:
    store = VectorStore("host", tmp_path, CPU)
    for _ in range(3):
        store.fetch([store.allocate(torch.ones(4))])
        store.synchronize()
        assert len(store._free) == 1 and not store._ahead


def state_in(store: VectorStore, two: bool) -> ClientState:
    """Numbers 0 to 3 as the model, 4 to 7 as another vector, of which the server has 8 to 11."""
    own, other, theirs = (store.allocate(torch.arange(4.0) + 4 * k) for k in range(3))
    received = {"model": store.allocate(own) if two else own, "control": theirs}
    return ClientState(0, {"model": own, "control": other}, [], received)


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_visit_works_on_copies_that_are_written_back(
    tmp_path: Path, two: bool, late: bool
) -> None:
    """What the server last received may be the client's own vector: then it is so in a visit, and
    after."""
    store = VectorStore("host", tmp_path, CPU, Late() if late else None)
    state = state_in(store, two)
    kept, server = dict(state.vectors), dict(state.received)
    store.fetch([*state.vectors.values(), *state.received.values()])
    assert len(store._ahead) == 3 + two
    store.acquire(state)
    assert not {id(v) for v in state.vectors.values()} & {id(v) for v in kept.values()}
    assert (state.received["model"] is state.vectors["model"]) == (not two)
    for vector in state.vectors.values():
        vector += 100
    state.received["control"] += 1000
    assert float(kept["control"].sum()) == 22  # still as it was
    store.release()
    store.synchronize()
    assert all(state.vectors[k] is v for k, v in kept.items()) and all(
        state.received[k] is v for k, v in server.items()
    )
    assert torch.equal(kept["model"], torch.arange(4.0) + 100) and torch.equal(
        kept["control"], torch.arange(4.0) + 104
    )
    assert torch.equal(server["model"], torch.arange(4.0) + (0 if two else 100))
    assert torch.equal(server["control"], torch.arange(4.0) + 1008)
    assert len(store._free) == 3 + two


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("left", [0, 1, 2])
def test_without_room_for_a_vector_nothing_has_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two: bool, left: int
) -> None:
    store = VectorStore("host", tmp_path, CPU)
    state = state_in(store, two)
    vectors, received = dict(state.vectors), dict(state.received)
    room, more = store._room, [1] * left

    def full(wanted: torch.Tensor) -> torch.Tensor:
        if not more:
            raise torch.OutOfMemoryError("no room")
        more.pop()
        return room(wanted)

    monkeypatch.setattr(store, "_room", full)
    with pytest.raises(torch.OutOfMemoryError):
        store.acquire(state)
    store.release()
    assert all(state.vectors[k] is v for k, v in vectors.items())
    assert all(state.received[k] is v for k, v in received.items())
    kept = [*vectors.values(), *received.values()]
    assert len(store._free) == left and all(free is not v for free in store._free for v in kept)


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("slot", ["model", "control"])
def test_a_hook_may_put_another_vector_into_a_state(tmp_path: Path, two: bool, slot: str) -> None:
    """Also one that was only lent; no memory is given out twice."""
    store = VectorStore("host", tmp_path, CPU)
    for new in (torch.full((4,), 7.0), torch.full((2,), 7.0), None):
        state = state_in(store, two)
        before = [*state.vectors.values(), *state.received.values()]
        lent = store.borrow(torch.full((4,), 8.0))
        store.acquire(state)
        state.vectors[slot] = lent if new is None else new
        store.release()
        store.synchronize()
        assert torch.equal(state.vectors[slot], torch.full((4,), 8.0) if new is None else new)
        assert torch.equal(state.received["model"], torch.arange(4.0))
        assert torch.equal(state.received["control"], torch.arange(4.0) + 8)
        places = [free.data_ptr() for free in store._free]
        assert len(set(places)) == len(places)
        now = [*state.vectors.values(), *state.received.values()]
        assert not {v.data_ptr() for v in now} & set(places)
        assert all(any(v is b for b in before) for v in now if v is not state.vectors[slot])


def test_a_hook_may_make_the_servers_copy_the_clients_own(tmp_path: Path) -> None:
    store = VectorStore("host", tmp_path, CPU)
    state = state_in(store, two=True)
    store.acquire(state)
    state.vectors["model"] = state.received["model"]
    state.vectors["model"] += 1
    store.release()
    assert state.vectors["model"] is state.received["model"]
    assert torch.equal(state.vectors["model"], torch.arange(4.0) + 1)


def test_the_device_holds_the_vectors_of_two_visits(federation: Make, tmp_path: Path) -> None:
    """Those of the client at hand and those of the next one: own model, and what it receives."""
    fed = federation(KAPC(), clients=10)
    fed.run.store = stores(tmp_path)["host"]
    for t in (1, 2):
        fed.round(t)
    assert len(fed.run.store._free) == 4


def test_vectors_come_while_the_client_before_trains(federation: Make, tmp_path: Path) -> None:
    fed = federation(KAPC(), clients=4)
    store = fed.run.store = stores(tmp_path)["host"]
    fed.round(1)
    order: list[tuple[str, int]] = []
    models = {id(state.vectors["model"]): c for c, state in fed.run.states.items()}
    [trainer] = fed.worker.trainers
    fetch, train = store.fetch, trainer.executor.train

    def fetched(coming: Iterable[torch.Tensor]) -> None:
        wanted = [vector for vector in coming if id(vector) not in store._ahead]
        order.extend(("fetch", models[id(vector)]) for vector in wanted if id(vector) in models)
        fetch(wanted)

    def trained(jobs: Any) -> Any:
        order.append(("train", jobs[0].schedule.client))
        return train(jobs)

    store.fetch, trainer.executor.train = fetched, trained  # type: ignore[method-assign]
    fed.round(2)
    fetches = [entry for k, entry in enumerate(order) if entry not in order[:k]]
    assert fetches == [
        ("fetch", 0),
        ("fetch", 1),
        ("train", 0),
        ("fetch", 2),
        ("train", 1),
        ("fetch", 3),
        ("train", 2),
        ("train", 3),
    ]


@pytest.mark.parametrize("callbacks", [[], [Quantize()]], ids=["one copy", "two copies"])
def test_a_client_that_failed_stays_in_the_store(
    federation: Make, callbacks: list[Callback]
) -> None:
    fed = federation(
        KAPC(), rounds=2, on_bad_client="skip", callbacks=[*callbacks, Fault([(2, 1)])]
    )

    def places() -> dict[int, tuple[int, int]]:
        states = fed.run.states.items()
        return {
            c: (s.vectors["model"].data_ptr(), s.received["model"].data_ptr()) for c, s in states
        }

    fed.round(1)
    there = places()
    before = fed.run.states[1].vectors["model"].clone()
    fed.round(2)
    assert places() == there
    assert torch.equal(fed.run.states[1].vectors["model"], before)


MEASURE = """
import re, sys
from fl_lightning.cli import main
from fl_lightning.engine.federation import Federation

whole = Federation.round

def round(self, t):
    record = whole(self, t)
    status = open("/proc/self/status").read()
    print("ANON", int(re.search(r"RssAnon:\\s+(\\d+)", status)[1]) // 1024)
    return record

Federation.round = round
flags = "--config kapc_exact_digits --loggers null --callbacks null --method local --federation.rounds 1"
flags += " --federation.clients 60 --federation.local_epochs 0 --evaluation.models [] --data.alpha 100"
flags += " --data.min_samples 1 --model.hidden [2000,500]"
assert main(["fit", *flags.split(), "--fabric.bank", sys.argv[1], "--out", sys.argv[2]]) == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_vectors_on_disk_take_no_memory_of_their_own(tmp_path: Path) -> None:
    """60 models of 4.5 MB: what the process holds beside mapped files differs by most of their 270
    MB."""
    held = {}
    for bank in ("memory", "disk"):
        line = [sys.executable, "-c", MEASURE, bank, str(tmp_path / bank)]
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        held[bank] = int(done.stdout.partition("ANON")[2].split()[0])
    assert held["memory"] - held["disk"] > 200, held


@pytest.mark.parametrize("receives_less", [False, True])
def test_what_another_has_left_in_a_vector_is_never_read(
    federation: Make, receives_less: bool
) -> None:
    """Vectors of clients that are not kept are used again, also where a transform lets them receive
    nothing."""

    class Less(Transform):
        changes_download = True

        def on_download(self, client: Client, payload: Payload) -> None:
            payload.sent[:] = False

    models = []
    for used in (True, False):
        fed = federation(FedAvg(), participation=0.5, callbacks=[Less()] if receives_less else [])
        [group] = fed.run.groups
        for t in (1, 2, 3):
            fed.round(t)
            assert group.spare
            if not used:
                group.spare.clear()
            for vector in group.spare:
                vector[: group.layout.blocks[-1].stop] += 1
        models.append(group.vectors["model"])
    assert torch.equal(*models)
