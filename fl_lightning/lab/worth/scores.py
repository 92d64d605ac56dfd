"""What every row's model made of every tested sample: written run by run, read back silo by
silo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from fl_lightning.foundation.errors import BadInput
from fl_lightning.lab.study.grid import place as folder_of
from fl_lightning.lab.worth import FOLDS
from fl_lightning.lab.worth.silos import Facts, Silo
from fl_lightning.lab.worth.statistics import Samples, Scores
from fl_lightning.results.folder import UNREADABLE

Table = dict[str, np.ndarray]
"""Columns of what was tested."""
COARSE = 0.1
"""Share of a silo's samples that are alike within the silo, above which equal samples tell nothing:
coarse columns repeat by chance."""


def fingerprints(raw: np.ndarray) -> np.ndarray:
    """A number for the content of each sample of `raw` (n, ...), uint64 (n,)."""
    return np.array(
        [xxhash.xxh3_64_intdigest(np.ascontiguousarray(one).data) for one in raw], np.uint64
    )


def place(out: Path, label: str, seed: int) -> Path:
    """Where the scores of a row with a seed are kept: arrays of one length, a row for each tested
    sample."""
    return out / "scores" / folder_of(label) / f"seed-{seed}.npz"


def read(out: Path, labels: Sequence[str], cycles: int, facts: Facts) -> list[Silo]:
    """Every silo with the scores of all rows over all cycles.

    Args:
        out: of `fl-train worth`.
        labels: of the rows.
        cycles: that have ended.
        facts: on the silos.

    Raises:
        BadInput: a file cannot be read, or rows tested other samples.
    """
    tables = {label: [_cycle(out, label, cycle) for cycle in range(cycles)] for label in labels}
    silos = [_silo(tables, c, name, facts.recordings) for c, name in enumerate(facts.names)]
    for silo, size in zip(silos, facts.sizes, strict=True):
        silo.size = size
    _trace(silos, bool(facts.recordings))
    for silo in silos:
        silo.recordings = len(np.unique(silo.samples.units)) if facts.recordings else 0
    return silos


def one(out: Path, like: Silo, label: str, facts: Facts) -> Silo:
    """The silo `like` by one row of the first cycle in `out`: the samples that count in `like`, and
    as `read`."""
    silo = _silo({label: [_cycle(out, label, 0)]}, like.number, like.name, facts.recordings)
    _keep(silo, np.isin(silo.keys, like.keys))
    silo.samples = replace(silo.samples, units=like.samples.units)
    return silo


def _cycle(out: Path, label: str, cycle: int) -> Table:
    """What a row's runs of a cycle tested, with the fold of each sample. In the order of samples'
    content and label, those that are alike in both as they come."""
    parts = [_table(place(out, label, cycle * FOLDS + fold)) for fold in range(FOLDS)]
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    whole["fold"] = np.repeat(np.arange(FOLDS), [len(part["sample"]) for part in parts])
    labels = whole["label"].reshape(len(whole["sample"]), -1)  # of a text one for each token
    order = np.lexsort((*labels.T, whole["sample"]))
    return {name: column[order] for name, column in whole.items()}


def _table(path: Path) -> Table:
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            return dict(arrays)
    except UNREADABLE as error:
        allowed = f"it cannot be read ({error}); delete it, and the command scores again"
        raise BadInput("out", str(path), allowed) from None


def _silo(
    tables: Mapping[str, Sequence[Table]], client: int, name: str, recordings: Mapping[int, int]
) -> Silo:
    """One silo, of the cycles of each row."""

    def stacked(label: str, column: str) -> np.ndarray:
        return np.stack([table[column][table["client"] == client] for table in tables[label]])

    first, rows = next(iter(tables)), {}
    keys, labels = stacked(first, "sample"), stacked(first, "label")
    for label in tables:
        sample, classes, right, outputs = (
            stacked(label, name) for name in ("sample", "label", "right", "outputs")
        )
        if sample.shape != keys.shape or (sample != keys[0]).any() or (classes != labels[0]).any():
            allowed = (
                f"row {label!r} tested other samples of {name} than the rest: begin in a new folder"
            )
            raise BadInput("out", str(client), allowed)
        rows[label] = Scores(right.astype(np.float64), outputs if outputs.shape[-1] else None)
    units = np.unique([recordings.get(key, key) for key in keys[0].tolist()], return_inverse=True)[
        1
    ]
    return Silo(client, name, Samples(labels[0], stacked(first, "fold"), units), rows, keys[0])


def _trace(silos: list[Silo], recordings: bool) -> None:
    """Take samples that lie in two silos out of all figures: a federated model has seen them in the
    other one. All of a silo with coarse columns count, each as one, but for windows of
    `recordings`."""
    holders: dict[int, list[int]] = {}
    coarse: set[int] = set()
    for silo in silos:
        counts = Counter(silo.keys.tolist())
        silo.repeated = (
            sum(count for count in counts.values() if count > 1)
            if len(silo.keys) == silo.size
            else 0
        )
        coarse |= {silo.number} if silo.repeated > COARSE * len(silo.keys) else set()
        for key in counts:
            holders.setdefault(key, []).append(silo.number)
    for silo in silos:
        if silo.number in coarse:  # samples that are equal by chance are samples of their own
            silo.repeated = 0
            if not recordings:
                silo.samples = replace(silo.samples, units=np.arange(len(silo.keys)))
            continue
        others = [
            [c for c in holders[key] if c != silo.number and c not in coarse]
            for key in silo.keys.tolist()
        ]
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
