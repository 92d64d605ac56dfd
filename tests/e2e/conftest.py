"""Whole runs through the command line, on small real data, and what is compared of them."""

import csv
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from forked import ranks
from safetensors.torch import load_file

from fl_lightning.cli import main

SMALL = """
--config kapc_exact_digits --loggers null --callbacks.heatmaps null --callbacks.progress null
--fabric.accelerator cpu --fabric.threads 1 --data.fraction 0.4 --model.hidden [16]
--federation.clients 5 --federation.local_epochs 1 --federation.rounds 3
"""
"""KAPC on some 700 digits: half a second."""

MIXED = """
model:
  - {name: mlp, count: 3, init_args: {hidden: [16]}}
  - {class_path: fl_own_models.Normed, count: 2}
"""
"""Two architectures among five clients, as the config file `../mixed.yaml`."""

COMMAND = str(Path(sys.executable).with_name("fl-train"))

OWN_MODELS = '''
"""A user's own models."""

import json
from pathlib import Path

import torch
from lightning import LightningModule
from torch import nn

from fl_lightning.callbacks import Observer, Transform


class Normed(nn.Module):
    """A convolution, a BatchNorm and a classifier."""

    head = "out"

    def __init__(self, side: int = 8, width: int = 4):
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, stride=2)
        self.norm = nn.BatchNorm2d(width)
        self.out = nn.Linear(width * ((side - 1) // 2) ** 2, 10)

    def forward(self, x):
        return self.out(self.norm(self.conv(x)).relu().flatten(1))


class Frozen(Normed):
    """Its convolution and BatchNorm stand still."""

    def __init__(self):
        super().__init__()
        self.conv.requires_grad_(False)
        self.norm.requires_grad_(False)


class Where(Observer):
    """Every rank notes after each round where what is frozen lies, and how long what it holds of clients is."""

    def on_round_end(self, run, record):
        frozen = {name: (t.data_ptr(), t.tolist()) for name, t in run.groups[0].frozen.items()}
        of_client = lambda s: [*s.vectors.values(), *s.received.values(), *s.buffers, *s.memory.values()]
        lengths = sorted({t.numel() for s in run.states.values() for t in of_client(s)})
        noted = {"frozen": frozen, "lengths": lengths, "clients": sorted(run.states)}
        Path(f"{run.folder.name}-{run.rank}-{record.round}.json").write_text(json.dumps(noted))


class Lit(LightningModule):
    """A loss and an optimiser of its own."""

    steps = 0
    optimizers_made = 0

    def __init__(self, lr: float = 0.01):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y, label_smoothing=0.1)
        self.log("train_loss", loss)
        Lit.steps += 1
        return {"loss": loss}

    def configure_optimizers(self):
        Lit.optimizers_made += 1
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Bursting(nn.Module):
    """Fails in its training step number `at`, counted over all clients of a process."""

    at = 0

    def __init__(self, at: int = 0):
        super().__init__()
        self.fatal = at or Bursting.at
        self.steps = 0
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        self.steps += self.training
        if self.training and self.steps == self.fatal:
            raise ArithmeticError("it burst\\non a second line")
        return self.out(x.flatten(1))


class Fault(Transform):
    """Client `client` does harm in the rounds of `at`: it raises, or uploads what is no model; `once`: not again."""

    done = set()
    changes_upload = True

    def __init__(self, at: list[int], client: int = 1, kind: str = "raise", once: bool = False):
        self.at, self.client, self.kind, self.once = at, client, kind, once

    def on_upload(self, client, payload):
        t = client.round
        if client.id != self.client or t not in self.at or (self.once and t in Fault.done):
            return
        Fault.done.add(t)
        if self.kind == "raise":
            raise OSError("the disk of this client is gone")
        if self.kind == "explode":
            client["model"].mul_(1e30).mul_(1e30)
        else:
            payload.vector = payload.vector[:5] if self.kind == "shape" else payload.vector * torch.nan


class Picky(Transform):
    """Fails at clients with few training samples."""

    def on_download(self, client, payload):
        if 0 < len(client.data.train) < 30:
            raise ValueError("too few samples to whiten")


class Slow(nn.Module):
    """Takes its time, so that a run can be killed in the middle."""

    def __init__(self, seconds: float = 0.0):
        super().__init__()
        self.seconds = seconds
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        import time

        time.sleep(self.seconds if self.training else 0)
        return self.out(x.flatten(1))
'''


