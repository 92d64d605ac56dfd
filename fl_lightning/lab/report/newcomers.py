"""Tabulate scores of newcomers: clients that were held out of a run and then given a model, trained
with a few labelled samples or none."""

from __future__ import annotations

import numpy as np
from pandas import DataFrame

from fl_lightning.foundation.metric import FURTHER, Metric
from fl_lightning.lab.report.tables import percent, run_table
from fl_lightning.lab.report.words import NONE
from fl_lightning.results.result import RunResult
from fl_lightning.results.runs import Runs


def scores(run: RunResult, metric: Metric | None = None) -> dict[int, list[float]]:
    """Scores of a run's newcomers by number of labelled samples (of each class; for a regression in
    all), ascending. `metric`: None for the run's."""
    name = (metric or run.metric).name
    by_count: dict[int, list[float]] = {}
    for row in sorted(run.rows("newcomers"), key=lambda row: row["samples_per_class"]):
        if name in row:
            by_count.setdefault(int(row["samples_per_class"]), []).append(row[name])
    return by_count


def table(runs: Runs) -> DataFrame:
    """Table of each run's newcomers: who they are, the method's rule for their model, and mean
    scores."""
    samples = "labelled samples" + (" a class" if runs[0].metric.rises else "")
    rows = {
        "held out": [", ".join(_names(run)) or NONE for run in runs],
        "a newcomer gets": [str(run.facts.get("newcomer_rule", NONE)) for run in runs],
    }
    return run_table(runs, rows | _means(runs, samples))


def further_metrics(runs: Runs) -> DataFrame:
    """Table of newcomers' mean scores in `FURTHER` metrics; empty if none was configured."""
    rows: dict[str, list[str]] = {}
    for metric in FURTHER.values():
        means = _means(runs, "labelled samples a class", metric)
        rows |= {f"{metric.words}, {samples}": cells for samples, cells in means.items()}
    return run_table(runs, rows)


def _means(
    runs: Runs,
    samples: str,
    metric: Metric | None = None,
) -> dict[str, list[str]]:
    """Rows of mean scores over newcomers, one for each number of labelled samples."""
    by_run = [scores(run, metric) for run in runs]
    words = runs[0].metric.shown if metric is None else percent
    rows = {}
    for count in sorted({count for by_count in by_run for count in by_count}):
        values = [by_count.get(count) for by_count in by_run]
        rows[f"{count} {samples}"] = [words(float(np.mean(v))) if v else NONE for v in values]
    return rows


def _names(run: RunResult) -> list[str]:
    """Names of a run's newcomers; without a name, the number among all clients."""
    numbers = run.facts.get("held_out_clients", [])
    return [run.newcomer_names.get(number, str(number)) for number in numbers]
