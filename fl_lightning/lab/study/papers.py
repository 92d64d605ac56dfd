"""The printed numbers of papers, and our numbers that each is compared with.

The tables are CSV files in configs/papers, with the columns paper, table, dataset, setting, method,
metric, mean and std, as printed. The key `paper` of a study file names the cells that the study
repeats:

    title: name of the table
    tables: names of CSV files
    where: columns and values that choose cells, such as {dataset: MNIST}
    settings: for each setting of the paper, the flat keys of the grid that give it; also `label`,
        if it is another method of ours
    figures: for each metric of the paper, how our number is read off a run (`FIGURES`, or a mapping
        with the keys figure, kind, column, unit of `OurNumber`)
    rows: for each method of the paper, the label of ours; or a mapping of `label` and keys of
        `figures` that differ in this row; or `absent: reason`
    runs: number of runs of which the printed numbers are means (default 1)
    alone: label of training alone (default `local`)
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
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
"""Ways to read a number off a run, in words."""
UNITS = {
    "1": 1.0,
    "percent": 100.0,
    "MiB": 2.0**-20,
    "GFLOP": 1e-9,
}
"""Factor from our unit to the paper's. The default is 1, or percent if the metric's name ends with
`_percent`."""
KEYS = (
    "title",
    "tables",
    "where",
    "settings",
    "figures",
    "rows",
    "runs",
    "alone",
)
"""Keys of `paper`."""
NOT_LISTED = "the study does not list it"
"""Default reason why a row of the paper has no counterpart."""


@dataclass(frozen=True)
class OurNumber:
    """Says how to read, from one of our runs, the number to compare with a printed one."""

    label: str
    """Label of the method."""
    setting: Setting
    """Keys and values that the setting must have."""
    figure: str
    """A key of `FIGURES`."""
    kind: str | None = None
    """Kind of model (a key of `metric.MODELS`); None: the run's judge."""
    column: str | None = None
    """Column of metrics.csv, if the number is not the kind's accuracy."""
    alone: str = "local"
    """Label of training alone, for the figures `relative` and `transfer`."""
    unit: float = 1.0
    """Factor from our unit to the paper's."""

    def describe(self) -> str:
        """Label, kind of model or column, and figure, in words."""
        of = self.column or (MODELS[self.kind] if self.kind else "")
        return ", ".join(
            filter(
                None,
                [
                    self.label,
                    of,
                    FIGURES[self.figure],
                ],
            )
        )


@dataclass(frozen=True)
class Printed:
    """One printed number of a paper."""

    source: str
    """Paper and table."""
    dataset: str
    setting: str
    method: str
    metric: str
    value: float
    std: float | None
    runs: int
    """Number of runs of which it is the mean, if known, else 1."""
    decimals: int
    """Decimals with which the table prints this metric."""
    ours: OurNumber | None
    """Our number to compare it with, if there is one."""
    absent: str = ""
    """Reason why there is no number of ours."""


def cells_of(study: Study) -> list[Printed]:
    """The printed numbers that a study repeats, in the order of its settings and figures, then of
    the papers' tables.

    Raises:
        BadInput: the study has no key `paper`, or `paper` names something that neither the study
            nor the papers' tables have.
    """
    paper = study.paper
    if paper is None:
        raise BadInput("paper", None, "the study has no key `paper`: run it with fl-train study")
    _check(study, paper)
    printed = _rows_of(paper)
    for key, column in (
        ("settings", "setting"),
        ("figures", "metric"),
        ("rows", "method"),
    ):
        names = list(printed[column].unique())
        for name in paper[key]:
            near = did_you_mean(str(name), names)
            check(
                f"paper.{key}",
                name,
                name in names,
                f"no such {column} in its tables{near}: {'; '.join(names)}",
            )
    # the most decimals of the column, since a paper may omit trailing zeros in some numbers
    decimals = printed["mean"].str.partition(".")[2].str.len()
    finest = decimals.groupby([printed.paper, printed.table, printed.metric]).transform("max")
    repeated = printed.setting.isin(paper["settings"]) & printed.metric.isin(paper["figures"])
    cells = printed.assign(decimals=finest)[repeated]
    check(
        "paper",
        paper.get("where"),
        len(cells) > 0,
        "no cell of the tables has these columns and a setting and metric of `paper`",
    )
    order = [*paper["settings"], *paper["figures"]]
    columns = ["setting", "metric"]
    cells = cells.sort_values(
        columns,
        key=lambda names: names.map(order.index),
        kind="stable",
    )
    return [_cell(row, paper) for row in cells.to_dict("records")]


def known_reasons() -> list[dict[str, str]]:
    """The known reasons why our numbers differ from printed ones (configs/papers/reasons.csv). An
    empty field in a row means that the reason holds for all values of this column."""
    return _table("reasons").to_dict("records")


def reason_for(cell: Printed) -> tuple[str, str]:
    """The known reason why our number differs from this printed one, and the page that explains it;
    two empty texts if no reason is known."""
    for row in known_reasons():
        columns = ("source", "dataset", "method", "metric")
        if all(row[column] in ("", getattr(cell, column)) for column in columns):
            return row["reason"], row["written"]
    return "", ""


