"""What a viewer shows of a run beside its curves: the name of its setting, tables by client, the
files to keep.

Rows are plain lists: only who hands them to W&B imports it.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.callbacks.checkpoint import Checkpoint
from fl_lightning.configuration.config import Config, check
from fl_lightning.core.run import RunContext
from fl_lightning.foundation.csvtable import Row
from fl_lightning.foundation.errors import SECRET
from fl_lightning.foundation.metric import Metric
from fl_lightning.results.columns import spread
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.provenance import data_name
from fl_lightning.results.record import RelationView
from fl_lightning.storage.manifest import files_of, intact, rounds

MOST_ROWS = 10_000
"""Of a table: W&B's own limit for one that is shown."""
MOST_TABLES = 10
"""Rounds spread over a run whose relation a viewer gets as a table and as a file, checkpoints or
not."""
MOST_CHECKPOINTS = 100
"""Further tables, of rounds that are saved: a run of any length stays below W&B's 1,000 files."""
_ELSEWHERE = ("seed", "fabric", "loggers")
_SHOWING = ("heatmaps", "progress", "checkpoint")
_BY_ALPHA = ("dirichlet", "hsu")
_PLACES = ("root", "public_root", "download", "resident")


@dataclass
class Cells:
    """A table: the names of its columns, and its rows."""

    columns: list[str]
    rows: list[list[Any]] = field(default_factory=list)


def group_of(config: Config) -> str:
    """What runs that differ by their seed alone have in common: `kapc digits dirichlet 0.1 3f9c2a`.

    The last word stands for every setting that decides numbers.
    """
    settings = {key: value for key, value in config.by_key().items() if key not in _ELSEWHERE}
    settings["callbacks"] = {k: v for k, v in settings["callbacks"].items() if k not in _SHOWING}
    settings["data"] = {k: v for k, v in settings["data"].items() if k not in _PLACES} | {
        "source": data_name(config)
    }
    digest = hashlib.blake2b(
        json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=3
    ).hexdigest()
    data = config.data
    split = f"{data.partition.rpartition('.')[2]} " + (
        f"{data.alpha:g} " if data.partition in _BY_ALPHA else ""
    )
    return f"{settings['method']['name']} {data_name(config)} {split}{digest}"[:128]


def without_secrets(value: Any) -> Any:
    """`value` with the texts under keys such as `password` or `api_key` starred out."""
    if isinstance(value, dict):
        return {
            k: "***" if isinstance(v, str) and SECRET.search(k) else without_secrets(v)
            for k, v in value.items()
        }
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


def heterogeneity(counts: np.ndarray) -> float:
    """How unlike the clients' class mixes are: 0 all alike, towards 1 nothing in common.

    Mean over clients of the total variation distance between a client's class shares and those of
    all training data.

    Args:
        counts: training samples by client and class, (N, classes).
    """
    occupied = counts[counts.sum(axis=1) > 0]
    shares = occupied / occupied.sum(axis=1, keepdims=True)
    return float(0.5 * np.abs(shares - occupied.sum(axis=0) / occupied.sum()).sum(axis=1).mean())


