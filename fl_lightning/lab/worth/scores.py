"""What every row's model made of every tested sample: written run by run, read back silo by
silo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from pandas import DataFrame

from fl_lightning.foundation.errors import BadInput
from fl_lightning.lab.study.grid import place as folder_of
from fl_lightning.lab.worth import FOLDS
from fl_lightning.lab.worth.silos import Facts, Silo
from fl_lightning.lab.worth.statistics import Samples, Scores
from fl_lightning.results.folder import UNREADABLE

Table = dict[str, np.ndarray]
"""Columns of what was tested."""


def place(out: Path, label: str, seed: int) -> Path:
    """Where the scores of a row with a seed are kept: arrays of one length, a row for each tested
    sample."""
    return out / "scores" / folder_of(label) / f"seed-{seed}.npz"


def complete_folds(out: Path, labels: Sequence[str]) -> list[int]:
    """The folds of the first cycle that all rows have scores of."""
    return [
        fold for fold in range(FOLDS) if all(place(out, label, fold).is_file() for label in labels)
    ]


def read(
    out: Path,
    labels: Sequence[str],
    cycles: int,
    facts: Facts,
    folds: Sequence[int] = range(FOLDS),
) -> list[Silo]:
    """Every silo with the scores of all rows over all cycles.

    Args:
        out: of `fl-train worth`.
        labels: of the rows.
        cycles: that have ended.
        facts: on the silos.
        folds: that have ended of each cycle.

    Raises:
        BadInput: a file cannot be read, or rows tested other samples.
    """
    tables = {
        label: [_cycle(out, label, cycle, folds) for cycle in range(cycles)] for label in labels
    }
    silos = [_silo(tables, c, facts) for c in range(len(facts.names))]
    shared = _shared(silos, facts)
    return [_without_shared(silo, shared, facts) for silo in silos]


def one(out: Path, like: Silo, labels: Sequence[str], facts: Facts) -> Silo:
    """The silo `like` by rows of the first cycle in `out`: the samples that count in `like`."""
    tables = {label: [_cycle(out, label, 0, range(FOLDS))] for label in labels}
    silo = _silo(tables, like.number, facts)
    return _kept(silo, np.isin(silo.keys, like.keys))


def _cycle(out: Path, label: str, cycle: int, folds: Sequence[int]) -> Table:
    """What a row's runs of a cycle tested, with the fold of each sample, in the order of
    samples."""
    parts = [_table(place(out, label, cycle * FOLDS + fold)) for fold in folds]
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    whole["fold"] = np.repeat(np.arange(len(parts)), [len(part["sample"]) for part in parts])
    order = np.argsort(whole["sample"], kind="stable")
    return {name: column[order] for name, column in whole.items()}


def _table(path: Path) -> Table:
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            return dict(arrays)
    except UNREADABLE as error:
        allowed = f"it cannot be read ({error}); delete it, and the command trains again"
        raise BadInput("out", str(path), allowed) from None


def _silo(tables: dict[str, list[Table]], client: int, facts: Facts) -> Silo:
    """One silo, of the cycles of each row."""

    def stacked(label: str, column: str) -> np.ndarray:
        return np.stack([table[column][table["client"] == client] for table in tables[label]])

    first = next(iter(tables))
    keys, labels, folds = (stacked(first, name) for name in ("sample", "label", "fold"))
    name = facts.names[client]
    rows = {}
    for label in tables:
        sample, fold = stacked(label, "sample"), stacked(label, "fold")
        same = sample.shape == keys.shape and (sample == keys[0]).all() and (fold == folds).all()
        allowed = f"row {label!r} tested other samples of {name} than the rest: take another folder"
        if not same:
            raise BadInput("out", str(client), allowed)
        outputs = stacked(label, "outputs")
        right = stacked(label, "right").astype(np.float64)
        rows[label] = Scores(right, outputs if outputs.shape[-1] else None)
    copies = facts.copies[keys[0]]
    copied = Counter(facts.copies[np.unique(keys[0])].tolist())
    units = stacked(first, "unit")[0] if facts.kind else copies
    return Silo(
        client,
        name,
        Samples(labels[0], folds, units),
        rows,
        keys[0],
        repeated=sum(count for count in copied.values() if count > 1),
        size=facts.sizes[client],
        kind=facts.kind,
    )


def _shared(silos: Sequence[Silo], facts: Facts) -> DataFrame:
    """Of each sample that lies in several silos its group of copies, by silo."""
    held = DataFrame(
        [(facts.copies[key], silo.number) for silo in silos for key in silo.keys],
        columns=["copy", "silo"],
    ).drop_duplicates()
    return held[held.duplicated("copy", keep=False)]


def _without_shared(silo: Silo, shared: DataFrame, facts: Facts) -> Silo:
    """The silo without samples that lie in another one, too: a federated model has seen them
    there."""
    copies = facts.copies[silo.keys]
    others = shared[shared["silo"] != silo.number]
    counts = {
        int(number): int(np.isin(copies, held["copy"]).sum())
        for number, held in others.groupby("silo")
    }
    counts = {number: count for number, count in counts.items() if count}
    if counts:
        left_in = ~np.isin(copies, others["copy"])
        silo = replace(_kept(silo, left_in), shared=counts, left_out=int((~left_in).sum()))
    return replace(silo, units=len(np.unique(silo.samples.units)) if facts.kind else 0)


def _kept(silo: Silo, kept: np.ndarray) -> Silo:
    """The silo with the samples `kept` (n,) alone."""
    samples = silo.samples
    rows = {
        label: Scores(row.right[:, kept], None if row.outputs is None else row.outputs[:, kept])
        for label, row in silo.rows.items()
    }
    part = Samples(samples.labels[kept], samples.folds[:, kept], samples.units[kept])
    return replace(silo, samples=part, rows=rows, keys=silo.keys[kept])
