"""The run folder: its tables, relation/, traffic/ and summary.json, written so that a crash does
not spoil them.

A row is one write; any other file is written aside and renamed. The row in `metrics.csv` is a
round's last write: a round with this row is complete. If the process dies, nothing that was written
is lost. If the machine dies, nothing is lost that `flush` had brought to the disk; every checkpoint
calls it first. Only rank 0 writes.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.foundation import metric as metrics
from fl_lightning.foundation.csvtable import CsvTable, Row
from fl_lightning.foundation.errors import BadInput, Damaged
from fl_lightning.foundation.files import atomic_write, flush_all, write_whole
from fl_lightning.results.columns import COLUMNS, Column, declarations
from fl_lightning.results.record import KINDS, RelationView, RoundRecord

CLIENT_FLOPS = ("flops_forward", "flops_backward", "flops_extra", "flops_penalty")
"""Columns of clients' operations. They always exist; a cell is empty if its value could not be
counted."""
CLIENT_LOSSES = ("train_loss", "coaching_loss")
"""Columns of clients' losses. They always exist; a cell is empty if the client took no step."""
_PERMANENT_COLUMNS = (*CLIENT_LOSSES, *CLIENT_FLOPS)
TABLES = (
    "metrics.csv",
    "clients.csv",
    "failures.csv",
    "final.csv",
    "newcomers.csv",
    "split.csv",
    "heterogeneity.csv",
)
"""All tables of a run; `columns.json` declares their columns."""
_TEXT_COLUMNS = ("name", "model", "rule", "stage", "reason", "outcome")
"""Columns that hold text."""
UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    RuntimeError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
)
"""Exceptions that reading a damaged table, npz or JSON file may raise."""
NEVER_TRAINED = "they never took part"
"""Reason why some final models are of another kind than the judge's."""
PREDICTIONS = "final_predictions.parquet"
_FINAL_FILES = ("summary.json", "final.csv", "newcomers.csv", PREDICTIONS)


@dataclass
class Traffic:
    """Bytes sent in one round, by client, direction, layer and kind of content.

    Direction 0 is the download, 1 the upload. The kinds (parameters, buffers, ...) are `KINDS` of
    results/record.py.
    """

    bytes: np.ndarray
    """int64 (clients, 2, L + 1, kinds); the last layer stands for everything beside the model."""
    sent: np.ndarray
    """Whether the layer was sent, bool (clients, 2, L)."""
    clients: list[int]
    layers: list[str]
    kinds: list[str]


