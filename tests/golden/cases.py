"""The golden runs: which there are, and the models that they train (see golden.py)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning import LightningModule
from torch import nn

from fl_lightning.configuration import catalogue

# ------------------------------------------------------- models, which a config names by cases.NAME


class Interruptible(nn.Module):
    """Raises KeyboardInterrupt, as Ctrl-C does, in training step `at` of this process (0:
    never)."""

    at = 0
    steps = 0

    def forward(self, x):
        Interruptible.steps += self.training
        if self.training and Interruptible.steps == Interruptible.at:
            raise KeyboardInterrupt
        return x


class Small(nn.Module):
    """A convolution, a BatchNorm and a classifier: every kind of tensor."""

    head = "out"

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, stride=2)
        self.norm = nn.BatchNorm2d(3)
        self.out = nn.Linear(27, 10)
        self.guard = Interruptible()

    def forward(self, x):
        return self.out(self.norm(self.conv(self.guard(x))).relu().flatten(1))


class Deep(nn.Sequential):
    """Four layers."""

    head = "out"

    def __init__(self):
        super().__init__()
        self.guard = Interruptible()
        self.flat = nn.Flatten()
        for name, width in (("first", 64), ("second", 8), ("third", 8)):
            self.add_module(name, nn.Linear(width, 8))
            self.add_module(f"{name}_relu", nn.ReLU())
        self.out = nn.Linear(8, 10)


class Touchy(nn.Module):
    """Fails at the `at`-th batch (and `after`: at all later ones) that holds the sample of
    `bad_data`."""

    head = "out"
    seen = 0

    def __init__(self, at: int = 0, after: bool = False):
        super().__init__()
        self.at, self.after = at, after
        self.body = nn.Linear(64, 8)
        self.out = nn.Linear(8, 10)

    def forward(self, x):
        if self.training and bool((x > FAR).any()):
            Touchy.seen += 1
            if Touchy.seen == self.at or (self.after and Touchy.seen > self.at):
                raise ArithmeticError("a sample that this model cannot take")
        return self.out(self.body(x.flatten(1).clamp(max=1.0)).tanh())


class Lit(LightningModule):
    """A loss, dropout and an optimiser of its own."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 10)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y, label_smoothing=0.1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


FAR = 10.0
"""In standard deviations, which the data come in; the sample of `bad_data` lies some 15 off."""


def bad_data(file):
    """Vectors of 64 numbers in ten classes, the first one out of all bounds."""
    draws = np.random.default_rng(0)
    centres = draws.uniform(0, 1, (10, 64))
    labels = {"train": np.arange(240) % 10, "test": np.arange(80) % 10}
    held = {
        f"x_{part}": centres[y] + draws.normal(0, 0.3, (len(y), 64)) for part, y in labels.items()
    }
    held["x_train"][0, 0] = 100.0
    np.savez(file, **held, **{f"y_{part}": y for part, y in labels.items()})


# ---------------------------------------------------------------- the runs

