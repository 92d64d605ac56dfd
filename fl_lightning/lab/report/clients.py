"""What the page says of single clients: who holds which classes, and a row for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pandas import DataFrame

from fl_lightning.lab.report.words import NONE
from fl_lightning.results.result import RunResult
from fl_lightning.results.runs import Comparison, Runs

MOST_CLIENTS = 500
"""Rows of the table of clients, and columns of the picture of the split: more make a page that
nobody reads."""
MOST_CELLS = 20_000
"""Of the table of the split: half a megabyte of the page."""


@dataclass
class Split:
    """Training samples by class and client, as one or several runs deal them."""

    runs: list[int]
    """Numbers of these runs."""
    classes: list[str]
    clients: list[str]
    counts: list[list[int]]


def splits(runs: Runs) -> list[Split]:
    """Each different split once."""
    different: dict[str, Split] = {}
    for number, run in enumerate(runs):
        rows = run.rows("split")
        columns = dict.fromkeys(name for row in rows for name in row if name.startswith("class_"))
        if columns:
            shown = rows[:MOST_CLIENTS]
            classes = [name.removeprefix("class_") for name in columns]
            names = [run.called(int(row["client"])) for row in shown]
            counts = [[int(row.get(name, 0)) for row in shown] for name in columns]
            split = different.setdefault(
                repr(rows),
                Split(
                    [],
                    classes,
                    names,
                    counts,
                ),
            )
            split.runs.append(number)
    return list(different.values())


def split_words(split: Split, runs: Runs) -> str:
    """Whose split it is, and how uneven: for the caption of its picture."""
    members = [runs[number] for number in split.runs]
    rows = members[0].rows("split")
    classes = [_classes(row) for row in rows]
    sizes = [int(row["train_samples"]) for row in rows]
    names = ", ".join(run.name for run in members)
    whose = "" if len(members) == len(runs) else f"{names}: "
    shown = f" (the first {MOST_CLIENTS} are shown)" if len(sizes) > MOST_CLIENTS else ""
    samples = f"{min(sizes)} to {max(sizes)} training samples"
    of_classes = f"of {min(classes)} to {max(classes)} classes"
    apart = unlike_words(members[0])
    return f"{whose}{len(sizes)} clients{shown} with {samples} {of_classes}{apart}"


MEASURES = {
    "jensen_shannon": "label mixes {:.2f} apart by Jensen-Shannon (0 to 1)",
    "hellinger": "{:.2f} by Hellinger",
    "feature_shift": "inputs {:.2f} standard deviations",
    "feature_shift_within": "classes {:.2f}",
}
"""Measures of how unlike clients' data are, in words."""


def unlike_words(run: RunResult) -> str:
    """How far its clients are apart, means over pairs; empty where summary.json does not say."""
    words = []
    for name, measure in MEASURES.items():
        mean = run.facts.get(f"heterogeneity_{name}")
        if isinstance(mean, int | float):
            words.append(measure.format(mean))
    return f"; in the mean over pairs {', '.join(words)}" if words else ""


def split_table(split: Split) -> DataFrame:
    """Training samples, a row for each client and a column for each class; an empty cell stands for
    none."""
    counts = DataFrame(split.counts, columns=split.clients).T
    counts.columns = [f"class {name}" for name in split.classes]
    rows = MOST_CELLS // (1 + counts.shape[1])
    return counts.astype(str).replace("0", "")[:rows].rename_axis("client")


def own_worth(runs: Runs) -> DataFrame:
    """The worth of a client's own data by layer: 1 less `noise_share_LAYER` in the last round that
    has it, of the runs whose relation measures it. Without such a run there are no rows."""
    last = {}
    for run in runs:
        table = DataFrame(run.rows("metrics")).filter(like="noise_share_")
        if table.size:
            shares = 1 - table.ffill().iloc[-1]
            last[run.name] = shares.rename(lambda name: name.removeprefix("noise_share_"))
    return (
        DataFrame(last).map("{:.0%}".format, na_action="ignore").fillna(NONE).rename_axis("layer")
    )


def table(runs: Runs) -> DataFrame:
    """A row for each client, by its name or number: its samples, where all runs have one split, and
    its scores."""
    kind = Comparison.of(runs).kind
    scores = [run.scores(kind)[0] for run in runs]
    is_shared = [split.runs for split in splits(runs)] == [list(range(len(runs)))]
    rows_of_split = runs[0].rows("split") if is_shared else []
    split = {int(row["client"]): row for row in rows_of_split}
    clients = sorted(split.keys() | {client for of_run in scores for client in of_run})
    shown, rows = runs[0].metric.shown, []
    for client in clients[:MOST_CLIENTS]:
        sizes = []
        if row := split.get(client):
            numbers = [f"{row[name]:.0f}" for name in ("train_samples", "test_samples")]
            sizes = [*numbers, str(_classes(row))]
        name = " / ".join(dict.fromkeys(run.called(client) for run in runs))
        cells = [shown(of_run[client]) if client in of_run else NONE for of_run in scores]
        rows.append([name, *sizes, *cells])
    columns = ["training samples", "test samples", "classes"] if split else []
    names = ["client", *columns, *(run.name for run in runs)]
    return DataFrame(rows, columns=names).set_index("client")


def _classes(row: Mapping[str, Any]) -> int:
    """The number of classes of which a client has samples."""
    return sum(value > 0 for name, value in row.items() if name.startswith("class_"))
