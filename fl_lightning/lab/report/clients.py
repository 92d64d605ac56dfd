"""What the page says of single clients: who holds which classes, and a row for each."""

from __future__ import annotations

from typing import Any

import numpy as np

from fl_lightning.lab.report.tables import Table
from fl_lightning.lab.report.words import NONE
from fl_lightning.results.folder import UNREADABLE
from fl_lightning.results.result import RunResult
from fl_lightning.results.runs import Comparison

MOST_CLIENTS = 500
"""Rows of the table of clients, and columns of the picture of the split: more make a page that
nobody reads."""
MOST_CELLS = 20_000
"""Of the table of the split: half a megabyte of the page."""


def splits(runs: list[RunResult]) -> list[dict[str, Any]]:
    """Each different split once: the numbers of its `runs`, its `classes` and `clients`, training
    samples by these (`counts`), and the most of one client and class."""
    different: dict[bytes, dict[str, Any]] = {}
    for number, run in enumerate(runs):
        classes = list(
            dict.fromkeys(
                name for row in run.rows("split") for name in row if name.startswith("class_")
            )
        )
        if not classes:
            continue
        counts = [
            [int(row.get(name, 0)) for row in run.rows("split")[:MOST_CLIENTS]] for name in classes
        ]
        bare = [name.removeprefix("class_") for name in classes]
        numbers = [int(row["client"]) for row in run.rows("split")[:MOST_CLIENTS]]
        made = {
            "runs": [],
            "classes": [*range(len(bare))] if bare == [str(k) for k in range(len(bare))] else bare,
            "clients": [run.client_names.get(number, number) for number in numbers],
            "counts": counts,
            "most": max(map(max, counts)),
        }
        different.setdefault(repr(run.rows("split")).encode(), made)["runs"].append(number)
    return list(different.values())


def split_words(split: dict[str, Any], runs: list[RunResult]) -> str:
    """Whose split it is, and how uneven: for the caption of its picture."""
    classes = [
        sum(value > 0 for name, value in row.items() if name.startswith("class_"))
        for row in _rows(split, runs)
    ]
    sizes = [int(row["train_samples"]) for row in _rows(split, runs)]
    whose = (
        ""
        if len(split["runs"]) == len(runs)
        else ", ".join(runs[number].name for number in split["runs"]) + ": "
    )
    shown = f" (the first {MOST_CLIENTS} are shown)" if len(sizes) > MOST_CLIENTS else ""
    return (
        f"{whose}{len(sizes)} clients{shown} with {min(sizes)} to {max(sizes)} training samples "
        f"of {min(classes)} to {max(classes)} classes{unlike_words(runs[split['runs'][0]])}"
    )


MEASURES = {
    "jensen_shannon": "label mixes {:.2f} apart by Jensen-Shannon (0 to 1)",
    "hellinger": "{:.2f} by Hellinger",
    "feature_shift": "inputs {:.2f} standard deviations",
    "feature_shift_within": "classes {:.2f}",
}
"""Measures of heterogeneity.npz, in words."""


def unlike_words(run: RunResult) -> str:
    """How far its clients are apart, means over pairs; empty where it is not known."""
    means = _over_pairs(run)
    words = [template.format(means[name]) for name, template in MEASURES.items() if name in means]
    return "; in the mean over pairs " + ", ".join(words) if words else ""


def _over_pairs(run: RunResult) -> dict[str, float]:
    """The means in summary.json, or (as the run has not ended) of heterogeneity.npz; pairs that
    have none left out."""
    means = {name: run.facts.get(f"heterogeneity_{name}") for name in MEASURES}
    if known := {name: value for name, value in means.items() if isinstance(value, int | float)}:
        return known
    try:
        with np.load(run.folder / "heterogeneity.npz") as file:
            tables = {name: file[name].astype(np.float64) for name in MEASURES if name in file}
        pairs = {name: table[np.triu(np.isfinite(table), k=1)] for name, table in tables.items()}
    except UNREADABLE:
        return {}
    return {name: float(values.mean()) for name, values in pairs.items() if len(values)}


def split_table(split: dict[str, Any]) -> Table:
    """Training samples by client and class; an empty cell stands for none."""
    rows = zip(split["clients"], *split["counts"], strict=True)
    head = ["client", *(f"class {number}" for number in split["classes"])]
    cells = [[str(client), *(str(count or "") for count in counts)] for client, *counts in rows]
    return Table(head, cells[: MOST_CELLS // len(head)], of_runs=False)


def own_worth(runs: list[RunResult]) -> Table:
    """What a client's own data are worth, by layer: 1 less `noise_share_LAYER` in the last round
    that has it, of the runs whose relation measures it. Without such a run there are no rows."""
    prefix = "noise_share_"
    last: dict[str, dict[str, float]] = {}
    for run in runs:
        shares = {
            name: value
            for row in run.rows("metrics")
            for name, value in row.items()
            if name.startswith(prefix)
        }
        last |= {run.name: shares} if shares else {}
    layers = dict.fromkeys(name for shares in last.values() for name in shares)
    rows = [
        [
            name.removeprefix(prefix),
            *(f"{1 - s[name]:.0%}" if name in s else NONE for s in last.values()),
        ]
        for name in layers
    ]
    return Table(["layer", *last], rows, of_runs=False)


def table(runs: list[RunResult]) -> Table:
    """A row for each client, by its name or number: its samples, where all runs have one split, and
    its scores."""
    kind = Comparison.of(runs).kind
    scores = [run.scores(kind)[0] for run in runs]
    shared = splits(runs)
    rows = (
        _rows(shared[0], runs) if len(shared) == 1 and len(shared[0]["runs"]) == len(runs) else []
    )
    facts = {int(row["client"]): row for row in rows}
    everyone = sorted({client for of_run in scores for client in of_run} | facts.keys())[
        :MOST_CLIENTS
    ]
    head = [
        "client",
        *(["training samples", "test samples", "classes"] if facts else []),
        *(run.name for run in runs),
    ]

    def cells(client: int) -> list[str]:
        row = facts.get(client, {})
        classes = sum(value > 0 for name, value in row.items() if name.startswith("class_"))
        known = (
            [f"{row['train_samples']:.0f}", f"{row['test_samples']:.0f}", str(classes)]
            if facts
            else []
        )
        shown = runs[0].metric.shown
        called = dict.fromkeys(run.called(client) for run in runs)
        return [
            " / ".join(called),
            *known,
            *(shown(of_run[client]) if client in of_run else NONE for of_run in scores),
        ]

    return Table(head, [cells(client) for client in everyone], of_runs=False)


def _rows(split: dict[str, Any], runs: list[RunResult]) -> list[dict[str, float]]:
    return runs[split["runs"][0]].rows("split")
