"""The golden runs: each method for two rounds on digits in float64 on one thread, and the numbers that come of it."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from fl_lightning import catalogue
from fl_lightning.cli.resolve import complete, plan
from fl_lightning.parallel import ClientParallelStrategy
from fl_lightning.run import assemble, instantiate

FOLDER = Path(__file__).parent
TOLERANCE = 1e-9
"""Relative. Another order of float64 sums changes some 1e-14 here, a factor of 1 + 1e-6 in a formula 1e-7 and more."""
SETTINGS: dict[str, Any] = {
    "model": "golden.Small",
    "federation": {"rounds": 2, "clients": 4, "local_epochs": 2, "batch_size": 32},
    "data": {"source": "digits", "fraction": 0.3, "alpha": 0.5, "validation": 0.1},
    "optimizer": {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.001},
    "evaluation": {"models": ["before", "after", "finetuned"]},
    "fabric": {"precision": "64-true", "accelerator": "cpu", "threads": 1},
    "callbacks": None,
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "fedprox": {"mu": 0.5},
    "fedamp": {"lam": 0.5, "alpha": 0.2},
    "fedhkd": {"lam": 0.5, "gamma": 0.5, "nu": 0.0},
    "fedora": {"selection": "always"},
    "fedmd": {"samples": 24, "batch_size": 8},
    "simpfd": {"samples": 24, "batch_size": 8},
    "topkpfd": {"samples": 24, "batch_size": 8, "k": 2},
    "ktpfl": {"samples": 24, "batch_size": 8, "step": 0.5},
}
"""Where a method's defaults would leave its own term next to nothing."""
DISTIL = ("fedmd", "simpfd", "topkpfd", "ktpfl")
"""They want public data."""
VARIANTS: dict[str, dict[str, Any]] = {
    "kapc-exact": {"method": {"name": "kapc", "init_args": {"solver": "exact", "beta": 0.3, "rho_units": "spread"}}},
    "kapc-selected": {"method": "kapc", "callbacks": {"layerselection": {}}, "federation.participation": 0.75},
    "ktpfl-code": {
        "method": {"name": "ktpfl", "init_args": {"samples": 24, "update": "code", "temperature": 10.0, "lam": 0.1}},
        "data.public": "held_back",
    },
    "fedavg-trimmed": {"method": "fedavg", "callbacks": {"trimmedmean": {"share": 0.25}}},
    "fedavg-krum": {"method": "fedavg", "callbacks": {"krum": {"attackers": 0, "keep": 2}}},
    "fedavg-clipped": {"method": "fedavg", "callbacks": {"normbound": {"bound": 0.5}}},
}
"""More than a method's own way, by name."""


class Small(nn.Module):
    """A convolution, a BatchNorm and a classifier: every kind of tensor."""

    head = "out"

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, stride=2)
        self.norm = nn.BatchNorm2d(3)
        self.out = nn.Linear(27, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.conv(x)).relu().flatten(1))


def runs() -> dict[str, dict[str, Any]]:
    """The settings of every golden run, by name: one for each method of the project, and the variants."""
    methods = {m: {"method": {"name": m, "init_args": ARGUMENTS.get(m, {})}} for m in catalogue.table("methods")}
    methods |= {m: settings | {"data.public": "held_back"} for m, settings in methods.items() if m in DISTIL}
    return methods | VARIANTS


def numbers(settings: dict[str, Any]) -> dict[str, Any]:
    """Run it, and give what `METHOD.json` holds: metrics, and of each row its norm and a weighted sum."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        layers = [SETTINGS, {k: v for k, v in settings.items() if "." not in k}]
        layers += [{k.split(".")[0]: {k.split(".")[1]: v}} for k, v in settings.items() if "." in k]
        config = complete(plan(layers))
        callbacks = [instantiate(f"callbacks.{name}", c) for name, c in config.callbacks.items()]
        fabric = Fabric(accelerator="cpu", devices=1, precision="64-true", strategy=ClientParallelStrategy())
        fabric.launch()
        with tempfile.TemporaryDirectory() as folder:
            fed = assemble(fabric, config, Path(folder), callbacks)
            fed.call("on_fit_start")
            fed.count_costs()
            records = [fed.round(t) for t in (1, 2)]
    finally:
        torch.set_num_threads(threads)
    rows = {"shared": fed.at_work.server.shared}
    rows |= {f"client {c}": state.row for c, state in sorted(fed.states.items())}
    rows |= {f"server {name}": field.flatten() for name, field in fed.server.fields.items()}
    rows |= {f"client {c} received": state.received for c, state in sorted(fed.states.items())}
    return {
        "rounds": [
            {k: v for k, v in record.metrics.items() if not k.startswith(("seconds", "memory"))} for record in records
        ],
        "weights": {name: _facts(row) for name, row in rows.items()},
    }


def _facts(row: Tensor) -> dict[str, float]:
    """The norm, and the sum with weights that no two numbers share."""
    row = row.double()
    places = torch.arange(1, len(row) + 1, dtype=torch.float64)
    return {"norm": float(row.norm()), "sum": float(row @ places.cos())}


def path(name: str) -> Path:
    """Where a run's numbers are kept."""
    return FOLDER / f"{name}.json"


def kept(name: str) -> dict[str, Any]:
    """What is kept of a run; empty if it is new."""
    found: dict[str, Any] = json.loads(path(name).read_text()) if path(name).exists() else {}
    return found


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """A line for each number that is not what it was, within `TOLERANCE`."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from differences(old.get(key), new.get(key), f"{where}/{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for k, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{where}/{k}")
    elif isinstance(old, int | float) and isinstance(new, int | float):
        if not math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=1e-12):
            yield f"{where}: {old!r} -> {new!r} (relative change {abs(new - old) / max(abs(old), 1e-300):.1e})"
    elif old != new:
        yield f"{where}: {old!r} -> {new!r}"