def record_of(folder):
    """All that must be equal between equal runs: tables, relations, and the SHA-256 of each client's
    tensors and of the server's."""
    checkpoints = folder / "checkpoints"
    newest = max(checkpoints.glob("manifest-round-*.json"))
    kept = json.loads(newest.read_text())["manifest"]
    files = {"server": kept["server"], **kept["clients"]}
    relations = {file.name: np.load(file) for file in sorted((folder / "relation").iterdir())}
    newcomers = (folder / "newcomers.csv").exists()
    return SimpleNamespace(
        metrics=[
            {k: v for k, v in row.items() if not k.startswith(("seconds", "memory"))}
            for row in rows(folder)
        ],
        clients=rows(folder, "clients.csv"),
        final=rows(folder, "final.csv"),
        relation={
            name: {key: arrays[key].tolist() for key in arrays}
            for name, arrays in relations.items()
        },
        weights={name: _digest(checkpoints / entry["file"]) for name, entry in files.items()},
        newcomers=rows(folder, "newcomers.csv") if newcomers else [],
    )


def rows(folder, name="metrics.csv"):
    """The rows of a table, as text."""
    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


def _digest(file):
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(file).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture
def record():
    """What of a run folder must be equal between equal runs."""
    return record_of


@pytest.fixture
def table():
    """Reads metrics.csv, or another table of a run folder."""
    return rows


@pytest.fixture
def small():
    """The command line of a small run: `fit`'s, for processes of its own."""

    def line(name, *flags):
        return ["fit", *SMALL.split(), "--name", name, *_words(flags)]

    return line


@pytest.fixture
def fl_train():
    """The command."""
    return COMMAND


@pytest.fixture(scope="session")
def own_models(tmp_path_factory):
    """A folder with the module `fl_own_models`: Normed, Frozen, Lit, Bursting, Slow."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "fl_own_models.py").write_text(OWN_MODELS)
    return folder


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch, own_models):
    """An empty working directory, outside any launcher, with the user's own models importable."""
    monkeypatch.chdir(tmp_path)
    # beside the folder, which tests want to find empty
    (tmp_path.parent / "mixed.yaml").write_text(MIXED)
    monkeypatch.setattr(sys, "path", [*sys.path, str(own_models)])
    monkeypatch.setenv("PYTHONPATH", str(own_models), prepend=os.pathsep)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in [n for n in os.environ if n.startswith(("SLURM_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def bursts():
    """The model that fails; mended in the end."""
    import fl_own_models

    yield fl_own_models.Bursting
    fl_own_models.Bursting.at = 0


@pytest.fixture
def fit(workplace, small):
    """Runs `fl-train fit` in this process, small unless `flags` say otherwise; gives the run
    folder."""

    def run(name, *flags):
        assert main(small(name, *flags)) == 0
        return workplace / "runs" / name

    return run


@pytest.fixture
def refused(capsys, workplace):
    """Runs a command in this process that must be refused; gives its one line. Nothing on the disk
    may change."""

    def run(*words, code=2):
        before = contents(workplace)
        capsys.readouterr()
        assert main(_words(words)) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("fl-train: error: ")
        assert err.count("\n") == 1
        assert contents(workplace) == before
        return err.removeprefix("fl-train: error: ").rstrip()

    return run


def contents(folder):
    """Every file below `folder` with what it holds, and every folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.fixture
def command(workplace):
    """Runs `fl-train` as a command of its own."""

    def run(*words, code=0):
        line = [COMMAND, *_words(words)]
        done = subprocess.run(
            line, cwd=workplace, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == code, done.stderr
        return done

    return run


@pytest.fixture
def on_ranks(workplace):
    """Runs commands one after the other, each on several processes that are forked from this one.

    They are told what torchrun tells its own. Importing is what takes long, and is done already.
    """

    def run(count, *lines):
        for line in lines:
            attempts = ranks(count, line, workplace / "rank")
            assert [a.wait(900) for a in attempts] == [0] * count, [a.err for a in attempts]

    return run


def _words(words):
    """Each string is a piece of a command line (no spaces inside a word)."""
    return [part for word in words for part in word.split()]
