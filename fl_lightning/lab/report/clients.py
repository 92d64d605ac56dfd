"""Tables of the page about single clients: classes of each client, scores, value of own data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pandas import DataFrame

from fl_lightning.lab.report.words import NONE
from fl_lightning.results.result import RunResult
from fl_lightning.results.runs import CommonScore, Runs

MOST_CLIENTS = 500
"""Clients shown at most in the table of clients and the picture of the split: nobody reads more."""
MOST_CELLS = 20_000
"""Greatest number of cells in the table of the split: half a megabyte of the page."""


@dataclass
class Split:
    """Training samples by client and class, and the runs that have this split of the data."""

    runs: list[int]
    """Indices of these runs."""
    counts: DataFrame
    """Number of samples, with a row for each client and a column for each class."""


def splits(runs: Runs) -> list[Split]:
    """List the different splits of the runs."""
    different: dict[str, Split] = {}
    for number, run in enumerate(runs):
        rows = run.rows("split")
        counts = DataFrame(rows[:MOST_CLIENTS]).filter(like="class_").fillna(0).astype(int)
        if counts.size:
            counts.columns = counts.columns.str.removeprefix("class_")
            counts.index = [run.client_label(int(row["client"])) for row in rows[:MOST_CLIENTS]]
            different.setdefault(repr(rows), Split([], counts)).runs.append(number)
    return list(different.values())


def split_words(split: Split, runs: Runs) -> str:
    """Caption of a split's picture: which runs have it, and how uneven it is."""
    members = [runs[number] for number in split.runs]
    rows = members[0].rows("split")
    classes = [_classes(row) for row in rows]
    sizes = [int(row["train_samples"]) for row in rows]
    names = ", ".join(run.name for run in members)
    whose = "" if len(members) == len(runs) else f"{names}: "
    note = f" (the first {MOST_CLIENTS} are shown)" if len(sizes) > MOST_CLIENTS else ""
    sample_range = f"{min(sizes)} to {max(sizes)} training samples"
    class_range = f"of {min(classes)} to {max(classes)} classes"
    distances = distance_words(members[0])
    return f"{whose}{len(sizes)} clients{note} with {sample_range} {class_range}{distances}"


MEASURES = {
    "jensen_shannon": "label mixes {:.2f} apart by Jensen-Shannon (0 to 1)",
    "hellinger": "{:.2f} by Hellinger",
    "feature_shift": "inputs {:.2f} standard deviations",
    "feature_shift_within": "classes {:.2f}",
}
"""Phrases for the mean distances between clients' data, by name in summary.json."""


def distance_words(run: RunResult) -> str:
    """Phrase on how different the data of a run's clients are: mean distances over pairs of
    clients, between label distributions and between inputs; empty if summary.json has none."""
    words = []
    for name, measure in MEASURES.items():
        mean = run.facts.get(f"heterogeneity_{name}")
        if isinstance(mean, int | float):
            words.append(measure.format(mean))
    return f"; in the mean over pairs {', '.join(words)}" if words else ""


def split_table(split: Split) -> DataFrame:
    """Table of training samples by client and class; 0 is an empty cell."""
    counts = split.counts.add_prefix("class ")
    rows = MOST_CELLS // (1 + counts.shape[1])
    return counts.astype(str).replace("0", "")[:rows].rename_axis("client")


def own_data_value(runs: Runs) -> DataFrame:
    """Table of the value of a client's own data, by layer (row) and run (column): the share of a
    client's step that is not noise.

    The share is 1 - `noise_share_LAYER` of metrics.csv, in the last round that has this column.
    Only runs whose relation measures noise, such as `selfkapc`'s, have it; the table is empty if
    there is no such run.
    """
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
    """Table with a row for each client: its score in each run, and its numbers of samples and
    classes if all runs have the same split."""
    kind = CommonScore.of(runs).kind
    scores = [run.scores(kind)[0] for run in runs]
    is_shared = [split.runs for split in splits(runs)] == [list(range(len(runs)))]
    rows_of_split = runs[0].rows("split") if is_shared else []
    split = {int(row["client"]): row for row in rows_of_split}
    clients = sorted(split.keys() | {client for run_scores in scores for client in run_scores})
    write, rows = runs[0].metric.shown, []
    for client in clients[:MOST_CLIENTS]:
        cells = {"client": " / ".join(dict.fromkeys(run.client_label(client) for run in runs))}
        if row := split.get(client):
            cells["training samples"] = f"{row['train_samples']:.0f}"
            cells["test samples"] = f"{row['test_samples']:.0f}"
            cells["classes"] = str(_classes(row))
        for run, run_scores in zip(runs, scores, strict=True):
            cells[run.name] = write(run_scores[client]) if client in run_scores else NONE
        rows.append(cells)
    names = ["training samples", "test samples", "classes"] if split else []
    columns = ["client", *names, *(run.name for run in runs)]
    return DataFrame(rows, columns=columns).set_index("client")


def _classes(row: Mapping[str, Any]) -> int:
    """Count the classes of which a client has samples."""
    return sum(value > 0 for name, value in row.items() if name.startswith("class_"))
