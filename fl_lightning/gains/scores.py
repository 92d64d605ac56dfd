"""What every row's model made of every tested sample: written run by run, read back silo by silo."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from fl_lightning.errors import BadInput
from fl_lightning.files import write_whole
from fl_lightning.gains.silos import Silo
from fl_lightning.gains.statistics import Samples, Scores

Tables = dict[tuple[str, int], dict[str, np.ndarray]]
"""The arrays of each file, by row and seed."""
COARSE = 0.1
"""Share of a silo's samples that are alike within the silo, above which equal samples tell nothing: coarse columns
repeat by chance."""


def fingerprints(raw: np.ndarray) -> np.ndarray:
    """A number for the content of each sample of `raw` (n, ...), uint64 (n,)."""
    return np.array([xxhash.xxh3_64_intdigest(np.ascontiguousarray(one).data) for one in raw], np.uint64)


def write(path: Path, table: dict[str, Any]) -> None:
    """Keep one run's scores of one row: arrays of one length, a row for each tested sample."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **table)
    write_whole(path, buffer.getvalue(), durable=False)


def place(out: Path, label: str, seed: int) -> Path:
    """Where the scores of a row with a seed are kept."""
    return out / "scores" / label.replace(" ", ",") / f"seed-{seed}.npz"


def read(
    out: Path,
    labels: Sequence[str],
    cycles: int,
    folds: int,
    names: Sequence[str],
    sizes: Sequence[int],
    recordings: Mapping[int, int],
) -> list[Silo]:
    """Every silo with the scores of all rows over all cycles.

    Args:
        out: of `fl-train worth`.
        labels: of the rows.
        cycles: that have ended.
        folds: of a cycle.
        names: of the silos.
        sizes: of the silos, in samples.
        recordings: of windows, by fingerprint: those of one recording are no independent samples.

    Raises:
        BadInput: a file cannot be read, or rows tested other samples.
    """
    tables = {(label, seed): _table(place(out, label, seed)) for label in labels for seed in range(cycles * folds)}
    silos = [_silo(tables, c, name, labels, cycles, folds, recordings) for c, name in enumerate(names)]
    for silo, size in zip(silos, sizes, strict=True):
        silo.size = size
    _trace(silos)
    for silo in silos:
        silo.recordings = len(np.unique(silo.samples.units)) if recordings else 0
    return silos


def one(out: Path, like: Silo, label: str, folds: int, recordings: Mapping[int, int]) -> Silo:
    """The silo `like` by one row of the first cycle in `out`: the samples that count in `like`, and as `read`."""
    tables = {(label, seed): _table(place(out, label, seed)) for seed in range(folds)}
    silo = _silo(tables, like.number, like.name, [label], 1, folds, recordings)
    _keep(silo, np.isin(silo.keys, like.keys))
    return silo


def _table(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError) as error:
        raise BadInput(
            "out", str(path), f"it cannot be read ({error}); delete it, and the command scores again"
        ) from None


def _silo(
    tables: Tables,
    client: int,
    name: str,
    labels: Sequence[str],
    cycles: int,
    folds: int,
    recordings: Mapping[int, int],
) -> Silo:
    """One silo. Samples are in the order of their content, those of equal content as they come."""
    rows: dict[str, Scores] = {}
    keys, tested, of = _cycles(tables, client, labels[0], cycles, folds, ("sample", "label", "fold"))
    for label in labels:
        keys_here, right, outputs = _cycles(tables, client, label, cycles, folds, ("sample", "right", "outputs"))
        if keys_here.shape != keys.shape or (keys_here != keys[0]).any():
            allowed = f"row {label!r} tested other samples of {name} than the rest: begin in a new folder"
            raise BadInput("out", str(client), allowed)
        rows[label] = Scores(right.astype(np.float64), outputs if outputs.shape[-1] else None)
    units = np.unique([recordings.get(key, key) for key in keys[0].tolist()], return_inverse=True)[1]
    return Silo(client, name, Samples(tested[0], of, units), rows, keys[0])


def _cycles(
    tables: Tables, client: int, label: str, cycles: int, folds: int, columns: Sequence[str]
) -> list[np.ndarray]:
    """Columns of a silo's rows with a cycle to each place of the first axis, ordered by content within a cycle."""
    stacked: list[list[np.ndarray]] = [[] for _ in columns]
    for cycle in range(cycles):
        parts = [tables[label, cycle * folds + fold] for fold in range(folds)]
        own = [part["client"] == client for part in parts]
        fold_of = np.repeat(np.arange(folds), [int(mine.sum()) for mine in own])
        keys = np.concatenate([part["sample"][mine] for part, mine in zip(parts, own, strict=True)])
        order = np.argsort(keys, kind="stable")
        for column, kept in zip(columns, stacked, strict=True):
            if column == "fold":
                kept.append(fold_of[order])
            else:
                kept.append(np.concatenate([p[column][mine] for p, mine in zip(parts, own, strict=True)])[order])
    return [np.stack(kept) for kept in stacked]


def _trace(silos: list[Silo]) -> None:
    """Take samples that lie in two silos out of all figures: a federated model has seen them in the other one."""
    holders: dict[int, list[int]] = {}
    coarse: set[int] = set()
    for silo in silos:
        counts = Counter(silo.keys.tolist())
        silo.repeated = sum(count for count in counts.values() if count > 1) if len(silo.keys) == silo.size else 0
        coarse |= {silo.number} if silo.repeated > COARSE * len(silo.keys) else set()
        for key in counts:
            holders.setdefault(key, []).append(silo.number)
    for silo in silos:
        if silo.number in coarse:
            continue
        others = [[c for c in holders[key] if c != silo.number and c not in coarse] for key in silo.keys.tolist()]
        silo.shared = dict(Counter(c for those in others for c in those))
        if silo.shared:
            _keep(silo, np.array([not those for those in others]))


def _keep(silo: Silo, kept: np.ndarray) -> None:
    """Leave the samples `kept` (n,) alone."""
    samples, silo.left_out = silo.samples, int((~kept).sum())
    silo.keys = silo.keys[kept]
    silo.samples = Samples(samples.labels[kept], samples.folds[:, kept], samples.units[kept])
    silo.rows = {
        label: Scores(row.right[:, kept], None if row.outputs is None else row.outputs[:, kept])
        for label, row in silo.rows.items()
    }