def _check(study: Study, paper: Mapping[str, Any]) -> None:
    """Raise `BadInput` if the key `paper` is malformed or does not fit the study; reads no tables
    of papers."""
    for key in paper:
        check(
            f"paper.{key}",
            paper[key],
            key in KEYS,
            f"no such key; keys: {', '.join(KEYS)}",
        )
    for key in ("settings", "figures", "rows"):
        is_mapping = isinstance(paper.get(key), dict)
        check(
            f"paper.{key}",
            paper.get(key),
            is_mapping,
            "it must be a mapping",
        )
    where, runs = paper.get("where", {}), paper.get("runs", 1)
    check(
        "paper.where",
        where,
        isinstance(where, dict),
        "it must be a mapping of columns and values",
    )
    is_count = type(runs) is int and runs >= 1
    check(
        "paper.runs",
        runs,
        is_count,
        "it must be a whole number, at least 1",
    )
    _check_label("paper.alone", paper.get("alone"), study)
    for name, content in paper["figures"].items():
        _check_figure(
            f"paper.figures.{name}",
            _spec(content, "figure"),
            list(FIGURES),
        )
    for name, content in paper["rows"].items():
        key, spec = f"paper.rows.{name}", _spec(content, "label")
        _check_figure(key, spec, [None, *FIGURES], ("label", "absent"))
        if "absent" not in spec:
            check(
                key,
                content,
                isinstance(spec.get("label"), str),
                "it must name a method of ours by its label, or say `absent`",
            )
            _check_label(key, spec["label"], study)
    for name, setting in paper["settings"].items():
        key = f"paper.settings.{name}"
        check(
            key,
            setting,
            isinstance(setting, dict),
            "it must be a mapping of keys and values of the grid",
        )
        point = {word: value for word, value in setting.items() if word != "label"}
        number = sum(point.items() <= other.items() for other in study.settings())
        check(
            key,
            setting,
            number == 1,
            f"{number} settings of the grid have these keys and values; name those of exactly one",
        )
        _check_label(key, setting.get("label"), study)


def _check_figure(
    key: str,
    spec: dict[str, Any],
    figures: list[Any],
    more: tuple[str, ...] = (),
) -> None:
    """Raise `BadInput` unless `spec` says how a number is read off a run.

    Args:
        key: name of `spec` in error messages.
        spec: an entry of `figures` or `rows`.
        figures: values that its key `figure` may have.
        more: keys that it may have beside those of a figure.
    """
    keys = ("figure", "kind", "column", "unit", *more)
    check(key, spec, set(spec) <= set(keys), f"it has an unknown key; keys: {', '.join(keys)}")
    figure, kind, column = map(spec.get, ("figure", "kind", "column"))
    unit = str(spec.get("unit", "1"))
    is_text = isinstance(column, str | None)
    check(
        f"{key}.column",
        column,
        is_text,
        "it must be a column of metrics.csv",
    )
    check(key, unit, unit in UNITS, f"no such unit; units: {', '.join(UNITS)}")
    check(
        key,
        figure,
        figure in figures,
        f"no such way to read a number; `figure` is one of: {', '.join(FIGURES)}",
    )
    check(
        key,
        kind,
        kind in (None, *MODELS),
        f"no such kind of model; kinds: {', '.join(MODELS)}",
    )


def _check_label(
    key: str,
    label: Any,
    study: Study,
) -> None:
    """Raise `BadInput` unless `label` is None or the label of a method of the study."""
    labels = [label for entry in study.entries() for label in (entry.judges or [entry.label])]
    is_label = label is None or label in labels
    check(
        key,
        label,
        is_label,
        f"no method has this label{did_you_mean(str(label), labels)}; methods: {', '.join(labels)}",
    )


def _spec(content: Any, key: str) -> dict[str, Any]:
    """`content` if it is a mapping, else `{key: content}`."""
    return dict(content) if isinstance(content, dict) else {key: content}


def _cell(
    row: Mapping[str, Any],
    paper: Mapping[str, Any],
) -> Printed:
    """The printed number in a row of the tables."""
    counterpart = _spec(paper["rows"].get(row["method"], {"absent": NOT_LISTED}), "label")
    ours = None
    if "absent" not in counterpart:
        setting = dict(paper["settings"][row["setting"]])
        spec = _spec(paper["figures"][row["metric"]], "figure") | counterpart
        spec["label"] = setting.pop("label", spec["label"])
        unit = spec.pop("unit", "percent" if row["metric"].endswith("_percent") else "1")
        alone = paper.get("alone", "local")
        ours = OurNumber(
            setting=setting,
            alone=alone,
            unit=UNITS[str(unit)],
            **spec,
        )
    return Printed(
        source=f"{row['paper']}, {row['table']}",
        dataset=row["dataset"],
        setting=row["setting"],
        method=row["method"],
        metric=row["metric"],
        value=float(row["mean"]),
        std=float(row["std"]) if row["std"] else None,
        runs=paper.get("runs", 1),
        decimals=row["decimals"],
        ours=ours,
        absent=str(counterpart.get("absent", "")),
    )


def _rows_of(paper: Mapping[str, Any]) -> DataFrame:
    """The rows of the tables that `where` chooses, without duplicates of numbers that are in two
    tables."""
    names = paper.get("tables") or []
    are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    check(
        "paper.tables",
        names,
        bool(names) and are_names,
        "it must be a list of names",
    )
    rows = concat(map(_table, names), ignore_index=True)
    for column, value in paper.get("where", {}).items():
        rows = rows[rows[column] == value] if column in rows else rows[:0]
    return rows.drop_duplicates(["dataset", "setting", "method", "metric"])


@cache
def _table(name: str) -> DataFrame:
    """The CSV file `name` as a DataFrame of texts."""
    folder = resources.files("fl_lightning.configs").joinpath("papers")
    names = sorted(file.name.removesuffix(".csv") for file in folder.iterdir())
    check(
        "paper.tables",
        name,
        name in names,
        f"no such table{did_you_mean(name, names)}; tables: {', '.join(names)}",
    )
    text = folder.joinpath(f"{name}.csv").read_text(encoding="utf-8")
    return read_csv(io.StringIO(text), dtype=str, keep_default_na=False)
