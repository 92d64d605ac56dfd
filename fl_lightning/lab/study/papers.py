"""What a paper prints, as cells that a study's numbers are put beside.

The tables are facts that ship as CSV files (configs/papers): paper, table, dataset, setting,
method, metric, mean, std, as printed. The key `paper` of a study says which of their cells it
repeats, and which of its own numbers each is:

    title: what the table is                      where: {dataset: MNIST}, the columns that choose its cells
    tables: names of CSV files                    settings: the paper's words for a setting: flat keys of the grid,
                                                      and `label` where it is another method of ours
    runs: how many runs its means are over        figures: by metric, how our number is read off a run (`Ours`)
    rows: by method, the label of ours, or a mapping of `label` and what its figure has for itself,
        or `absent: why`
"""  # noqa: E501

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from pandas import DataFrame, concat, read_csv

from fl_lightning.configuration.catalogue import did_you_mean
from fl_lightning.configuration.config import check
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.metric import MODELS
from fl_lightning.lab.study.grid import Setting, Study

FIGURES = {
    "best": "best round's mean over clients",
    "bests": "mean of each client's best round",
    "last": "last round",
    "final": "all clients at the end",
    "validation": "round best on validation data",
    "relative": "gain on training alone as a share of it, rounds best on validation data",
    "transfer": "share of clients at least as good as alone, rounds best on validation data",
    "mean": "mean over rounds",
}
"""How one number is read off a run, in words."""
UNITS = {
    "1": 1.0,
    "percent": 100.0,
    "MiB": 2.0**-20,
    "GFLOP": 1e-9,
}
"""What our number is multiplied with, by the paper's unit; percent where a metric's name ends
so."""
KEYS = ("title", "tables", "where", "settings", "figures", "rows", "runs", "alone")
HERE = "the study does not list it"
"""Why a row of the paper has no counterpart, where no other reason is given."""


@dataclass(frozen=True)
class Ours:
    """Which of our numbers a cell is compared with."""

    label: str
    setting: Setting
    figure: str
    kind: str | None = None
    """Of model; None: the run's judge."""
    column: str | None = None
    """Of metrics.csv, where the figure is not of a kind's accuracy."""
    alone: str = "local"
    """The label of training alone, for `relative` and `transfer`."""
    unit: float = 1.0
    """What our number is multiplied with to be in the paper's unit."""

    def words(self) -> str:
        """What it is, for readers."""
        of = self.column or (MODELS[self.kind] if self.kind else "")
        return ", ".join(filter(None, [self.label, of, FIGURES[self.figure]]))


@dataclass(frozen=True)
class Printed:
    """One number of a paper."""

    source: str
    """Paper and table."""
    dataset: str
    setting: str
    method: str
    metric: str
    value: float
    std: float | None
    runs: int
    """That it is the mean of, as far as is known; else 1."""
    decimals: int
    """As printed: of this metric in this table."""
    ours: Ours | None
    absent: str = ""
    """Why we have no such number."""


def cells_of(study: Study) -> list[Printed]:
    """The cells that a study repeats, in the order of its settings and figures, then of the papers'
    tables.

    Raises:
        BadInput: the key `paper` is missing or cannot work.
    """
    paper = study.paper
    if paper is None:
        raise BadInput(
            "paper",
            None,
            "the study says of no paper's numbers that they are its own: see fl-train study",
        )
    for key in paper:
        check(f"paper.{key}", paper[key], key in KEYS, f"keys: {', '.join(KEYS)}")
    for key in ("settings", "figures", "rows"):
        check(
            f"paper.{key}", paper.get(key), isinstance(paper.get(key), dict), "it must be a mapping"
        )
    where, runs = paper.get("where", {}), paper.get("runs", 1)
    check(
        "paper.where",
        where,
        isinstance(where, dict),
        "it must be a mapping of columns and what they hold",
    )
    check(
        "paper.runs", runs, type(runs) is int and runs >= 1, "it must be a whole number, at least 1"
    )
    _check_label("paper.alone", paper.get("alone"), study)
    _check_rows(study, paper)
    for words, keys in paper["settings"].items():
        number = (
            sum(_within(keys, setting) for setting in study.settings())
            if isinstance(keys, dict)
            else 0
        )
        allowed = "it must be keys and values that one setting of the grid has"
        check(
            f"paper.settings.{words}",
            keys,
            number == 1,
            allowed if number == 0 else f"{allowed}, not {number}",
        )
        _check_label(
            f"paper.settings.{words}",
            keys.get("label"),
            study,
        )
    printed = _rows_of(paper)
    for key, column in (("settings", "setting"), ("figures", "metric"), ("rows", "method")):
        names = list(printed[column].unique())
        for name in paper[key]:
            near = did_you_mean(str(name), names)
            allowed = f"no such {column} in its tables{near}: {'; '.join(names)}"
            check(f"paper.{key}", name, name in names, allowed)
    # a 0, or a last 0, may have been left out of one number: the finest of the column tells
    decimals = printed["mean"].str.partition(".")[2].str.len()
    finest = decimals.groupby([printed.paper, printed.table, printed.metric]).transform("max")
    repeated = printed.setting.isin(paper["settings"]) & printed.metric.isin(paper["figures"])
    chosen = printed.assign(decimals=finest)[repeated]
    allowed = "no cell of its tables has such a setting and metric together"
    check("paper", paper.get("where"), len(chosen) > 0, allowed)
    order = [*paper["settings"], *paper["figures"]]
    chosen = chosen.sort_values(
        ["setting", "metric"],
        key=lambda names: names.map(order.index),
        kind="stable",
    )
    return [_cell(row, paper) for row in chosen.to_dict("records")]


