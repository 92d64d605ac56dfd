"""How long each silo has trained, alone and federated, and whether more training alone would have
helped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fl_lightning.configuration.config import FederationConfig
from fl_lightning.lab.study.grid import place
from fl_lightning.lab.worth.measure import ALONE
from fl_lightning.lab.worth.silos import Training
from fl_lightning.results.result import RunResult
from fl_lightning.training.schedule import Length

FIFTH = 5
"""The rounds are cut into so many parts; the last one decides."""
STILL = 0.05
"""Share of the whole fall of the training loss above which the last fifth of the rounds says that
it still falls; a loss that fell evenly would have 0.2. Ours: of the tutorial's six hospitals
Aarau is below it (0.04); there training alone is as good as a logistic regression on the silo's own
samples, and at Chur, Davos, Olten and Zug it is not."""


def training(
    out: Path,
    folder: str,
    federation: FederationConfig,
    names: Sequence[str],
    finetuning: Length | None = None,
) -> Training:
    """Read how long the silos `names` trained.

    Args:
        out: of `fl-train worth`.
        folder: of the first run of the method to take.
        federation: of all runs.
        names: of the silos, in the order of clients.
        finetuning: what the method to take trains after the rounds.
    """
    runs = [RunResult(path) for path in sorted((out / "runs" / place(ALONE)).glob("seed-*"))]
    sizes = {int(row["client"]): int(row["train_samples"]) for row in runs[0].rows("clients")}
    work, work_alone = (_forward(run) for run in (RunResult(out / folder), runs[0]))
    alone: dict[str, int] = {}
    federated: dict[str, int | None] = {}
    for client, name in enumerate(names):
        batches = math.ceil(sizes.get(client, 0) / federation.batch_size)
        steps = federation.rounds * Length.of(federation).steps_of(batches)
        alone[name] = steps
        after = finetuning.steps_of(batches) if finetuning is not None else 0
        ratio = (
            work[client] / work_alone[client]
            if work.get(client) and work_alone.get(client)
            else None
        )
        federated[name] = round(steps * ratio) + after if ratio is not None else None
    falls = [fall_at_the_end(losses) for losses in _losses(runs, len(names))]
    return Training(
        alone, federated, [name for name, fall in zip(names, falls, strict=True) if fall > STILL]
    )


def fall_at_the_end(losses: Sequence[float]) -> float:
    """The share of the whole fall of `losses` (by round) that the last fifth of the rounds brings;
    0 without a fall."""
    if len(losses) < 2:
        return 0.0
    before = losses[-1 - max(1, len(losses) // FIFTH)]
    whole = losses[0] - losses[-1]
    return (before - losses[-1]) / whole if whole > 0 else 0.0


def _forward(run: RunResult) -> Mapping[int, float]:
    """Operations of a run's forward passes in training, by client: in proportion to its steps."""
    sums: dict[int, float] = {}
    for row in run.rows("clients"):
        client = int(row["client"])
        sums[client] = sums.get(client, 0.0) + row.get("flops_forward", math.nan)
    return {client: value for client, value in sums.items() if value > 0}


def _losses(runs: Sequence[RunResult], silos: int) -> list[list[float]]:
    """Training loss of each silo by round, mean over the runs; without rounds in which it took no
    step."""
    values: list[dict[int, list[float]]] = [{} for _ in range(silos)]
    for row in (row for run in runs for row in run.rows("clients") if "train_loss" in row):
        values[int(row["client"])].setdefault(int(row["round"]), []).append(row["train_loss"])
    return [
        [float(np.mean(losses)) for _, losses in sorted(by_round.items())] for by_round in values
    ]
