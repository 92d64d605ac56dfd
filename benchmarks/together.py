"""CPU seconds of runs that train together against the same runs one after the other.

    uv run python benchmarks/together.py --pairs 3

Digits by class (Dirichlet 0.1), 10 clients, 20 rounds of 5 epochs, batches of 16, MLP 64-64-32-10,
one thread. The run folders are those that a study writes; the other side is what a study does with
`--together 1`: the loop. Both sides run in this process, after one run of each that does not count.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from measure import Row, compared, interleaved
from speed import main
from workloads import workloads

from fl_lightning.configuration.config import Component, Config, DataConfig
from fl_lightning.foundation.files import make_folder
from fl_lightning.lab.study.together import serve_together
from fl_lightning.run import fit

FEDAVG = "fedavg.FedAvg"
STACKED = (
    FEDAVG,
    "fedprox.FedProx",
    "kapc.KAPC",
    "fedper.FedPer",
    "ditto.Ditto",
    "local.Local",
    "scaffold.SCAFFOLD",
    "fedamp.FedAMP",
    "fedbabu.FedBABU",
)
"""Methods whose phases are the task loss with proximal and linear terms."""


def config_of(method: str, executor: str, seed: int) -> Config:
    """Return a run of ten clients on the digits."""
    workload = replace(
        workloads()["100-mlps-10-a-round"],
        data=DataConfig(source="digits", partition="dirichlet", alpha=0.1),
        model=Component("fl_lightning.models.mlp.MLP", {"hidden": [64, 32]}),
        clients=10,
        participation=1.0,
    )
    config = workload.config("auto", executor)
    config.seed = seed
    config.federation.rounds = 20
    config.method = Component(f"fl_lightning.methods.{method}")
    config.callbacks = {"checkpoint": Component("fl_lightning.callbacks.checkpoint.Checkpoint")}
    return config


def one_by_one(configs: Sequence[Config]) -> None:
    """Train as a study with `--together 1`."""
    with tempfile.TemporaryDirectory() as folder:
        for number, config in enumerate(configs):
            run((config, Path(folder) / str(number)))


def together(configs: Sequence[Config]) -> None:
    """Train as a study with `--together N`."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = iter([(n, (config, Path(folder) / str(n))) for n, config in enumerate(configs)])
        for _ in serve_together(run, lambda waits: next(jobs, None)):
            pass


def run(
    config: Config,
    folder: Path,
    put_together: Any = None,
) -> None:
    make_folder(folder)
    fit(config, folder, put_together=put_together)


def runs(pairs: int) -> list[Row]:
    """Ten seeds of FedAvg, and five of every method that stacks."""
    rows = []
    for methods, seeds, goal in (((FEDAVG,), 10, "<= 0.2"), (STACKED, 5, "<= 0.25")):
        name = f"{len(methods)} methods x {seeds} seeds"
        loop, stacked = (
            [config_of(m, executor, seed) for seed in range(seeds) for m in methods]
            for executor in ("loop", "vmap")
        )
        side = f"{name}, together, stacked"
        other = f"{name}, one after the other, loop"
        sides = {
            other: partial(one_by_one, loop),
            side: partial(together, stacked),
        }
        seconds = interleaved(sides, pairs)
        rows.append(compared("together", side, other, seconds, goal=goal))
    return rows


if __name__ == "__main__":
    main({"together": runs})
