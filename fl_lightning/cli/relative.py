"""What federating has brought each client: its accuracy beside that of training alone, as long and from the same start.

R-Acc and PTR are FEDORA's (Wu et al., KDD 2023).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fl_lightning import provenance
from fl_lightning.cli.folder import locked, write_config
from fl_lightning.cli.resolve import to_yaml
from fl_lightning.config import Component, Config, check
from fl_lightning.files import make_folder, write_whole, writing
from fl_lightning.metric import BY_TASK
from fl_lightning.results.folder import RunFolder, final_words

REFERENCES = "references"
"""Beside the runs: local references by what they were trained with, so that all runs of a setting share one."""


def reference(config: Config) -> Config:
    """`config` with every client alone: the same first model, data, split, batches and number of local epochs."""
    return replace(
        config,
        method=Component("fl_lightning.methods.local.Local"),
        evaluation=replace(config.evaluation, every=config.federation.rounds, judge="auto", models=None),
        callbacks={"checkpoint": Component("fl_lightning.callbacks.checkpoint.Checkpoint", {"every": 10})},
        loggers={},
    )


def compare(config: Config, folder: Path) -> dict[str, Any]:
    """Compare the finished run in `folder` with its local reference, which is trained unless it has been before.

    While another process trains the same reference, it is waited for.

    Returns:
        `judge` and `local_judge` (which kinds of model are compared, in words), `relative_accuracy` (mean over clients
        of (accuracy - local) / local), `positive_transfer_ratio` (share of clients at least as accurate as alone), the
        two mean accuracies, and where the reference lies. Clients whose local accuracy is 0 are left out of the mean
        and counted in `without_reference`; those that could not be scored, here or alone, are left out of everything
        and counted in `without_score`. A figure without clients is null. For regression `mae` stands for
        `accuracy`, and `relative_mae` is the mean of (local - mae) / local: positive is better, too.

    Raises:
        BadInput: the run is not finished, or its files are damaged.
    """
    run = RunFolder(folder)
    check("run", str(folder), (folder / "summary.json").exists(), "it is not finished")
    whole = run.read_summary().get("rounds") == config.federation.rounds
    check("run", str(folder), whole, "it has been asked for more rounds than it has run: finish it first")
    alone = reference(config)
    where = folder.resolve().parent / REFERENCES / _identity(alone)
    if not (where / "summary.json").exists():
        from fl_lightning.run import fit

        with writing(where):
            make_folder(where)
        with locked(where, wait=True):
            if not (where / "summary.json").exists():  # another process may have trained it meanwhile
                write_config(where, alone)
                fit(alone, where, resume=True)
    known, there = provenance.data_of(folder), provenance.data_of(where)
    again = f"with the run's data in place, remove {where} and try again"
    allowed = f"its clients had other samples than those of its reference: {again}"
    check("run", str(folder), None in (known, there) or known == there, allowed)
    metric = BY_TASK[config.data.task]
    # Each client's score, (N,); nan for one that could not be scored.
    ours, alones = ([row.get(metric.name, math.nan) for row in one.read("final")] for one in (run, RunFolder(where)))
    check("run", str(folder), len(ours) == len(alones), "its final.csv is damaged")
    every = list(zip(ours, alones, strict=True))
    pairs = [pair for pair in every if all(map(math.isfinite, pair))]
    gains = [metric.gain(mine, local) for mine, local in pairs if local > 0]
    figures: dict[str, Any] = {
        "judge": final_words(run.read_summary()),
        "local_judge": final_words(RunFolder(where).read_summary()),
        metric.of("relative"): _mean(gains),
        "positive_transfer_ratio": _mean([metric.merit(mine) >= metric.merit(local) for mine, local in pairs]),
        metric.of("mean"): _mean([mine for mine, _ in pairs]),
        metric.of("local_mean"): _mean([local for _, local in pairs]),
        "clients": len(pairs),
        "without_score": len(every) - len(pairs),
        "without_reference": len(pairs) - len(gains),
        "reference": str(where.relative_to(folder.resolve().parent)),
    }
    write_whole(folder / "relative.json", json.dumps(figures, indent=2, allow_nan=False) + "\n")
    return figures


def _mean(values: Sequence[float]) -> float | None:
    """The mean; None where there is nothing to take it of."""
    return sum(values) / len(values) if values else None


def _identity(config: Config) -> str:
    """A name for all that decides the numbers of a reference: not where it runs."""
    plain = replace(config, fabric=replace(config.fabric, devices=1, num_nodes=1))
    return hashlib.blake2b(to_yaml(plain).encode(), digest_size=8).hexdigest()
