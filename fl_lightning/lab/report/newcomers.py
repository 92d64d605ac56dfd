"""Clients that were held out of a run: how the models that they are given fare, over labelled
samples."""

from __future__ import annotations

import numpy as np
from pandas import DataFrame

from fl_lightning.foundation.metric import FURTHER, Metric
from fl_lightning.lab.report.tables import percent
from fl_lightning.lab.report.words import NONE
from fl_lightning.results.result import RunResult


def scores(run: RunResult, metric: Metric | None = None) -> dict[int, list[float]]:
    """Scores of its newcomers by labelled samples of each class (of a regression: in all),
    ascending. `metric`: another than the run's."""
    name = (metric or run.metric).name
    by_count: dict[int, list[float]] = {}
    for row in sorted(run.rows("newcomers"), key=lambda row: row["samples_per_class"]):
        if name in row:
            by_count.setdefault(int(row["samples_per_class"]), []).append(row[name])
    return by_count


def table(runs: list[RunResult]) -> DataFrame:
    """How each run's method comes to such a model, and mean scores."""
    rows = {
        "held out": [", ".join(_names(run)) or NONE for run in runs],
        "a newcomer gets": [str(run.facts.get("newcomer_rule", NONE)) for run in runs],
    }
    samples = "labelled samples" + (" a class" if runs[0].metric.rises else "")
    rows |= {f"{count} {samples}": cells for count, cells in _means(runs).items()}
    return DataFrame.from_dict(rows, orient="index", columns=[run.name for run in runs])


def further(runs: list[RunResult]) -> DataFrame:
    """Mean scores by further metrics; without rows where none was asked for."""
    rows = {
        f"{metric.words}, {count} labelled samples a class": cells
        for metric in FURTHER.values()
        for count, cells in _means(runs, metric).items()
    }
    return DataFrame.from_dict(rows, orient="index", columns=[run.name for run in runs])


def _means(runs: list[RunResult], metric: Metric | None = None) -> dict[int, list[str]]:
    """By labelled samples, of each run the mean over newcomers in words."""
    by_run = [scores(run, metric) for run in runs]
    words = runs[0].metric.shown if metric is None else percent
    counts = sorted({count for of_run in by_run for count in of_run})
    return {
        count: [words(float(np.mean(s[count]))) if count in s else NONE for s in by_run]
        for count in counts
    }


def _names(run: RunResult) -> list[str]:
    """Its newcomers by name, or by number in the split of all."""
    numbers = run.facts.get("held_out_clients", [])
    return [run.newcomer_names.get(number, str(number)) for number in numbers]