CLIENTS = 4
SETTINGS = {
    "model": "cases.Small",
    "federation": {
        "rounds": 3,
        "clients": CLIENTS,
        "participation": 0.75,
        "local_epochs": 2,
        "batch_size": 32,
    },
    "data": {"source": "digits", "fraction": 0.2, "alpha": 0.5, "validation": 0.1},
    "optimizer": {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.001},
    "evaluation": {"models": ["before", "after", "finetuned"]},
    "fabric": {"precision": "64-true", "accelerator": "cpu", "threads": 1},
    "callbacks": {"progress": None, "heatmaps": None},
}
ARGUMENTS = {
    "fedprox": {"mu": 0.5},
    "fedamp": {"lam": 0.5, "alpha": 0.2},
    "fedhkd": {"lam": 0.5, "gamma": 0.5, "nu": 0.0},
    "fedora": {"selection": "always"},
    "fedmd": {"samples": 24, "batch_size": 8},
    "simpfd": {"samples": 24, "batch_size": 8},
    "topkpfd": {"samples": 24, "batch_size": 8, "k": 2},
    "ktpfl": {"samples": 24, "batch_size": 8, "step": 0.5},
    "pfedme": {"lam": 3.0, "inner_steps": 2, "beta": 1.5},
    "fedrep": {"head_epochs": 1},
    "scaffold": {"server_lr": 0.5},
    "pfedhn": {"hidden": 8, "hidden_layers": 1, "clip": 0.5},
    "fedala": {"eta": 5.0, "layers": 2, "window": 2, "most": 4},
    "cfl": {"eps1": 1e9, "eps2": 0.0, "first_round": 1},
    "feddf": {"samples": 24, "batch_size": 8, "steps": 6},
    "pfeddf": {"samples": 24, "batch_size": 8, "steps": 6},
    "fedem": {"components": 2},
    "fedfomo": {"models": 2},
    "fedgen": {"beta": 0.5, "generator_steps": 3, "hidden": 8, "noise": 4},
    "fedcac": {"beta": 4},
    "fesem": {"clusters": 2},
    "ifca": {"clusters": 2},
    "knnper": {"k": 3},
    "fedtgp": {"server_epochs": 5},
    "fedu": {"gamma": 0.2},
    "heurfedamp": {"lam": 0.5, "alpha": 0.2},
    "lgfedavg": {"layers": 1},
    "perfedavg": {"alpha": 0.05, "variant": "hf"},
    "pfedgraph": {"lam": 0.5},
    "pfedla": {"embedding": 8, "hidden": 8},
    "dbe": {"momentum": 0.5},
    "moon": {"mu": 2.0},
    "pfedfda": {"ridge": 0.1},
}
"""Where a method's defaults would leave its own term next to nothing, or take long."""
DISTIL = ("fedmd", "simpfd", "topkpfd", "ktpfl", "feddf", "pfeddf")
"""They want public data."""
SECOND_TRIAL = 100
"""A training step of `crosskapc-deep` in its second trial."""
OWN_STEPS = ("pfedme", "apfl", "perfedavg", "flayer")
"""They take plain steps only."""
PLAIN = {"optimizer": {"momentum": 0.0, "weight_decay": 0.0}}
SINGLE = (
    "crosskapc",
    "crosskapc-full",
    "crosskapc-deep",
    "dbe",
    "fedgen",
    "fedpac",
    "pfedfda",
    "pfedhn",
    "pfedla",
    "selfkapc",
)
"""They keep networks, means or squared norms in 32 bits whatever the run's precision."""
RESUMED = (
    *("fedora", "ktpfl", "kapc-kept", "kapc-selected", "fedavg-mixed", "fedhkd"),
    *("ditto", "apfl", "scaffold", "pfedhn", "fedala", "cfl", "crosskapc-full"),
)
"""They are interrupted in round 2 or 3, and taken up again."""
MIXED = [
    {"name": "mlp", "count": 2, "init_args": {"hidden": [27]}},
    {"class_path": "cases.Small", "count": 2},
]
ADAPTED = ("fedsalora", "ffalora")
"""They want adapters."""
ADAPTERS = {"model": {"name": "mlp", "init_args": {"hidden": [8]}, "adapters": {"rank": 2}}}
MLP = {"name": "mlp", "init_args": {"hidden": [8]}}
FULL = {"federation": {"participation": 1.0}}
BADLY = {
    "data": {"source": "arrays", "root": "bad.npz", "fraction": 1.0},
    "model": {"class_path": "cases.Touchy", "init_args": {"at": 8}},
}


@dataclass(frozen=True)
class Run:
    """One run: what it changes of SETTINGS, and how it is carried out."""

    settings: dict[str, Any]
    ranks: int = 1
    interrupted: int = 0
    """Ctrl-C in this training step, then --resume. 0: run in one go."""
    equals: str = ""
    """The run whose every bit it must give; nothing of it is kept."""
    without: tuple[str, ...] = ()
    """Beginnings of what is not compared with `equals`."""
    near: str = ""
    """The run that it must give within `TOLERANCE`."""
    bits_only: bool = False
    """Its numbers depend on the machine: they are compared on the same one alone."""
    single: bool = False
    """Parts of it are computed in 32 bits: on another machine it is compared within
    `golden.SINGLE`."""


def methods():
    """The settings that each shipped method runs with."""
    found = {}
    for name in catalogue.table("methods"):
        found[name] = {"method": {"name": name, "init_args": ARGUMENTS.get(name, {})}}
        found[name] |= {"data": {"public": "held_back"}} if name in DISTIL else {}
        found[name] |= PLAIN if name in OWN_STEPS else {}
        found[name] |= ADAPTERS if name in ADAPTED else {}
        found[name] |= {"model": MLP} if name == "partialpooling" else {}  # of plain numbers
    return found


