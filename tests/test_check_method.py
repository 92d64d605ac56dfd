"""`fl-train check-method`: a sound method passes, and what is broken is named in plain words."""

import re
import sys

import pytest

from fl_lightning.cli import main
from fl_lightning.configuration.components import Component
from fl_lightning.configuration.flags import layers_of_flags, read_flags
from fl_lightning.lab.check.checking import _config
from fl_lightning.lab.check.checks import NAMES

OWN = '''
"""Methods of somebody's own: the first is sound."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fl_lightning.core import Phase, Slot
from fl_lightning.methods import Method, Traits


@dataclass(frozen=True)
class Sound(Method):
    """Ditto."""

    traits = Traits(judge="after")

    def slots(self):
        return {"personal": Slot()}

    def phases(self, client, payload):
        return [Phase(), Phase("personal", client.proximal(payload, 0.5))]

    def personal(self, client):
        return client["personal"]


@dataclass(frozen=True)
class Drawn(Method):
    """Noise of a generator that nobody has seeded."""

    def phases(self, client, payload):
        draws = torch.Generator()
        draws.seed()
        client["model"].add_(torch.randn(client.layout.size, generator=draws), alpha=0.01)
        yield Phase()


@dataclass(frozen=True)
class Outside(Method):
    """Keeps each client's last model on itself, and begins halfway between it and the global one."""

    kept: dict = field(default_factory=dict)

    def receive(self, client, payload):
        super().receive(client, payload)
        if client.id in self.kept:
            client["model"].lerp_(self.kept[client.id], 0.5)

    def phases(self, client, payload):
        yield Phase()
        self.kept[client.id] = client["model"].clone()


SEEN = {}


@dataclass(frozen=True)
class InModule(Method):
    """The same, but in the module: a second run in the process finds it there."""

    def phases(self, client, payload):
        SEEN[client.id] = SEEN.get(client.id, 0) + 1
        client["model"].mul_(1 + 0.001 * SEEN[client.id])
        yield Phase()


@dataclass(frozen=True)
class WantsAll(Method):
    """Takes everybody to be in every round."""

    def aggregate(self, server):
        n = server.run.clients
        weights = torch.full((len(server.answered),), 1 / n, dtype=torch.float64)
        assert len(weights) == n, "where are the others?"
        server["model"] = server.only.mean(weights, server.answered)


@dataclass(frozen=True)
class Breaks(Method):
    """Fails at once."""

    def phases(self, client, payload):
        return [Phase(steps=1 / 0)]


@dataclass(frozen=True)
class Uncounted(Method):
    """Multiplies great matrices in passing."""

    def upload(self, client, payload):
        torch.ones(600, 600) @ torch.ones(600, 600)
        return super().upload(client, payload)


@dataclass(frozen=True)
class LeavesTraces(Method):
    """Counts the visits that were tried, not those that came to something."""

    tried: dict = field(default_factory=dict)

    def phases(self, client, payload):
        self.tried[client.id] = self.tried.get(client.id, 0) + 1
        client["model"].mul_(1 + 0.001 * self.tried[client.id])
        yield Phase()


@dataclass(frozen=True)
class Wireless(Method):
    """Its clients' models reach each other, and nothing is said to have travelled."""

    traits = Traits(starts="own", judge="after")

    def scope(self, block):
        return "personal"

    def phases(self, client, payload):
        yield Phase()
        SEEN[client.id] = client["model"].clone()

    def receive(self, client, payload):
        if SEEN:
            client["model"].copy_(torch.stack([SEEN[c] for c in sorted(SEEN)]).mean(0))


class NoMethod:
    """Something else."""
'''
SMALL = ["--federation.rounds", "3", "--federation.clients", "4", "--data.fraction", "0.3"]


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    """Checks a class of OWN in this process; gives what each check said, and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_checked.py").write_text(OWN)

    def run(name, *words, code=0):
        capsys.readouterr()
        assert (
            main(["check-method", name if "." in name else f"own_checked.{name}", *SMALL, *words])
            == code
        )
        out, err = capsys.readouterr()
        said = dict(re.findall(r"^(?:ok|FAILS) +([\w-]+) +(.*)$", out, re.MULTILINE))
        assert len(said) == sum(
            line.startswith(("ok ", "refused ", "FAILS ")) for line in out.splitlines()
        )
        failing = {line.split()[1] for line in out.splitlines() if line.startswith("FAILS ")}
        return {
            name: ("FAILS " if name in failing else "ok ") + text for name, text in said.items()
        }, err

    yield run
    sys.modules.pop("own_checked", None)


def failing(said):
    return {name for name, text in said.items() if text.startswith("FAILS ")}


@pytest.mark.slow
def test_a_sound_method_passes(checked, tmp_path):
    said, err = checked("Sound", "--out", "kept")
    assert list(said) == NAMES
    assert failing(said) == set()
    assert err == ""
    assert said["ranks"].endswith("on two processes the same bits, with a partial cohort too")
    assert (tmp_path / "kept" / "two" / "final.csv").exists()


@pytest.mark.parametrize(
    "method", ["Sound", pytest.param("fl_lightning.methods.kapc.KAPC", marks=pytest.mark.slow)]
)
def test_sound_methods_pass_what_takes_no_time(method, checked):
    said, _ = checked(method, "--only", "runs,bytes,operations")
    assert list(said) == ["runs", "bytes", "operations"]
    assert failing(said) == set()
    assert "KiB up for a client and round: " in said["bytes"]
    seen, counted = (float(n) for n in re.findall(r"([\d.]+) million", said["operations"]))
    assert 0 < counted <= 1.02 * seen


@pytest.mark.slow
def test_the_method_of_a_config_is_left_aside():
    """It was checked in place of the named one, under the other's name."""
    layers = layers_of_flags(read_flags(["--config", "kapc_digits", "--method.mu", "0.3"])[1])[0]
    config = _config("fedprox", layers)
    assert config.method == Component("fl_lightning.methods.fedprox.FedProx", {"mu": 0.3})
    same = [{"method": {"name": "fedprox", "mu": 0.2}}]
    assert _config("fedprox", same).method.init_args == {"mu": 0.2}


