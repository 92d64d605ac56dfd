"""Clients that were held out of a run: how the models that they are given fare, over labelled
samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from fl_lightning.foundation.metric import FURTHER
from fl_lightning.lab.report.figures import Figure, colours, run_labels
from fl_lightning.lab.report.tables import Table, percent
from fl_lightning.lab.report.words import NONE
from fl_lightning.results.result import RunResult


def means(run: RunResult, metric: str | None = None) -> dict[int, list[float]]:
    """Scores of its newcomers by labelled samples of each class (of a regression: in all),
    ascending.

    `metric`: another than the run's.
    """
    by_count: dict[int, list[float]] = {}
    for row in sorted(run.rows("newcomers"), key=lambda row: row["samples_per_class"]):
        if (name := metric or run.metric.name) in row:
            by_count.setdefault(int(row["samples_per_class"]), []).append(row[name])
    return by_count


def curve(runs: list[RunResult]) -> dict[str, Figure]:
    """Their mean score, with the spread over clients; nothing where nobody was held out."""
    lines: list[dict[str, Any]] = []
    ticks: list[str] = [
        str(count) for count in sorted({count for run in runs for count in means(run)})
    ]
    metric, colour = runs[0].metric, colours(runs)
    # of a regression: in all
    samples = "labelled samples" + (" of each class" if metric.rises else "")
    tick, hover = ("~%", ".2%") if metric.rises else ("~g", ".4~g")
    for number, (run, label) in enumerate(zip(runs, run_labels(runs), strict=True)):
        by_count = means(run)
        if by_count:
            spread = [round(float(np.std(scores)), 5) for scores in by_count.values()]
            lines.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": label,
                    "x": [str(count) for count in by_count],
                    "y": [round(float(np.mean(scores)), 5) for scores in by_count.values()],
                    "error_y": {"type": "data", "array": spread, "thickness": 1},
                    "line": {"color": colour[number], "width": 2},
                    "hovertemplate": f"%{{x}} {samples}: %{{y:{hover}}}",
                }
            )
    if not lines:
        return {}
    x = {"title": {"text": samples}, "type": "category", "categoryarray": ticks}
    y = {"title": {"text": f"{metric.words}, mean and spread"}, "tickformat": tick}
    return {
        "newcomers-curve": {"data": lines, "layout": {"xaxis": x, "yaxis": y, "showlegend": True}}
    }


def table(runs: list[RunResult]) -> Table:
    """The same as text, and how each run's method comes to such a model."""
    by_run = [means(run) for run in runs]
    rows = [["held out", *(", ".join(_called(run)) or NONE for run in runs)]]
    rows.append(["a newcomer gets", *(str(run.facts.get("newcomer_rule", NONE)) for run in runs)])
    shown = runs[0].metric.shown
    for count in sorted({count for scores in by_run for count in scores}):
        cells = [
            shown(float(np.mean(scores[count]))) if count in scores else NONE for scores in by_run
        ]
        rows.append(
            [f"{count} labelled samples{' a class' if runs[0].metric.rises else ''}", *cells]
        )
    return Table(["", *(run.name for run in runs)], rows)


def _called(run: RunResult) -> list[str]:
    """Its newcomers by name, or by number in the split of all."""
    return [
        run.newcomer_names.get(number, str(number))
        for number in run.facts.get("held_out_clients", [])
    ]


def further(runs: list[RunResult]) -> Table:
    """The same by further metrics; without rows where none was asked for."""
    rows = []
    for name, metric in FURTHER.items():
        by_run = [means(run, name) for run in runs]
        for count in sorted({count for scores in by_run for count in scores}):
            cells = [
                percent(float(np.mean(scores[count]))) if count in scores else NONE
                for scores in by_run
            ]
            rows.append([f"{metric.words}, {count} labelled samples a class", *cells])
    return Table(["", *(run.name for run in runs)], rows)