class RunFolder:
    """Writer and reader of the folder `path` of one run; the folder is created with its first file.

    Raises `RunFailed` if the disk refuses a write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics = CsvTable(path / "metrics.csv")
        self._clients = CsvTable(path / "clients.csv")
        self._failures = CsvTable(path / "failures.csv")
        self._declared: set[str] = set()
        self.names: Sequence[str] = ()
        """Names of the clients, which tables show beside their numbers; empty without names."""

    def append(self, record: RoundRecord) -> None:
        """Write one round: relation, traffic, clients' rows, failures, and row of metrics."""
        self.write_relation(record.round, record.relation)
        self.write_traffic(record)
        self._clients.append(
            [{"round": record.round, **self._named(row)} for row in record.clients],
            _PERMANENT_COLUMNS,
        )
        if record.failures:
            self._failures.append(
                [{"round": record.round, **self._named(row)} for row in record.failures]
            )
        self._metrics.append([{"round": record.round, **record.metrics}], _PERMANENT_COLUMNS)

    def _named(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Add the client's name to its row, after the number."""
        number = int(row["client"])
        name = {"name": self.names[number]} if number < len(self.names) else {}
        return {"client": row["client"], **name, **row}

    def flush(
        self,
        after: int,
        upto: int,
    ) -> None:
        """Flush to the disk what `append` wrote of the rounds after `after`, up to and including
        `upto`."""
        paths = [self._clients.path, self._failures.path, self._metrics.path, self.path]
        rounds = range(after + 1, upto + 1)
        files = [file(t) for t in rounds for file in (self.relation_file, self.traffic_file)]
        folders = dict.fromkeys(file.parent for file in files)
        flush_all([path for path in (*files, *folders, *paths) if path.exists()])

    def truncate(self, round: int) -> None:
        """Delete everything that was written after `round` (0: everything), and rows that a crash
        cut short."""
        for table in (self._clients, self._failures, self._metrics):
            table.truncate(round)
        for folder in ("relation", "traffic"):
            for file in self.path.glob(f"{folder}/round-*.npz"):
                if int(file.stem.removeprefix("round-")) > round:
                    file.unlink()

    def delete_final_files(self) -> None:
        """Delete the files that are written when a run ends, since the run now goes on and they
        would describe a shorter one."""
        for name in _FINAL_FILES:  # summary.json first, which marks a run that has ended
            (self.path / name).unlink(missing_ok=True)

    def check_whole(self, round: int) -> None:
        """Raise `BadInput` if the tables lack a round up to `round`, or hold one twice."""
        for table in (self._metrics, self._clients):
            name = table.path.name
            rows = table.read(_TEXT_COLUMNS, numbered=True)
            kept_rows = [row for row in rows if row["round"] <= round]
            keys = [(int(row["round"]), row.get("client")) for row in kept_rows]
            is_whole = {t for t, _ in keys} == set(range(1, round + 1))
            problem = (
                f"its {name} lacks a round up to {round}, the checkpoint's, or holds one twice"
            )
            if len(keys) > len(set(keys)) or not is_whole:
                raise BadInput("run", str(self.path), f"{problem}: start another run")

    def write_columns(self, judge: str) -> None:
        """Declare the columns of all tables in `columns.json`, if there are new ones.

        `judge`: the run's judge, a kind of model such as `after`.
        """
        names = dict.fromkeys(
            name for file in TABLES for name in CsvTable(self.path / file).header()
        )
        if not self._declared.issuperset(names):
            self._declared.update(names)
            text = json.dumps(declarations(names, judge), indent=1) + "\n"
            write_whole(self.path / "columns.json", text, durable=False)

    def read(self, table: str) -> list[Row]:
        """Return the rows of a table, such as `metrics`, without a row that a crash cut short; an
        empty cell has no key.

        Returns no rows if the table does not exist.

        Raises:
            Damaged: the table cannot be read.
        """
        return CsvTable(self.path / f"{table}.csv").read(
            _TEXT_COLUMNS, numbered=table in ("metrics", "clients")
        )

    def read_columns(self) -> dict[str, Column]:
        """Return the declarations in `columns.json`; empty before the end of the first round."""
        try:
            declared = json.loads((self.path / "columns.json").read_text(encoding="utf-8"))
            return {name: Column(name, **fields) for name, fields in declared.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def judge(
        self,
        metric: metrics.Metric,
        summary: Mapping[str, Any],
    ) -> str | None:
        """Return the run's judge: the kind of model that `mean_accuracy` scores; None if it is not
        known.

        `columns.json` declares it for the column of the mean score.

        Args:
            metric: the metric that judges the run; its mean is the column.
            summary: content of `summary.json`, used if `columns.json` does not tell.
        """
        column = self.read_columns().get(metric.of("mean"))
        kinds = [column.model if column else None, summary.get("judge")]
        return next((kind for kind in kinds if kind in [*metrics.MODELS]), None)

    def relation_file(self, round: int) -> Path:
        """Return the path of the relation of `round`."""
        return self.path / "relation" / f"round-{round:04d}.npz"

    def write_relation(
        self,
        round: int,
        view: RelationView,
    ) -> None:
        """Write the fields of `view`, the cohort's part of the relation cube, as arrays of these
        names to an npz file: `rows` (float32), `receivers`, `layers` and `sources`."""
        save_arrays(
            self.relation_file(round),
            rows=np.asarray(view.rows, dtype=np.float32),
            receivers=np.asarray(view.receivers, dtype=np.int64),
            layers=np.asarray(view.layers, dtype=np.str_),
            sources=np.asarray(view.sources, dtype=np.int64),
        )

    def read_relation(self, round: int) -> RelationView:
        """Read the relation of `round`.

        Raises:
            FileNotFoundError: none was written.
            Damaged: the file cannot be read, or its arrays do not fit together.
        """
        path = self.relation_file(round)
        try:
            arrays = _arrays(path)
            lists = [arrays[name].tolist() for name in ("receivers", "layers", "sources")]
            view = RelationView(arrays["rows"], *lists)
            if view.rows.shape == tuple(map(len, lists)):
                return view
        except FileNotFoundError:
            raise
        except UNREADABLE:
            pass
        damaged = f"its {path.relative_to(self.path)} is damaged: restore it, or delete it"
        raise Damaged("run", str(self.path), damaged)

    def intact_relation(self, round: int) -> RelationView | None:
        """Return the relation of `round`; None if its file cannot be read, or is empty."""
        try:
            view = self.read_relation(round)
            return view if view.rows.size else None
        except UNREADABLE:
            return None

    def write_traffic(self, record: RoundRecord) -> None:
        """Write the traffic of a round to an npz file with the arrays `bytes`, `sent`, `clients`,
        `layers` and `kinds`, the fields of `Traffic`."""
        save_arrays(
            self.traffic_file(record.round),
            bytes=np.asarray(record.traffic, dtype=np.int64),
            sent=np.asarray(record.sent, dtype=bool),
            clients=np.asarray([row["client"] for row in record.clients], dtype=np.int64),
            layers=np.asarray(record.layers, dtype=np.str_),
            kinds=np.asarray(KINDS, dtype=np.str_),
        )

    def traffic_file(self, round: int) -> Path:
        """Return the path of the traffic of `round`."""
        return self.path / "traffic" / f"round-{round:04d}.npz"

    def read_traffic(self, round: int) -> Traffic:
        """Read the traffic of `round`; raise FileNotFoundError if none was written."""
        arrays = _arrays(self.traffic_file(round))
        lists = [arrays[name].tolist() for name in ("clients", "layers", "kinds")]
        return Traffic(arrays["bytes"], arrays["sent"], *lists)

    def relation_rounds(self) -> list[int]:
        """Return the rounds with a relation, in order."""
        return _rounds(self.path / "relation")

    def traffic_rounds(self) -> list[int]:
        """Return the rounds with traffic, in order."""
        return _rounds(self.path / "traffic")

    def write_final(
        self,
        scores: list[float],
        name: str = "accuracy",
        models: Sequence[str] = (),
        further: Sequence[Row] = (),
    ) -> None:
        """Write `final.csv`: a row for each client's final model.

        Args:
            scores: by client number.
            name: column of the scores.
            models: kind of each client's model (`before`, `after`, `global`, `finetuned`); empty:
                no such column.
            further: other columns of each client's row; empty: none.
        """
        rows: list[Row] = [
            {
                "client": c,
                name: score,
            }
            for c, score in enumerate(scores)
        ]
        for row, kind in zip(rows, models, strict=bool(models)):
            row["model"] = kind
        for row, further_columns in zip(rows, further, strict=bool(further)):
            row |= further_columns
        self._write("final", rows)

    def _write(
        self,
        table: str,
        rows: Iterable[Row],
        durable: bool = True,
    ) -> None:
        """Write a table of clients, with their names."""
        named = [self._named(row) for row in rows]
        CsvTable(self.path / f"{table}.csv").write(named, durable=durable)

    def write_predictions(self, tables: Sequence[Mapping[str, Any]]) -> None:
        """Write `final_predictions.parquet` from the clients' tables, one below the other; no file
        without any."""
        if tables:
            from pandas import DataFrame, concat

            with atomic_write(self.path / PREDICTIONS) as aside:
                concat(map(DataFrame, tables), ignore_index=True).to_parquet(aside, index=False)

    def write_newcomers(self, rows: Sequence[Mapping[str, float | str]]) -> None:
        """Write `newcomers.csv`: scores of held-out clients by number of labelled samples; no file
        without any."""
        if rows:
            CsvTable(self.path / "newcomers.csv").write(rows)

    def write_split(
        self,
        train: Sequence[int],
        test: Sequence[int],
        classes: np.ndarray | None,
        names: Sequence[str] = (),
        resumed: bool = False,
    ) -> bool:
        """Write each client's numbers of samples to `split.csv`; return whether it was written.

        In a resumed run, an existing file with other numbers is left as it is.

        Args:
            train, test: number of samples of each client.
            classes: number of training samples by client and class, (N, classes), or None.
            names: names of the classes, used for the columns if possible (`class_columns`).
            resumed: whether the run was resumed.
        """
        sizes = enumerate(zip(train, test, strict=True))
        rows: list[Row] = [
            {
                "client": c,
                "train_samples": trained,
                "test_samples": tested,
            }
            for c, (trained, tested) in sizes
        ]
        if classes is not None:
            numbers = range(classes.shape[1])
            columns = class_columns(names or [*map(str, numbers)])
            for row, counts in zip(rows, classes.tolist(), strict=True):
                row |= dict(zip(columns, counts, strict=True))
        before: list[Row] = []
        # a table that a power cut has damaged is written anew
        with contextlib.suppress(Damaged):
            before = self.read("split") if resumed else []
        for old, row in zip(before, rows, strict=False):
            if row | old != old | row:  # they differ in a column that both have
                return False
        self._write("split", rows, durable=False)
        return True

    def write_heterogeneity(
        self,
        clients: Sequence[int],
        pairs: Mapping[str, np.ndarray],
    ) -> None:
        """Write `heterogeneity.npz`, the distances (n, n) between `clients` for each measure, and
        `heterogeneity.csv`, each client's mean distance from the others."""
        save_arrays(self.path / "heterogeneity.npz", clients=np.asarray(clients, np.int64), **pairs)
        rows: list[Row] = [{"client": c} for c in clients]
        for name, table in pairs.items():
            for k, row in enumerate(rows):
                distances = np.delete(table[k], k).astype(np.float64)
                if np.isfinite(distances).any():
                    row[name] = float(np.nanmean(distances))
        self._write("heterogeneity", rows)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`."""
        write_whole(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """Read `summary.json`.

        Raises:
            FileNotFoundError: the run has not ended.
            Damaged: the file cannot be read.
        """
        try:
            summary = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
        except ValueError:
            summary = None
        if not isinstance(summary, dict):
            raise Damaged("run", str(self.path), "its summary.json is damaged: restore it")
        return summary


def class_columns(names: Sequence[str]) -> list[str]:
    """Return the columns of classes, in order: by name, or by number if a name (such as a token of
    texts) is no plain word."""
    if all(name.isprintable() and name.strip() == name != "" for name in names):
        return [f"class_{name}" for name in names]
    return [f"class_{number}" for number in range(len(names))]


def best(
    rows: Iterable[Row],
    column: str | None = None,
) -> tuple[float, int]:
    """Return the best value of `column` (None: the judge's mean) and the first round with it; (nan,
    0) without values."""
    rows = list(rows)
    column = metrics.of_rows(rows).of("mean") if column is None else column
    merit = COLUMNS[column].merit
    judged = [row for row in rows if not math.isnan(row.get(column, math.nan))]
    if not judged:
        return math.nan, 0
    first = max(judged, key=lambda row: (merit(row[column]), -row["round"]))
    return first[column], int(first["round"])


def mean_of_bests(rows: Iterable[Row], column: str) -> tuple[float, int]:
    """Return the mean over clients of each one's best value, and the number of clients with a
    value; (nan, 0) without values.

    Each client may choose another round, so this mean is at least that of the best round (`best`).
    KAPC's journal article uses it for local and FedAvg in its Tables 1 and 2.

    Args:
        rows: rows of `clients.csv`.
        column: column of the values.
    """
    merit = COLUMNS[column].merit
    bests: dict[int, float] = {}
    for row in rows:
        value = row.get(column, math.nan)
        if not math.isnan(value):
            client = int(row["client"])
            bests[client] = max(bests.get(client, value), value, key=merit)
    if not bests:
        return math.nan, 0
    return math.fsum(bests.values()) / len(bests), len(bests)


def final_kinds(summary: Mapping[str, Any]) -> dict[str, int]:
    """Return how many clients' final models are of each kind; empty if the run has not ended."""
    kinds = summary.get("final_kinds")
    counts = kinds if isinstance(kinds, dict) else {}
    return {
        kind: count
        for kind, count in counts.items()
        if kind in metrics.MODELS and type(count) is int
    }


def usual_final_kind(summary: Mapping[str, Any]) -> str | None:
    """Return the kind of the final models: the judge's, or else the most frequent; None if it is
    not known.

    Clients that never took part may have another kind.
    """
    kinds, judge = final_kinds(summary), summary.get("judge")
    if judge in kinds:
        return str(judge)
    return max(kinds, key=kinds.__getitem__, default=None)


def final_words(summary: Mapping[str, Any]) -> str:
    """Describe the kind of the final models: `after local training; 2 of 9 clients before it: they
    never took part`."""
    kinds, kind = final_kinds(summary), usual_final_kind(summary)
    if kind is None:
        return "kind of model unknown"
    total = sum(kinds.values())
    others = total - kinds[kind]
    rest = f"; {others} of {total} clients before it: {NEVER_TRAINED}" if others else ""
    return metrics.MODELS[kind] + rest


def _rounds(folder: Path) -> list[int]:
    numbers = (file.stem.removeprefix("round-") for file in folder.glob("round-*.npz"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with path.open("rb") as file, np.load(file) as arrays:
        return dict(arrays)


def save_arrays(path: Path, **arrays: Any) -> None:
    """Write named arrays to an npz file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_whole(path, buffer.getvalue(), durable=False)