def reasons() -> list[dict[str, str]]:
    """Why our number is another than a paper's, where that was found; an empty column holds for
    all."""
    return _table("reasons").to_dict("records")


def reason(cell: Printed) -> tuple[str, str]:
    """What was found of a cell that differs, and where that is written; empty where nothing was."""
    for row in reasons():
        if all(
            row[name] in ("", getattr(cell, name))
            for name in ("source", "dataset", "method", "metric")
        ):
            return row["reason"], row["written"]
    return "", ""


def _check_rows(study: Study, paper: Mapping[str, Any]) -> None:
    for kind, stands_for, more in (
        ("figures", "figure", ()),
        ("rows", "label", ("label", "absent")),
    ):
        for name, row in paper[kind].items():
            key, spec = f"paper.{kind}.{name}", _spec(row, stands_for)
            keys = ("figure", "kind", "column", "unit", *more)
            check(key, row, set(spec) <= set(keys), f"keys: {', '.join(keys)}")
            figure, model, label, column = (
                spec.get(name) for name in ("figure", "kind", "label", "column")
            )
            check(
                f"{key}.column",
                column,
                isinstance(column, str | None),
                "it must be a column of metrics.csv",
            )
            unit = str(spec.get("unit", "1"))
            check(key, unit, unit in UNITS, f"units: {', '.join(UNITS)}")
            is_figure = figure in FIGURES or (figure is None and kind == "rows")
            check(key, figure, is_figure, f"figures: {', '.join(FIGURES)}")
            check(key, model, model in (None, *MODELS), f"kinds of model: {', '.join(MODELS)}")
            if kind == "rows" and "absent" not in spec:
                check(
                    key,
                    row,
                    isinstance(label, str),
                    "it must name a method of ours by its label, or say `absent`",
                )
                _check_label(key, label, study)


def _check_label(key: str, label: Any, study: Study) -> None:
    labels = [label for entry in study.entries() for label in (entry.judges or [entry.label])]
    allowed = (
        f"no method is called so{did_you_mean(str(label), labels)}; methods: {', '.join(labels)}"
    )
    check(key, label, label is None or label in labels, allowed)


def _spec(given: Any, name: str) -> dict[str, Any]:
    """A mapping, or what stands for `{name: given}`."""
    return dict(given) if isinstance(given, dict) else {name: given}


def _within(keys: Mapping[str, Any], setting: Setting) -> bool:
    return all(
        key in setting and setting[key] == value for key, value in keys.items() if key != "label"
    )


def _cell(row: Mapping[str, Any], paper: Mapping[str, Any]) -> Printed:
    counterpart = _spec(
        paper["rows"].get(row["method"], {"absent": HERE}),
        "label",
    )
    cell = Printed(
        f"{row['paper']}, {row['table']}",
        row["dataset"],
        row["setting"],
        row["method"],
        row["metric"],
        float(row["mean"]),
        float(row["std"]) if row["std"] else None,
        int(paper.get("runs", 1)),
        row["decimals"],
        None,
        str(counterpart.get("absent", "")),
    )
    if "absent" in counterpart:
        return cell
    where = dict(paper["settings"][row["setting"]])
    spec = _spec(paper["figures"][row["metric"]], "figure") | counterpart
    spec["label"] = where.pop("label", spec["label"])
    unit = str(
        spec.pop(
            "unit",
            "percent" if row["metric"].endswith("_percent") else "1",
        )
    )
    ours = Ours(
        setting=where,
        alone=paper.get("alone", "local"),
        unit=UNITS[unit],
        **spec,
    )
    return replace(cell, ours=ours)


def _rows_of(paper: Mapping[str, Any]) -> DataFrame:
    """The rows of its tables that `where` chooses; a number that two tables share comes once."""
    names = paper.get("tables")
    listed = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    check("paper.tables", names, bool(listed), "it must be a list of names")
    rows = concat(map(_table, names or []), ignore_index=True)
    for column, value in paper.get("where", {}).items():
        rows = rows[rows[column] == value] if column in rows else rows[:0]
    return rows.drop_duplicates(["dataset", "setting", "method", "metric"])


@cache
def _table(name: str) -> DataFrame:
    folder = resources.files("fl_lightning.configs").joinpath("papers")
    file = folder.joinpath(f"{name}.csv")
    if not file.is_file():
        names = sorted(other.name.removesuffix(".csv") for other in folder.iterdir())
        allowed = f"no such table{did_you_mean(name, names)}; tables: {', '.join(names)}"
        raise BadInput("paper.tables", name, allowed)
    text = file.read_text(encoding="utf-8")
    return read_csv(
        io.StringIO(text),
        dtype=str,
        keep_default_na=False,
    )
