"""Tables, files and names that a logger shows of a run beside its curves; imports no logger's
package."""

import hashlib
import itertools
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.configuration.config import Config
from fl_lightning.core.run import RunContext
from fl_lightning.foundation.csvtable import Row
from fl_lightning.foundation.errors import SECRET
from fl_lightning.results.columns import evenly_spaced
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.provenance import data_name
from fl_lightning.results.record import RelationView
from fl_lightning.storage.manifest import files_of, manifests

MOST_ROWS = 10_000
"""The greatest number of rows of a table: W&B's own limit for display."""
MOST_TABLES = 10
"""The greatest number of rounds, spread over the run, whose relation a logger uploads as a table
and as a file."""
_ELSEWHERE = ("seed", "fabric", "loggers")
_SHOWING = ("heatmaps", "progress", "checkpoint")
_BY_ALPHA = ("dirichlet", "hsu")
_PLACES = ("root", "public_root", "download", "resident")


Table = dict[str, Any]
"""A table as `wandb.Table` takes it: the names of its `columns`, and its rows, the `data`."""


def group_of(config: Config) -> str:
    """Return the W&B group of runs that differ only by their seed, such as `kapc digits dirichlet
    0.1 3f9c2a`.

    The last word is a hash of every setting that decides numbers.
    """
    settings = _without(config.by_key(), _ELSEWHERE)
    settings["callbacks"] = _without(settings["callbacks"], _SHOWING)
    settings["data"] = _without(settings["data"], _PLACES) | {"source": data_name(config)}
    text = json.dumps(settings, sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=3).hexdigest()
    data = config.data
    words = [settings["method"]["name"], data_name(config), data.partition.rpartition(".")[2]]
    if data.partition in _BY_ALPHA:
        words.append(f"{data.alpha:g}")
    return " ".join([*words, digest])[:128]


def _without(mapping: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


def without_secrets(value: Any) -> Any:
    """Return `value` with the texts under keys such as `password` or `api_key` replaced by
    `***`."""
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if not isinstance(value, dict):
        return value
    shown = {key: without_secrets(inner) for key, inner in value.items()}
    for key, inner in value.items():
        if isinstance(inner, str) and SECRET.search(key):
            shown[key] = "***"
    return shown


def relation_table(view: RelationView, names: Sequence[str]) -> Table:
    """Return a table with a row for each weight of the relation (receiver, layer, source, weight),
    for as many receivers as fit into `MOST_ROWS` rows.

    Args:
        view: the relation's weights.
        names: the clients' names; empty: clients are named by their numbers.
    """
    labels = names or range(max(*view.receivers, *view.sources) + 1)
    count = MOST_ROWS // max(len(view.layers) * len(view.sources), 1)
    receivers = [labels[client] for client in view.receivers[:count]]
    sources = [labels[client] for client in view.sources]
    places = itertools.product(receivers, view.layers, sources)
    weights = view.rows[:count].flatten().tolist()
    rows = [[*place, weight] for place, weight in zip(places, weights, strict=True)]
    return {"columns": ["receiver", "layer", "source", "weight"], "data": rows}


def client_table(
    run: RunContext,
    scores: list[float],
    kinds: list[str],
    last: Mapping[int, Row],
) -> Table:
    """Return a table with a row for each client: its data, final score, and the entries of its last
    round.

    Args:
        run: gives the clients' data.
        scores: each client's final score.
        kinds: for each client, the kind of model that was scored, such as `after`.
        last: by client, its last row of clients.csv.
    """
    data = run.data
    columns = dict.fromkeys(name for row in last.values() for name in row)
    rows = []
    for client in range(min(run.clients, MOST_ROWS)):
        row: dict[str, Any] = {"client": client}
        if data.client_names:
            row["name"] = data.client_names[client]
        row["train_samples"] = data.train_sizes[client]
        row["test_samples"] = data.test_sizes[client]
        row["classes"] = int((data.class_counts[client] > 0).sum()) if data.holds_all else None
        row[f"final_{data.metric.name}"] = scores[client]
        row["model"] = kinds[client]
        last_row = last.get(client, {})
        rows.append(row | {name: last_row.get(name) for name in columns if name not in row})
    return {"columns": [*rows[0]], "data": [[*row.values()] for row in rows]}


def tables_to_keep(folder: RunFolder, rounds: int) -> list[Path]:
    """Return the run folder's files that a logger uploads, among them relation files of at most
    `MOST_TABLES` rounds, spread evenly over the run.

    Args:
        folder: the run folder.
        rounds: the run's number of rounds.
    """
    names = "config.yaml columns.json final.csv split.csv metrics.csv clients.csv provenance.json"
    paths = [folder.path / name for name in [*names.split(), "environment.txt", "log.txt"]]
    paths += sorted((folder.path / "source").rglob("*.py"))
    paths += [folder.relation_file(t) for t in evenly_spaced(rounds, MOST_TABLES)]
    return [path for path in paths if path.is_file()]


def pack_checkpoint(folder: Path, out: Path) -> Path | None:
    """Return a tar file in `out` of the newest checkpoint in `folder`; None if there is none."""
    newest = next(iter(manifests(folder).values()), None)
    if newest is None:
        return None
    packed = out / "checkpoint.tar"
    with tarfile.open(packed, "w") as archive:
        for name in files_of(newest):
            archive.add(folder / name, arcname=f"checkpoints/{name}")
    return packed
