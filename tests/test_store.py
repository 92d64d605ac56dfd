"""Vectors beside the device or in files: the same numbers as in memory, nothing left behind, memory
spared."""

import errno
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from classes import FEDORA, KAPC, SCAFFOLD, FedAMP, FedAvg, FedPer, FedProto

from fl_lightning.callbacks.base import Transform
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.storage.store import Copier, Place, VectorStore

from .test_bad_clients import same as same_state

CPU = torch.device("cpu")


class Fault(Transform):
    """Fails when these clients upload in these rounds, (round, client), the first time."""

    def __init__(self, when):
        self.when = when

    def on_upload(self, client, payload):
        if (now := (client.round, client.id)) in self.when:
            self.when.remove(now)
            raise ArithmeticError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("place", get_args(Place))
def test_a_kept_vector_is_a_copy_that_can_be_written_to(tmp_path, dtype, place):
    store = VectorStore(place, tmp_path, CPU)
    vector = torch.randn(1000).to(dtype)
    kept, other = store.allocate(vector), store.allocate(vector)
    assert torch.equal(kept, vector) and kept.dtype == dtype and kept.data_ptr() % 64 == 0
    kept += 1
    assert torch.equal(kept, vector + 1) and torch.equal(other, vector)
    assert not list(tmp_path.iterdir())  # its file has no name


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunFailed, match="No space left"):
        VectorStore("disk", tmp_path, CPU).allocate(torch.zeros(4))
    assert not list(tmp_path.iterdir())


class Late(Copier):
    """Copies at the last moment that is allowed: what does not wait for them finds the old
    numbers."""

    def __init__(self):
        self.begun = []

    def copy(self, into, source):
        if into is not source:
            self.begun.append((into, source))
        return partial(self._up_to, len(self.begun))

    def _up_to(self, count):
        for k, (into, source) in enumerate(self.begun[:count]):
            if into.numel():
                into.copy_(source)
                self.begun[k] = (into[:0], source[:0])

    def synchronize(self):
        self._up_to(len(self.begun))
        self.begun = []


def stores(folder):
    return {
        "memory": VectorStore("memory", folder, CPU),
        "late": VectorStore("host", folder, CPU, Late()),
    }


def same(one, other):
    return one.states.keys() == other.states.keys() and all(
        same_state(state, other.states[c]) and copies(state) == copies(other.states[c])
        for c, state in one.states.items()
    )


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(v, other[k]) for k, v in one.items())


def copies(state):
    """Slots of which the server's copy is a tensor of its own."""
    return [slot for slot, vector in state.received.items() if vector is not state.vectors[slot]]


def retried():
    return Fault([(2, 1), (2, 4), (3, 0)])


VARIANTS = {
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


@pytest.mark.sampled("kept", "prototypes", "[kapc]", "many")
@pytest.mark.parametrize("name", VARIANTS)
def test_no_number_depends_on_where_vectors_lie(federation, tmp_path, name):
    """Copied as late as may be; golden runs have banks of host and disk."""
    runs = []
    for bank in ("memory", "late"):
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
def test_vectors_on_disk_take_no_memory_of_their_own(tmp_path):
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
def test_what_another_has_left_in_a_vector_is_never_read(federation, receives_less):
    """Vectors of clients that are not kept are used again, also where a transform lets them receive
    nothing."""

    class Less(Transform):
        changes_download = True

        def on_download(self, client, payload):
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
