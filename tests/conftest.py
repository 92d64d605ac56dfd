"""Fixtures that every test folder shares."""

import os
import re
import shlex
import sys
from itertools import zip_longest
from pathlib import Path

# Equal bits need equal numbers of threads, and two cores have better to do than to wait for each
# other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as `fl-train` has it; torch reads it once
# What tests of several folders share: forked.py, watching.py and the like.
sys.path += [
    str(Path(__file__).parent / room)
    for room in ("configs", "faults", "golden", "methods", "results", "study")
]

import pytest
import torch
from lightning.fabric import Fabric
from refusals import refused_line
from torch import nn
from torchvision.models.resnet import BasicBlock

from fl_lightning.callbacks.base import Transform
from fl_lightning.cli import main
from fl_lightning.configuration.config import (
    Component,
    Config,
    DataConfig,
    EvaluationConfig,
    FabricConfig,
    FederationConfig,
    ModelConfig,
    OptimizerConfig,
)
from fl_lightning.core.client import Client
from fl_lightning.core.payload import Payload
from fl_lightning.data import FederatedData, prepare
from fl_lightning.engine.build import federation as build
from fl_lightning.foundation.parallel import ClientParallelStrategy
from fl_lightning.methods import Method
from fl_lightning.methods.fedsalora import FedSALoRA
from fl_lightning.methods.ffalora import FFALoRA
from fl_lightning.models import head_of
from fl_lightning.models.prepared import adapt
from fl_lightning.storage.state import MODEL, ClientState

# Images of containers often forbid Python to keep compiled files: each of hundreds of processes
# would compile anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

SMALL = """
--fabric.accelerator cpu --fabric.threads 1 --data.fraction 0.4 --model.hidden [16]
--federation.clients 4 --federation.local_epochs 1 --federation.rounds 3
"""

SAMPLE = ("fedavg", "kapc", "ktpfl", "ditto", "fedrep", "fedhkd")
"""Of every kind one: a global model; a relation; predictions; a further vector; several phases;
statistics."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test that is `sampled`, only the named parameters (without names: those of SAMPLE's
    methods) are fast."""
    for item in items:
        mark = item.get_closest_marker("sampled")
        words = set(re.findall(r"[a-z]+", item.name.partition("[")[2].lower()))
        if mark and not (
            any(name in item.name for name in mark.args) if mark.args else words & set(SAMPLE)
        ):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def fl_data():
    """The folder with real MNIST and CIFAR-10 (environment variable FL_DATA), or a skip that says
    so."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("FL_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} does not exist (set FL_DATA)")
    return folder


class NormNet(nn.Module):
    """A convolution, a BatchNorm and a classifier: every kind of tensor, and fast."""

    head = "classifier"

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=2)
        self.norm = nn.BatchNorm2d(4)
        self.hidden = nn.Linear(36, 16)
        self.classifier = nn.Linear(16, 10)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu().flatten(1)
        return self.classifier(self.hidden(x).relu())


class PlainNet(nn.Module):
    """Two linear layers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.out = nn.Linear(16, 10)

    def forward(self, x):
        return self.out(self.body(x))


