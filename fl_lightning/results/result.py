"""One run folder as tables: `RunResult`, which `fl_lightning.Run` is. A file that cannot be read
becomes a note."""

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
    final_kind,
    final_words,
    mean_of_bests,
)
from fl_lightning.results.ledger import Ledger, read_ledger, unread
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
"""What accuracy may be drawn over; all but the rounds add up from round to round."""
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
"""Of each table: the report's section that notes what cannot be read, and columns that every row
must have."""
_OF_THE_END = ("final", "newcomers")
"""Tables of the whole run, which are judged by its metric."""
_LASTING = (
    "judge",
    "version",
    "made_up_data",
    "clients",
    "held_out_clients",
    "newcomer_rule",
    "heterogeneity_",
)
"""How those keys of summary.json begin that hold for a run however long it is."""


def _table(name: str, doc: str) -> cached_property[DataFrame]:
    """A table of a run as a DataFrame, read when it is asked for."""

    def read(run: RunResult) -> DataFrame:
        require("study", "run", str(run.folder))
        from pandas import DataFrame

        return DataFrame(run.rows(name))

    read.__doc__ = doc
    return cached_property(read)


class RunResult:
    """A run folder, finished or not, as tables. Each is read once: make another object to see later
    rounds.

    Args:
        folder: the run's, such as ``runs/kapc_digits-001``.
        name: by which tables and pictures name the run; None: the folder's.

    Raises:
        BadInput: it holds no run.
    """

    def __init__(
        self,
        folder: str | Path,
        name: str | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.files = RunFolder(self.folder)
        """Relations, traffic and tables, as the run wrote them."""
        self.config = _config(self.folder)
        """The resolved configuration, as `config.yaml` holds it."""
        self.name = name or self.folder.resolve().name
        self.notes: dict[str, list[str]] = defaultdict(list)
        """What cannot be read, by the section of the report that says so (`TABLES` names each
        table's: metrics.csv has `accuracy`)."""
        self._rows: dict[str, list[Row]] = {}
        summary = self._read("runs", "summary.json", self.files.read_summary) or {}
        rounds = self.rounds_asked or 0
        self.finished = summary.get("rounds") == rounds and self.rounds_done >= rounds
        """Whether the run has ended and was not extended since."""
        self.summary = Summary.of(summary if self.finished else {})
        """The content of `summary.json`; empty unless the run is finished."""
        lasting = {key: value for key, value in summary.items() if key.startswith(_LASTING)}
        self.facts: Mapping[str, Any] = self.summary or lasting
        """`summary` of a finished run; of one that was extended since, what its old summary.json
        says whatever the length of the run (`_LASTING`)."""
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
        """The whole rows of `metrics`, `clients`, `final`, `newcomers` or `split`; missing values
        are absent. A table that cannot be read is noted."""
        if table not in self._rows:
            section, needed = TABLES[table]
            rows: list[Row] | None = None
            if table not in _OF_THE_END or self.finished:
                rows = self._read(section, f"{table}.csv", lambda: self.files.read(table))
            if table in _OF_THE_END:
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
        """`final_predictions.parquet`: a row for each test sample, by the clients' final models;
        empty unless `evaluation.predictions` has asked for it."""
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
        """Each client's name by its number; empty where clients have numbers alone. Without those
        that were held out: they have numbers of their own (`newcomer_names`)."""
        return _names(self.rows("split"))

    @property
    def newcomer_names(self) -> dict[int, str]:
        """The names of held-out clients by their numbers in the split of all."""
        return _names(self.rows("newcomers"))

    def called(self, client: int) -> str:
        """A client's name, or its number."""
        return self.client_names.get(client, str(client))

    @cached_property
    def columns(self) -> dict[str, Column]:
        """The declaration of each column of the tables, by the version that trained the run (older
        ones: by this)."""
        declared = self.files.read_columns()
        rows = (row for table in TABLES for row in self.rows(table))
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: declared.get(name) or COLUMNS[name] for name in names}

    def setting(self, key: str) -> Any:
        """The value of a dotted key of config.yaml; None if it has none."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    @property
    def method(self) -> str | None:
        """The method as config.yaml names it."""
        method: Any = self.config.get("method")
        if isinstance(method, dict):
            return method.get("name") or method.get("class_path")
        return method

    @property
    def rounds_done(self) -> int:
        """The last round with a row in metrics.csv; 0 if there is none."""
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
        """What it is judged by (`evaluation.metric`)."""
        judged = of_rows(self.rows("metrics"))
        return BY_TASK[self.task] if judged is ACCURACY else judged

    @cached_property
    def judge(self) -> str | None:
        """The kind of model that `mean_accuracy` is of; None if it cannot be told."""
        return self.files.judge(self.metric, self.facts)

    def has(self, *columns: str) -> bool:
        """Whether metrics.csv has a value in one of these columns."""
        return any(column in row for row in self.rows("metrics") for column in columns)

    def column(self, name: str) -> list[float]:
        """A column of metrics.csv; nan where a round has no value."""
        return [row.get(name, math.nan) for row in self.rows("metrics")]

    def judged(self, column: str) -> list[Row]:
        """The rounds that have a value in `column`."""
        return [row for row in self.rows("metrics") if column in row]

    def best(self, column: str) -> tuple[float, int]:
        """The best value of a column of metrics.csv, and its first round; (nan, 0) if it has
        none."""
        return best(self.rows("metrics"), column)

    def mean_of_bests(self, column: str) -> tuple[float, int]:
        """Mean over clients of each one's best value of a column of clients.csv, and of how many
        clients it is."""
        return mean_of_bests(self._judged_clients, column)

    def total(self, *names: str) -> float | None:
        """Sum of columns over the rounds; None unless every round has them all."""
        rows = self.rows("metrics")
        if not rows or any(name not in row for row in rows for name in names):
            return None
        return sum(row[name] for row in rows for name in names)

    def axis(self, name: str) -> list[float] | None:
        """One of `AXES` at the end of each round; None if a round lacks it."""
        if name == "round":
            return self.column("round")
        if self.total(*_SUMMED[name]) is None:
            return None
        unit = MIB if name == "mib" else 1
        spent = (_spent(row, name) for row in self.rows("metrics"))
        return [total / unit for total in itertools.accumulate(spent)]

    def spent(self, name: str) -> float | None:
        """One of `AXES` at the end of the run; None if a round lacks it."""
        values = self.axis(name)
        return values[-1] if values else None

    def scores(
        self,
        kind: str | None,
        metric: str | None = None,
    ) -> tuple[dict[int, float], str]:
        """Scores of models of this kind by client, and whose: of the final models, or else of the
        last judged round.

        `kind` None: the judge's; with it alone final models may be of another kind, where clients
        never took part. `metric`: another than the run's; clients of which it is not defined are
        left out.
        """
        kind, column = kind or self.judge, metric or self.metric.name
        rows = self.rows("final")
        if rows and kind in (None, final_kind(self.facts)):
            whose = f"end: {final_words(self.facts)}"
        else:
            column = f"{column}_{kind}"
            judged = [row for row in self._judged_clients if column in row]
            last = max((row["round"] for row in judged), default=0)
            rows = [row for row in judged if row["round"] == last]
            whose = f"round {int(last)}: {MODELS.get(str(kind), 'kind of model unknown')}"
        return {int(row["client"]): row[column] for row in rows if column in row}, whose

    @property
    def _judged_clients(self) -> list[Row]:
        """The rows of clients.csv up to the last round of metrics.csv."""
        return [row for row in self.rows("clients") if row["round"] <= self.rounds_done]

    @property
    def final_accuracies(self) -> np.ndarray:
        """Score of each client's final model by the run's metric, (N,): accuracy, mean absolute
        error (regression), or what `evaluation.metric` chooses; NaN of one that could not be
        scored; none before the end."""
        name = self.metric.name
        scores: dict[int, float] = {}
        for row in self.rows("final"):
            scores[int(row["client"])] = row.get(name, math.nan)
        count = max(self._count(), 1 + max(scores)) if scores else 0
        return np.array([scores.get(client, math.nan) for client in range(count)])

    def by_client(self, column: str) -> np.ndarray:
        """A column of `clients.csv` as (rounds, N): nan where a client took no part, or has no
        value.

        Raises:
            BadInput: there is no such column.
        """
        requirement = f"columns of clients.csv: {', '.join(self.clients)}"
        check("column", column, column in self.clients, requirement)
        table = self.clients.pivot(index="round", columns="client", values=column)
        rounds, clients = range(1, self.rounds_done + 1), range(self._count())
        return table.reindex(index=rounds, columns=clients).to_numpy(float)

    @property
    def relation_rounds(self) -> list[int]:
        """The rounds whose relation is kept."""
        return self.files.relation_rounds()

    def relation(self, round: int | None = None) -> RelationView:
        """Who received whom in `round` (None: the last), as it was kept: rows of the round's cohort
        alone.

        Raises:
            BadInput: nothing is kept of that round.
        """
        rounds = self.relation_rounds
        if round is None and rounds:
            round = rounds[-1]
        if round is None or round not in rounds:
            stored = f"kept: {rounds[0]} to {rounds[-1]}" if rounds else "nothing is kept"
            raise BadInput("round", round, f"there is no relation of it; {stored}")
        return self.files.read_relation(round)

    def cube(self, round: int | None = None) -> np.ndarray:
        """The relation cube of `round` (None: the last), float32 (N, layers, N): receiver, layer,
        source.

        Rows of clients that were not in the cohort are nan; who was no source has weight 0.
        `relation` has the layers' names.

        Raises:
            BadInput: nothing is kept of that round.
        """
        return _dense(self.relation(round), self._count())

    def _count(self) -> int:
        """How many clients took part: those that were held out have numbers of their own."""
        asked_clients = self.setting("federation.clients")
        in_summary = self.summary.get("clients", asked_clients)
        return len(self.rows("split")) or int(in_summary or 0)

    @cached_property
    def ledger(self) -> Ledger | None:
        """What travelled, of the rounds whose file can be read; None if there is none."""
        ledger, damaged = read_ledger(self.files)
        self.notes["ledger"] += unread(damaged)
        return ledger

    def _read(
        self,
        section: str,
        file: str,
        read: Callable[[], T],
    ) -> T | None:
        """The result of `read`, or a note that `file` cannot be read; an absent file is not
        noted."""
        try:
            return read()
        except FileNotFoundError:
            return None
        except UNREADABLE:
            self.notes[section].append(f"{file} cannot be read")
            return None


def _names(rows: list[Row]) -> dict[int, str]:
    names = {}
    for row in rows:
        if "name" in row:
            names[int(row["client"])] = str(row["name"])
    return names


def _dense(view: RelationView, n: int) -> np.ndarray:
    layers = len(view.layers)
    cube = np.full((n, layers, n), math.nan, dtype=np.float32)
    cube[view.receivers] = 0
    cube[np.ix_(view.receivers, range(layers), view.sources)] = view.rows
    return cube


def _config(folder: Path) -> dict[str, Any]:
    name, file, requirement = str(folder), folder / "config.yaml", "it must be a run folder;"
    check("run", name, folder.is_dir(), f"{requirement} there is no such folder")
    check("run", name, file.is_file(), f"{requirement} config.yaml is missing")
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a tenth of the time
        config = yaml.load(file.read_text(encoding="utf-8"), loader)
    except (OSError, ValueError, yaml.YAMLError):
        config = None
    check("run", name, isinstance(config, dict), f"{requirement} its config.yaml cannot be read")
    drop_removed_keys(config)
    return config


def _spent(row: Row, name: str) -> float:
    """What a round adds to one of `AXES`, in bytes or seconds; `wall` without the scoring, which is
    no method's work.

    FedAvg as a study's forced row is fine-tuned in each judged round, for its score alone.
    """
    spent = sum(row[column] for column in _SUMMED[name])
    return max(0.0, spent - row.get("seconds_evaluation", 0.0)) if name == "wall" else spent


def worst_tenth(scores: np.ndarray, metric: Metric = ACCURACY) -> float:
    """Mean over the worst tenth of the clients, at least one."""
    worst_first = np.array(sorted(scores, key=metric.merit))
    return float(worst_first[: max(1, len(scores) // 10)].mean())


def one_class(run: RunResult) -> str:
    """Names, in words, the clients whose final model predicts one class; empty without any."""
    final = run.rows("final")
    shares: dict[str, float] = {}
    for row in final:
        if ONE_CLASS in row:
            shares[run.called(int(row["client"]))] = row[ONE_CLASS]
    if not shares:
        return ""
    return one_class_warning(shares, len(final), run.setting("evaluation.metrics") or ())
