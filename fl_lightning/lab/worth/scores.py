"""What every row's model made of every tested sample: written run by run, read back silo by
silo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from pandas import DataFrame

from fl_lightning.foundation.errors import BadInput
from fl_lightning.lab.study.grid import label_folder as folder_of
from fl_lightning.lab.worth import FOLDS
from fl_lightning.lab.worth.silos import Silo, SiloFacts
from fl_lightning.lab.worth.statistics import Array, ScoredSamples, Scores
from fl_lightning.results.folder import UNREADABLE

Table = dict[str, Array]
"""Columns, a row for each tested sample."""


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
    facts: SiloFacts,
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
        label: [
            _cycle(
                out,
                label,
                cycle,
                folds,
            )
            for cycle in range(cycles)
        ]
        for label in labels
    }
    silos = [
        _silo(
            out,
            tables,
            c,
            facts,
        )
        for c in range(len(facts.names))
    ]
    shared = _shared(silos, facts)
    return [_without_shared(silo, shared, facts) for silo in silos]


def silo_like(
    out: Path,
    like: Silo,
    labels: Sequence[str],
    facts: SiloFacts,
) -> Silo:
    """The silo `like` by rows of the first cycle in `out`: the samples that count in `like`."""
    tables = {
        label: [
            _cycle(
                out,
                label,
                0,
                range(FOLDS),
            )
        ]
        for label in labels
    }
    silo = _silo(
        out,
        tables,
        like.number,
        facts,
    )
    return _part(silo, np.isin(silo.keys, like.keys))


def _cycle(
    out: Path,
    label: str,
    cycle: int,
    folds: Sequence[int],
) -> Table:
    """The samples that a row's runs of a cycle tested, in their order, with the fold of each."""
    parts = [_table(place(out, label, cycle * FOLDS + fold)) for fold in folds]
    table = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    sizes = [len(part["sample"]) for part in parts]
    table["fold"] = np.repeat(range(len(parts)), sizes)
    order = np.argsort(table["sample"], kind="stable")
    return {name: column[order] for name, column in table.items()}


def _table(path: Path) -> Table:
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            return dict(arrays)
    except UNREADABLE as error:
        requirement = f"it cannot be read ({error}); delete it, and the command trains again"
        raise BadInput("out", str(path), requirement) from None


def _silo(
    out: Path,
    tables: dict[str, list[Table]],
    client: int,
    facts: SiloFacts,
) -> Silo:
    """One silo, of the cycles of each row."""
    name = facts.names[client]
    of_silo = {
        label: [_of_client(table, client) for table in cycles] for label, cycles in tables.items()
    }
    first = next(iter(of_silo.values()))
    keys, folds = first[0]["sample"], np.stack([table["fold"] for table in first])
    rows = {}
    for label, cycles in of_silo.items():
        is_alike = all(np.array_equal(table["sample"], keys) for table in cycles)
        if not is_alike or (np.stack([table["fold"] for table in cycles]) != folds).any():
            requirement = f"row {label!r} tested other samples of {name} than the rest"
            raise BadInput(
                "out", str(out), f"{requirement}: the data have changed; give another --out"
            )
        outputs = np.stack([table["outputs"] for table in cycles])
        right = np.stack([table["right"] for table in cycles]).astype(np.float64)
        rows[label] = Scores(right, outputs if outputs.shape[-1] else None)
    # a silo of a few samples tests some of them twice
    _, counts = np.unique(facts.copies[np.unique(keys)], return_counts=True)
    units = first[0]["unit"] if facts.kind else facts.copies[keys]
    return Silo(
        client,
        name,
        ScoredSamples(first[0]["label"], folds, units),
        rows,
        keys,
        repeated=int(counts[counts > 1].sum()),
        size=facts.sizes[client],
        kind=facts.kind,
    )


def _of_client(table: Table, client: int) -> Table:
    rows = table["client"] == client
    return {name: column[rows] for name, column in table.items()}


def _shared(silos: Sequence[Silo], facts: SiloFacts) -> DataFrame:
    """Rows (copy, silo) of the groups of copies that several silos have."""
    copies = [(copy, silo.number) for silo in silos for copy in facts.copies[silo.keys]]
    table = DataFrame(copies, columns=["copy", "silo"]).drop_duplicates()
    return table[table.duplicated("copy", keep=False)]


def _without_shared(silo: Silo, shared: DataFrame, facts: SiloFacts) -> Silo:
    """The silo without samples that lie in another one, too: a federated model has seen them
    there."""
    copies = facts.copies[silo.keys]
    others = shared[shared["silo"] != silo.number]
    counts = {}
    for number, group in others.groupby("silo"):
        if count := int(np.isin(copies, group["copy"]).sum()):
            counts[int(number)] = count
    if counts:
        is_shared = np.isin(copies, others["copy"])
        silo = replace(_part(silo, ~is_shared), shared=counts, left_out=int(is_shared.sum()))
    units = len(np.unique(silo.samples.units)) if facts.kind else 0
    return replace(silo, units=units)


def _part(silo: Silo, chosen: Array) -> Silo:
    """The silo with the samples `chosen` (n,) alone."""
    every = slice(None)
    rows = {label: scores.part(every, chosen) for label, scores in silo.rows.items()}
    samples = silo.samples.part(every, chosen)
    return replace(
        silo,
        samples=samples,
        rows=rows,
        keys=silo.keys[chosen],
    )