BROKEN = {
    "Drawn": (
        "runs,seed",
        r"another: metrics\.csv differs from round 1 on .*draw from client\.generator",
    ),
    "Outside": (
        "runs,seed,resume",
        r"after round 1 and continued, it is another run: metrics\.csv differs from round 2 on .*"
        r"belongs into slots, init_client or init_server",
    ),
    "InModule": ("runs,seed", r"a second run with the same seed, in the same process, is another"),
    "WantsAll": (
        "runs,partial",
        r"AssertionError: where are the others\? \(own_checked\.py, line \d+\)",
    ),
    "Uncounted": (
        "runs,operations",
        r"torch sees .* operations in a round, and .* are counted; what a hook computes",
    ),
    "LeavesTraces": (
        "runs,skip",
        r"tried again leaves a trace: metrics\.csv differs from round 2 on",
    ),
    "Wireless": (
        "runs,bytes",
        r"no byte goes up, yet what client 0 holds changes the models of others",
    ),
    "Breaks": (
        "seed,runs",
        r"^FAILS .*client 0 failed in round 1, stage training: ZeroDivisionError: division by "
        r"zero \(own_checked\.py, ",
    ),
}
"""By class: the checks that are made, of which the last fails, and why."""


@pytest.mark.sampled("Breaks")
@pytest.mark.parametrize("method", BROKEN)
def test_what_is_broken_is_named(method, checked):
    only, why = BROKEN[method]
    said, err = checked(method, "--only", only, code=1)
    *_, fails = names = only.split(",")
    assert failing(said) == {fails}
    assert re.search(why, said[fails])
    assert err == f"fl-train: error: own_checked.{method}: 1 of {len(names)} checks fail: {fails}\n"


@pytest.mark.parametrize(
    "words, said",
    [
        (
            ["own_checked.Nothing"],
            "method='own_checked.Nothing': module own_checked has no Nothing",
        ),
        (
            ["own_checked.NoMethod"],
            "method='own_checked.NoMethod': it must be a subclass of",
        ),
        (["nowhere.Mine"], "method='nowhere.Mine': there is no module nowhere"),
        (
            ["own_checked.Sound", "--only", "seeds"],
            "only='seeds': no such check (did you mean seed?)",
        ),
        (
            ["own_checked.Sound", "--federation.rounds", "2"],
            "federation.rounds=2: it must be at",
        ),
        (["own_checked.Sound", "--out", "."], "out='.': it exists"),
        (["fedavg", "--method.mu", "1"], "method.mu='1': no such key"),
        (
            ["fedavg", "--method", "kapc"],
            "method='--method': fedavg is checked; --method.ARG sets",
        ),
        ([], "check-method: it must be given once"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) and value else None,
)
def test_what_cannot_be_checked_is_refused(words, said, checked, capsys):
    assert main(["check-method", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"fl-train: error: {said}")