def runs():
    """Every golden run by name: each method of the project with a part of its clients, and more
    than that."""
    of = methods()
    exact = {
        "method": {
            "name": "kapc",
            "init_args": {"solver": "exact", "beta": 0.3, "rho_units": "spread"},
        }
    }
    tried = {
        "method": {"init_args": {"guard": 0.0}},
        "federation": {"rounds": 8, "local_epochs": 1},
    }
    code = {
        "name": "ktpfl",
        "init_args": {"samples": 24, "update": "code", "temperature": 10.0, "lam": 0.1},
    }
    adam = {
        "optimizer": {
            "name": "adam",
            "lr": 0.01,
            "momentum": 0.0,
            "weight_decay": 0.0,
            "keep_state": True,
        }
    }
    own = {"name": "module", "momentum": 0.0, "weight_decay": 0.0}
    more = {
        **{
            f"{name}-full": merged(of[name], FULL)
            for name in ("fedavg", "kapc", "fedora", "ktpfl", "fedhkd")
        },
        "kapc-exact": exact,
        "kapc-kept": merged(exact, {"optimizer": {"momentum": 0.9, "keep_state": True}}),
        "crosskapc-full": merged(of["crosskapc"], FULL, tried),
        "crosskapc-deep": merged(
            of["crosskapc"], FULL, tried, {"model": "cases.Deep", "federation": {"rounds": 11}}
        ),
        "fedprox-adam": merged(of["fedprox"], adam),
        "kapc-selected": merged(
            of["kapc"], {"callbacks": {"layerselection": {"mu": 0.5}, "quantize": {}}}
        ),
        "fedavg-adapters": merged(of["fedavg"], ADAPTERS),
        "fedavg-topk": merged(of["fedavg"], {"callbacks": {"topk": {}}}),
        "ktpfl-code": {"method": code, "data": {"public": "held_back"}},
        "fedavg-trimmed": merged(
            of["fedavg"], FULL, {"callbacks": {"trimmedmean": {"share": 0.25}}}
        ),
        "fedavg-krum": merged(
            of["fedavg"], FULL, {"callbacks": {"krum": {"attackers": 0, "keep": 2}}}
        ),
        "fedavg-clipped": merged(of["fedavg"], {"callbacks": {"normbound": {"bound": 0.5}}}),
        "fedavg-mixed": merged(of["fedavg"], {"model": MIXED}),
        "fedproto-mixed": merged(of["fedproto"], {"model": MIXED}),
        "ktpfl-mixed": merged(of["ktpfl"], {"model": MIXED}),
        "local-lit": merged(of["local"], {"model": "cases.Lit", "optimizer": own}),
        **{f"{name}-mlp": merged(of[name], {"model": MLP}) for name in ("ditto", "scaffold")},
        "kapc-mlp": merged(exact, {"model": MLP}),
        "fedavg-skip": merged(of["fedavg"], BADLY, {"federation": {"on_bad_client": "skip"}}),
        "kapc-skip": merged(
            exact,
            BADLY,
            {"federation": {"on_bad_client": "skip"}},
            {"model": {"init_args": {"at": 3, "after": True}}},
        ),
        "kapc-good": merged(
            exact,
            BADLY,
            {"federation": {"on_bad_client": "retry"}},
            {"model": {"init_args": {"at": 0}}},
        ),
    }
    found = {name: Run(settings, single=name in SINGLE) for name, settings in (of | more).items()}
    for name in ("kapc", "fedavg"):
        single = merged(more.get(f"{name}-exact", of[name]), {"fabric": {"precision": "32-true"}})
        found[f"{name}-32"] = Run(single, bits_only=True)
    # Adam divides a gradient by its own size: one that is 0 but for rounding gives a step that is
    # the machine's.
    found["fedprox-adam"] = Run(more["fedprox-adam"], bits_only=True)
    vmap = {"fabric": {"executor": "vmap"}}
    for name in ("kapc", "ditto", "scaffold"):
        found[f"{name}-vmap"] = Run(merged(more[f"{name}-mlp"], vmap), near=f"{name}-mlp")
    retried = merged(more["kapc-good"], {"model": {"init_args": {"at": 8}}})
    found["kapc-retry"] = Run(retried, equals="kapc-good", without=("failures.csv",))
    for bank in ("host", "disk"):
        found[f"kapc-{bank}"] = Run(
            merged(more["kapc-kept"], {"fabric": {"bank": bank}}), equals="kapc-kept"
        )
    found["scaffold-host"] = Run(
        merged(of["scaffold"], {"fabric": {"bank": "host"}}), equals="scaffold"
    )
    for name in RESUMED:
        found[f"{name}-resumed"] = Run(found[name].settings, interrupted=35, equals=name)
    found["crosskapc-deep-resumed"] = Run(
        found["crosskapc-deep"].settings, interrupted=SECOND_TRIAL, equals="crosskapc-deep"
    )
    for name in (
        *of,
        "crosskapc-full",
        "crosskapc-deep",
        "kapc-kept",
        "kapc-selected",
        "fedavg-mixed",
        "kapc-vmap",
        "kapc-32",
    ):
        found[f"{name}-two-ranks"] = Run(found[name].settings, ranks=2, equals=name)
    return found


def merged(*layers):
    """Nested settings, later ones over earlier ones."""
    found = {}
    for layer in layers:
        for key, value in layer.items():
            old = found.get(key)
            found[key] = (
                merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
            )
    return found