def cube(view: RelationView, names: Sequence[str] = ()) -> Cells:
    """The relation, a row for each weight, with the `names` of clients that have any; of as many
    receivers as `MOST_ROWS` has room for."""
    table = Cells(["receiver", "layer", "source", "weight"])
    of_one = len(view.layers) * len(view.sources)
    for receiver, rows in zip(
        view.receivers[: MOST_ROWS // max(of_one, 1)], view.rows, strict=False
    ):
        for layer, weights in zip(view.layers, rows.tolist(), strict=True):
            sources = [names[s] for s in view.sources] if names else view.sources
            called = names[receiver] if names else receiver
            table.rows += [[called, layer, *pair] for pair in zip(sources, weights, strict=True)]
    return table


def clients(
    run: RunContext, scores: list[float], kinds: list[str], last: Mapping[int, Row]
) -> Cells:
    """A row for each client: its samples and classes, its final score, and what its last round came
    to."""
    data, name = run.data, run.data.metric.name
    seen = list(
        dict.fromkeys(column for row in last.values() for column in row if column not in _KNOWN)
    )
    named = ["name"] if data.client_names else []
    table = Cells(
        [
            "client",
            *named,
            "train_samples",
            "test_samples",
            "classes",
            f"final_{name}",
            "model",
            *seen,
        ]
    )
    classes = (
        (data.class_counts > 0).sum(axis=1).tolist() if data.holds_all else [None] * run.clients
    )
    for client in range(min(run.clients, MOST_ROWS)):
        row, sizes = (
            last.get(client, {}),
            (data.train_sizes[client], data.test_sizes[client], classes[client]),
        )
        who = [client, *data.client_names[client : client + 1]]
        table.rows.append(
            [*who, *sizes, scores[client], kinds[client], *(row.get(column) for column in seen)]
        )
    return table


class Tables:
    """The rounds whose relation is a table: a few spread over the run, and those of checkpoints.

    Of more checkpoints than `MOST_CHECKPOINTS`, the first behind each of so many rounds that are
    spread over the run.
    """

    def __init__(self) -> None:
        self._last = 0

    def due(self, run: RunContext, t: int) -> bool:
        """Whether round `t`, which has just ended, has one."""
        if t in spread(run.rounds, MOST_TABLES):
            return True
        passed = any(self._last < mark <= t for mark in spread(run.rounds, MOST_CHECKPOINTS))
        if not passed or all(c.saved != t for c in run.callbacks if isinstance(c, Checkpoint)):
            return False
        self._last = t
        return True


_KNOWN = ("client", "name", "train_samples", "test_samples")


class Gain:
    """What federating brings over training alone, from the run folder of a finished run of `local`
    on the same split.

    Raises:
        BadInput: that folder holds no finished run of training alone, or one of another split.
    """

    def __init__(self, folder: str, run: RunContext) -> None:
        import yaml

        alone, key = RunFolder(Path(folder)), "loggers.wandb.local"
        self.metric: Metric = run.data.metric
        self._alone = {
            int(row["client"]): row.get(self.metric.name, np.nan) for row in alone.read("final")
        }
        check(
            key,
            folder,
            bool(self._alone),
            "it must be the folder of a finished run of training alone",
        )
        try:
            saved = yaml.safe_load((alone.path / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError):
            saved = None
        fine = isinstance(saved, dict) and isinstance(saved.get("data"), dict)
        check(key, folder, fine, "it must be a run folder; its config.yaml cannot be read")
        method = saved.get("method")
        name = method.get("name") if isinstance(method, dict) else method
        check(key, folder, name == "local", f"it must be a run of local; it is one of {name}")
        mine = run.config.by_key()
        differ = [
            k for k, v in mine["data"].items() if k not in _PLACES and saved["data"].get(k, v) != v
        ]
        same = (
            not differ
            and saved.get("seed") == run.config.seed
            and set(self._alone) == set(range(run.clients))
        )
        check(
            key,
            folder,
            same,
            "it must have the same seed, clients and data settings: other clients, else",
        )

    def of(self, scores: Mapping[int, float]) -> dict[str, float]:
        """`gain/over_local` (mean over clients) and `gain/share_harmed` of these clients'
        scores."""
        gains = [self.metric.merit(score - self._alone[client]) for client, score in scores.items()]
        if not gains:
            return {}
        return {
            "gain/over_local": float(np.mean(gains)),
            "gain/share_harmed": float(np.mean(np.array(gains) < 0)),
        }


def scores_of(rows: Iterable[Mapping[str, float]], column: str) -> dict[int, float]:
    """Each client's value of `column`, where it has one."""
    return {int(row["client"]): row[column] for row in rows if column in row}


def tables_to_keep(folder: RunFolder, rounds: int) -> list[Path]:
    """Files of the run folder that a viewer keeps: tables, where it comes from, and the relation of
    some rounds."""
    tables = ("final.csv", "split.csv", "metrics.csv", "clients.csv")
    names = (
        "config.yaml",
        "columns.json",
        *tables,
        "provenance.json",
        "environment.txt",
        "log.txt",
    )
    relations = [folder.relation_file(t) for t in spread(rounds, MOST_TABLES)]
    own = sorted((folder.path / "source").rglob("*.py"))
    return [
        path
        for path in [*(folder.path / name for name in names), *own, *relations]
        if path.is_file()
    ]


def pack_checkpoint(folder: Path, out: Path) -> Path | None:
    """The files of the newest checkpoint in `folder` as one tar file in `out`; None if there is
    none."""
    newest = next(
        (manifest for t in rounds(folder) if (manifest := intact(folder, t)) is not None), None
    )
    if newest is None:
        return None
    packed = out / "checkpoint.tar"
    with tarfile.open(packed, "w") as archive:
        for name in files_of(newest):
            archive.add(folder / name, arcname=f"checkpoints/{name}")
    return packed