class ResidualNet(nn.Module):
    """A stem, one block of a ResNet and a classifier, as narrow as they can be, for 8 x 8
    pixels."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU()
        )
        shortcut = nn.Sequential(nn.Conv2d(4, 8, 1, 2, bias=False), nn.BatchNorm2d(8))
        self.block = BasicBlock(4, 8, 2, shortcut)
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        return self.fc(self.block(self.stem(x)).mean((2, 3)))


ADAPTED = (FedSALoRA, FFALoRA)
"""Methods that work on adapters: their networks get some of rank 2."""
NETS = {"plain": PlainNet, "norm": NormNet, "residual": ResidualNet}


@pytest.fixture
def federation(tmp_path):
    """Makes a federation on the digits, in this process, from a method and changed settings.

    `net`: a name of NETS, or a network class; or how many clients have which.
    """

    def make(
        method=None,
        net="plain",
        callbacks=(),
        data=None,
        ranks=(),
        **changes,
    ):
        nets = net if isinstance(net, dict) else {net: None}
        config = _config(list(nets.values()), data if isinstance(data, dict) else {}, changes)
        precision, clients = config.fabric.precision, config.federation.clients
        fabric = Fabric(
            accelerator="cpu", devices=1, precision=precision, strategy=ClientParallelStrategy()
        )
        fabric.launch()
        loaded = (
            data if isinstance(data, FederatedData) else prepare(config.data, clients, config.seed)
        )
        config.data.held_out_clients = len(loaded.held_out) / clients
        models = []
        if isinstance(method, ADAPTED) and not ranks:
            ranks = [2] * len(nets)
        for name, rank in zip_longest(nets, ranks):
            torch.manual_seed(0)
            model = _adapted(NETS.get(name, name)(), rank)
            models.append(model.double() if precision == "64-true" else model)
        return build(fabric, config, loaded, models, method or Method(), callbacks, tmp_path)

    return make


def _adapted(model, rank):
    """`model`, with adapters of its last layer below the classifier where these have a rank (0: of
    none)."""
    if rank:
        head = head_of(model)
        layers = [
            name
            for name, m in model.named_modules()
            if isinstance(m, nn.Linear | nn.Conv2d) and name != head
        ]
        adapt(model, {"rank": rank, "alpha": float(rank), "targets": layers[-1:]}, head)
    return model


@pytest.fixture
def make_run(federation):
    """Makes the run of such a federation, before its first round."""
    return lambda *args, **changes: federation(*args, **changes).run


def _config(counts, data, changes):
    settings = {
        "rounds": 2,
        "clients": 4,
        "participation": 1.0,
        "local_epochs": 1,
        "local_steps": None,
        "batch_size": 32,
        "on_bad_client": "stop",
        "optimizer": {},
        "evaluation": {},
        "fabric": {},
        "seed": 0,
        "precision": "32-true",
    }
    settings |= changes
    return Config(
        method=Component("unused"),
        models=[ModelConfig(Component("unused"), count) for count in counts],
        seed=settings["seed"],
        federation=FederationConfig(
            **{k: settings[k] for k in FederationConfig.__dataclass_fields__}
        ),
        optimizer=OptimizerConfig(**({"lr": 0.05} | settings["optimizer"])),
        evaluation=EvaluationConfig(**settings["evaluation"]),
        data=DataConfig(**data),
        fabric=FabricConfig(**({"precision": settings["precision"]} | settings["fabric"])),
    )


@pytest.fixture
def make_client():
    """Gives a client of a run in a round, as transforms see it; it has received its group's global
    model.

    Its state is made where it has none. There is no module: what trains or scores it needs a whole
    run.
    """

    def make(run, client, round=1):
        group = run.group_of(client)
        if client not in run.states:
            model = group.initial.clone()
            received = model.clone() if run.policy.keeps_received else model
            transforms = [c for c in run.callbacks if isinstance(c, Transform)]
            memory = {
                k: v.clone()
                for part in (run.method, *transforms)
                for k, v in part.init_client(run).items()
            }
            buffers = [b.clone() for b in group.initial_buffers]
            run.states[client] = ClientState(
                client, {MODEL: model}, buffers, {MODEL: received}, memory=memory
            )
        made = Client(run, group, client, round, run.states[client])
        made.payload = Payload(group.layout, group.vectors[MODEL], group.down_mask.copy())
        return made

    return make


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """Runs `fl-train fit` in this process on some 700 digits, with other `flags`; gives the run
    folder."""
    monkeypatch.chdir(tmp_path)

    def run(name, *flags):
        words = f"--config kapc_exact_digits --loggers null --callbacks null {SMALL} {' '.join(flags)}".split()
        assert main(["fit", "--name", name, *words]) == 0
        return tmp_path / "runs" / name

    return run


@pytest.fixture
def fl_train(capfd):
    """Runs a line of `fl-train` in this process; gives exit code, stdout and stderr."""

    def run(line):
        capfd.readouterr()
        return main(shlex.split(line)), *capfd.readouterr()

    return run


@pytest.fixture
def refused(fl_train):
    """Runs such a line, which must be refused as bad input; gives the one line that it prints."""

    return lambda line: refused_line(fl_train(line))


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Makes commands that answer as SLURM's do: each a line of bash, which takes every trial."""

    trial = '[ "$1" = --test-only ] && exit 0'

    def make(**lines):
        folder = tmp_path.parent / f"{tmp_path.name}-bin"
        folder.mkdir(exist_ok=True)
        for name, line in lines.items():
            (folder / name).write_text(f"#!/bin/bash\n{trial}\n{line}\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return make
