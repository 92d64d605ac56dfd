"""`RunResult`, which users know as `fl_lightning.Run`: reads one run folder as tables. A file that
cannot be read becomes a note."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import yaml

from fl_lightning.configuration.config import check
from fl_lightning.configuration.files import drop_removed_keys
from fl_lightning.foundation.csvtable import Row
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.extras import hint_if_missing, require
from fl_lightning.foundation.metric import (
    ACCURACY,
    BY_TASK,
    MODELS,
    ONE_CLASS,
    Metric,
    Task,
    of_rows,
    one_class_warning,
)
from fl_lightning.results.columns import COLUMNS, Column
from fl_lightning.results.folder import (
    PREDICTIONS,
    UNREADABLE,
    RunFolder,
    best,
    final_words,
    mean_of_bests,
    usual_final_kind,
)
from fl_lightning.results.ledger import Ledger, read_ledger, unread_note
from fl_lightning.results.record import RelationView
from fl_lightning.results.summary import Summary

if TYPE_CHECKING:
    from pandas import DataFrame

T = TypeVar("T")

MIB = 2**20
AXES = {
    "round": "round",
    "mib": "MiB sent",
    "channel": "modelled channel seconds",
    "wall": "seconds without scoring",
}
"""Quantities over which accuracy can be drawn; all but `round` add up from round to round."""
_SUMMED = {
    "mib": ["upload_bytes", "download_bytes"],
    "channel": ["channel_s"],
    "wall": ["seconds"],
}
TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "metrics": ("accuracy", ("round",)),
    "clients": ("fairness", ("round", "client")),
    "final": ("fairness", ("client",)),
    "newcomers": ("newcomers", ("samples_per_class",)),
    "split": ("split", ("client", "train_samples", "test_samples")),
}
"""For each table, the section of the report that notes an unreadable file, and the columns that
every row must have."""
_FINAL_TABLES = ("final", "newcomers")
"""Tables that describe the end of the run, with its metric."""
_LENGTH_INDEPENDENT = (
    "judge",
    "version",
    "made_up_data",
    "clients",
    "held_out_clients",
    "newcomer_rule",
    "heterogeneity_",
)
"""Beginnings of keys in summary.json that stay true when a run is extended."""


def _table(name: str, doc: str) -> cached_property[DataFrame]:
    """Return a property that reads a table as a DataFrame; `doc`: its docstring."""

    def read(run: RunResult) -> DataFrame:
        require("study", "run", str(run.folder))
        from pandas import DataFrame

        return DataFrame(run.rows(name))

    read.__doc__ = doc
    return cached_property(read)


class RunResult:
    """Reader of a run folder, finished or not. Each table is read once: make another object to see
    later rounds.

    Args:
        folder: the run folder, such as ``runs/kapc_digits-001``.
        name: name of the run in tables and pictures; None: the folder's name.

    Raises:
        BadInput: the folder holds no run.
    """

    def __init__(
        self,
        folder: str | Path,
        name: str | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.files = RunFolder(self.folder)
        """Reader of the folder's files: relations, traffic and tables."""
        self.config = _config(self.folder)
        """The resolved configuration, from `config.yaml`."""
        self.name = name or self.folder.resolve().name
        self.notes: dict[str, list[str]] = defaultdict(list)
        """Notes on files that cannot be read, by the report's section that prints them
        (`TABLES`)."""
        self._rows: dict[str, list[Row]] = {}
        summary = self._read("runs", "summary.json", self.files.read_summary) or {}
        rounds = self.rounds_asked or 0
        self.finished = summary.get("rounds") == rounds and self.rounds_done >= rounds
        """Whether the run has ended, and was not extended since."""
        self.summary = Summary.of(summary if self.finished else {})
        """Content of `summary.json`; empty unless the run is finished."""
        facts = {
            key: value for key, value in summary.items() if key.startswith(_LENGTH_INDEPENDENT)
        }
        self.facts: Mapping[str, Any] = self.summary or facts
        """`summary` of a finished run; else those keys of an old summary.json that do not depend on
        the number of rounds."""
        if (self.folder / "failure.txt").is_file():
            self.notes["runs"].append("a client failed: failure.txt in the run folder says how")

    def __repr__(self) -> str:
        done, reached = self.rounds_done, ""
        if self.finished:
            scores = self.final_accuracies
            mean = float(np.nanmean(scores)) if len(scores) else math.nan
            reached = f", {self.metric.mean_words} {self.metric.shown(mean)} at the end"
        rounds = f"{done} of {self.rounds_asked or done} rounds"
        return f"<Run {self.folder}: {self.method}, {rounds}{reached}>"

    def rows(self, table: str) -> list[Row]:
        """Return the rows of `metrics`, `clients`, `final`, `newcomers` or `split`; an empty cell
        has no key.

        Rows that a crash cut short are left out; a table that cannot be read is noted.
        """
        if table not in self._rows:
            section, needed = TABLES[table]
            rows: list[Row] | None = None
            if table not in _FINAL_TABLES or self.finished:
                rows = self._read(section, f"{table}.csv", lambda: self.files.read(table))
            if table in _FINAL_TABLES:
                needed += (BY_TASK[self.task].name,)
            self._rows[table] = [
                row
                for row in rows or []
                if all(math.isfinite(row.get(name, math.nan)) for name in needed)
            ]
        return self._rows[table]

    rounds = _table(
        "metrics", "`metrics.csv`: a row for each round; NaN where a round has no value."
    )
    clients = _table("clients", "`clients.csv`: a row for each client of each round.")
    final = _table(
        "final", "`final.csv`: a row for each client's final model; empty before the run has ended."
    )
    newcomers = _table(
        "newcomers",
        "`newcomers.csv`: held-out clients by labelled samples; empty without any, or before the "
        "run has ended.",
    )
    split = _table("split", "`split.csv`: samples of each client, and of each class.")

    @cached_property
    def predictions(self) -> DataFrame:
        """`final_predictions.parquet`: a row for each test sample, by the final model of its
        client; empty unless `evaluation.predictions` was set."""
        from pandas import DataFrame, read_parquet

        file = self.folder / PREDICTIONS
        if not file.is_file():
            return DataFrame()
        check("run", str(file), not hint_if_missing("pyarrow"), hint_if_missing("pyarrow"))
        try:
            return read_parquet(file)
        except UNREADABLE:
            self.notes["probabilities"].append(f"its {PREDICTIONS} is damaged")
            return DataFrame()

    @cached_property
    def client_names(self) -> dict[int, str]:
        """Names of the clients by number, without held-out ones (`newcomer_names`); empty if
        clients have only numbers."""
        return _names(self.rows("split"))

    @property
    def newcomer_names(self) -> dict[int, str]:
        """Names of the held-out clients, by their numbers among all clients."""
        return _names(self.rows("newcomers"))

    def client_label(self, client: int) -> str:
        """Return a client's name, or its number if it has none."""
        return self.client_names.get(client, str(client))

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Declarations of the tables' columns, by the version that trained the run; for older runs,
        which stored none, by this version."""
        declared = self.files.read_columns()
        rows = (row for table in TABLES for row in self.rows(table))
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: declared.get(name) or COLUMNS[name] for name in names}

    def setting(self, key: str) -> Any:
        """Return the value of a dotted key of config.yaml; None without it."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    @property
    def method(self) -> str | None:
        """Name of the method in config.yaml."""
        method: Any = self.config.get("method")
        if isinstance(method, dict):
            return method.get("name") or method.get("class_path")
        return method

    @property
    def rounds_done(self) -> int:
        """Last round with a row in metrics.csv; 0 without any."""
        rounds = (row["round"] for row in self.rows("metrics"))
        return int(max(rounds, default=0))

    @property
    def rounds_asked(self) -> int | None:
        """`federation.rounds`."""
        rounds = self.setting("federation.rounds")
        return rounds if isinstance(rounds, int) else None

    @property
    def task(self) -> Task:
        """`data.task`."""
        return "regression" if self.setting("data.task") == "regression" else "classification"

    @property
    def metric(self) -> Metric:
        """Metric that judges the run (`evaluation.metric`)."""
        judged = of_rows(self.rows("metrics"))
        return BY_TASK[self.task] if judged is ACCURACY else judged

    @cached_property
    def judge(self) -> str | None:
        """The run's judge: the kind of model that `mean_accuracy` scores; None if it is not
        known."""
        return self.files.judge(self.metric, self.facts)

    def has(self, *columns: str) -> bool:
        """Return whether metrics.csv has a value in one of these columns."""
        return any(column in row for row in self.rows("metrics") for column in columns)

    def column(self, name: str) -> list[float]:
        """Return a column of metrics.csv; nan in rounds without a value."""
        return [row.get(name, math.nan) for row in self.rows("metrics")]

    def rows_with(self, column: str) -> list[Row]:
        """Return the rows of metrics.csv that have a value in `column`."""
        return [row for row in self.rows("metrics") if column in row]

    def best(self, column: str) -> tuple[float, int]:
        """Return the best value of a column of metrics.csv, and its first round; (nan, 0) without
        values."""
        return best(self.rows("metrics"), column)

    def mean_of_bests(self, column: str) -> tuple[float, int]:
        """Return the mean over clients of each one's best value in a column of clients.csv, and the
        number of these clients."""
        return mean_of_bests(self._finished_client_rows, column)

    def total(self, *names: str) -> float | None:
        """Return the sum of columns of metrics.csv over all rounds; None unless every round has all
        of them."""
        rows = self.rows("metrics")
        if not rows or any(name not in row for row in rows for name in names):
            return None
        return sum(row[name] for row in rows for name in names)

    def axis(self, name: str) -> list[float] | None:
        """Return a quantity of `AXES` at the end of each round; None if it was not measured in
        every round.

        `name`: `round`; `mib`, MiB sent so far; `channel`, modelled seconds of sending so far;
        `wall`, measured seconds so far, without scoring.
        """
        if name == "round":
            return self.column("round")
        if self.total(*_SUMMED[name]) is None:
            return None
        unit = MIB if name == "mib" else 1
        spent = (_spent(row, name) for row in self.rows("metrics"))
        return [total / unit for total in itertools.accumulate(spent)]

    def spent(self, name: str) -> float | None:
        """Return the quantity `name` of `AXES` at the end of the run; None if it was not measured
        in every round."""
        values = self.axis(name)
        return values[-1] if values else None

    def scores(
        self,
        kind: str | None,
        metric: str | None = None,
    ) -> tuple[dict[int, float], str]:
        """Return each client's score, and a text that says which models were scored.

        The final models are scored if they are of the given kind. Otherwise the scores come from
        the last round in which models of this kind were scored.

        Args:
            kind: kind of the models, such as `after`; None: the judge. Final models of clients that
                never took part count even if they are of another kind.
            metric: name of a metric; None: the run's. Clients for which it is not defined are left
                out.
        """
        kind, column = kind or self.judge, metric or self.metric.name
        rows = self.rows("final")
        if rows and kind in (None, usual_final_kind(self.facts)):
            scored_models = f"end: {final_words(self.facts)}"
        else:
            column = f"{column}_{kind}"
            judged = [row for row in self._finished_client_rows if column in row]
            last = max((row["round"] for row in judged), default=0)
            rows = [row for row in judged if row["round"] == last]
            scored_models = f"round {int(last)}: {MODELS.get(str(kind), 'kind of model unknown')}"
        return {int(row["client"]): row[column] for row in rows if column in row}, scored_models

    @property
    def _finished_client_rows(self) -> list[Row]:
        """The rows of clients.csv up to the last round of metrics.csv."""
        return [row for row in self.rows("clients") if row["round"] <= self.rounds_done]

    @property
    def final_accuracies(self) -> np.ndarray:
        """Score of each client's final model by the run's metric, (N,): accuracy, mean absolute
        error (regression), or that of `evaluation.metric`. NaN for a model that could not be
        scored; empty before the end."""
        name = self.metric.name
        rows = self.rows("final")
        scores = {int(row["client"]): row.get(name, math.nan) for row in rows}
        count = max(self._count(), 1 + max(scores)) if scores else 0
        return np.array([scores.get(client, math.nan) for client in range(count)])

    def by_client(self, column: str) -> np.ndarray:
        """Return a column of `clients.csv` as (rounds, N); nan where a client took no part, or has
        no value.

        Raises:
            BadInput: there is no such column.
        """
        requirement = f"choose a column of clients.csv: {', '.join(self.clients)}"
        check("column", column, column in self.clients, requirement)
        table = self.clients.pivot(index="round", columns="client", values=column)
        rounds, clients = range(1, self.rounds_done + 1), range(self._count())
        return table.reindex(index=rounds, columns=clients).to_numpy(float)

    @property
    def relation_rounds(self) -> list[int]:
        """Rounds whose relation is stored."""
        return self.files.relation_rounds()

    def relation(self, round: int | None = None) -> RelationView:
        """Return the relation of `round` (None: the last), with rows of its cohort only.

        Raises:
            BadInput: no relation of that round is stored.
        """
        rounds = self.relation_rounds
        if round is None and rounds:
            round = rounds[-1]
        if round is None or round not in rounds:
            stored = f"stored: {rounds[0]} to {rounds[-1]}" if rounds else "none is stored"
            raise BadInput("round", round, f"it has no stored relation: choose another; {stored}")
        return self.files.read_relation(round)

    def cube(self, round: int | None = None) -> np.ndarray:
        """Return the relation cube of `round` (None: the last), float32 (N, layers, N): receiver,
        layer, source.

        Rows of clients outside the cohort are nan; a client that was no source has weight 0. The
        names of the layers are in `relation`.

        Raises:
            BadInput: no relation of that round is stored.
        """
        return _dense(self.relation(round), self._count())

    def _count(self) -> int:
        """Return the number of clients that took part, without held-out ones."""
        asked_clients = self.setting("federation.clients")
        in_summary = self.summary.get("clients", asked_clients)
        return len(self.rows("split")) or int(in_summary or 0)

    @cached_property
    def ledger(self) -> Ledger | None:
        """Layers and bytes sent in all rounds whose traffic can be read; None without any."""
        ledger, damaged = read_ledger(self.files)
        self.notes["ledger"] += unread_note(damaged)
        return ledger

    def _read(
        self,
        section: str,
        file: str,
        read: Callable[[], T],
    ) -> T | None:
        """Call `read`; return None if the file is absent, or cannot be read, which is noted."""
        try:
            return read()
        except FileNotFoundError:
            return None
        except UNREADABLE:
            self.notes[section].append(f"{file} cannot be read")
            return None


def _names(rows: list[Row]) -> dict[int, str]:
    return {int(row["client"]): str(row["name"]) for row in rows if "name" in row}


def _dense(view: RelationView, n: int) -> np.ndarray:
    layers = len(view.layers)
    cube = np.full((n, layers, n), math.nan, dtype=np.float32)
    cube[view.receivers] = 0
    cube[np.ix_(view.receivers, range(layers), view.sources)] = view.rows
    return cube


def _config(folder: Path) -> dict[str, Any]:
    name, file, requirement = str(folder), folder / "config.yaml", "it must be a run folder"
    check("run", name, folder.is_dir(), f"{requirement}, but does not exist")
    check("run", name, file.is_file(), f"{requirement}, but has no config.yaml")
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a tenth of the time
        config = yaml.load(file.read_text(encoding="utf-8"), loader)
    except (OSError, ValueError, yaml.YAMLError):
        config = None
    check("run", name, isinstance(config, dict), "its config.yaml cannot be read: restore it")
    drop_removed_keys(config)
    return config


def _spent(row: Row, name: str) -> float:
    """Return a round's contribution to one of `AXES`, in bytes or seconds.

    `wall` leaves the scoring out, which is no work of the method: in a study, FedAvg is fine-tuned
    in each scored round only for its baseline's score.
    """
    spent = sum(row[column] for column in _SUMMED[name])
    return max(0.0, spent - row.get("seconds_evaluation", 0.0)) if name == "wall" else spent


def worst_tenth(scores: np.ndarray, metric: Metric = ACCURACY) -> float:
    """Return the mean score of the worst tenth of the clients: floor(n / 10) of n, but at least
    one."""
    worst_first = np.array(sorted(scores, key=metric.merit))
    return float(worst_first[: max(1, len(scores) // 10)].mean())


def one_class_note(run: RunResult) -> str:
    """Return a text that names the clients whose final model predicts only one class; empty without
    any."""
    final = run.rows("final")
    one_class_rows = [row for row in final if ONE_CLASS in row]
    shares = {run.client_label(int(row["client"])): row[ONE_CLASS] for row in one_class_rows}
    if not shares:
        return ""
    return one_class_warning(shares, len(final), run.setting("evaluation.metrics") or ())
