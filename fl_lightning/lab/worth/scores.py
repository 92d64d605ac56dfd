"""Scores of each row on each tested sample: written by runs, read back by silo."""

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
"""Columns by name, with an entry for each tested sample."""


def scores_path(out: Path, name: str, seed: int) -> Path:
    """Path of the .npz file with the scores of the row `name` in the run of one seed: arrays with
    an entry for each tested sample."""
    return out / "scores" / folder_of(name) / f"seed-{seed}.npz"


def complete_folds(out: Path, names: Sequence[str]) -> list[int]:
    """Folds of the first cycle for which all rows have scores. (If time ends during the first
    cycle, results are of these folds.)"""
    return [
        fold
        for fold in range(FOLDS)
        if all(scores_path(out, name, fold).is_file() for name in names)
    ]


def read(
    out: Path,
    names: Sequence[str],
    cycles: int,
    facts: SiloFacts,
    folds: Sequence[int] = range(FOLDS),
) -> list[Silo]:
    """Read the scores of all rows over all cycles, silo by silo.

    Args:
        out: folder that contains the folder `scores`.
        names: names of the rows.
        cycles: number of cycles.
        facts: facts on the silos.
        folds: folds of each cycle that have scores.

    Raises:
        BadInput: a file cannot be read, or rows tested different samples.
    """
    tables = _tables(
        out,
        names,
        cycles,
        folds,
    )
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


def read_same_samples(
    out: Path,
    silo: Silo,
    names: Sequence[str],
    facts: SiloFacts,
) -> Silo:
    """Read further scores of a silo, on exactly those samples that `silo` has, so that the two can
    be compared sample by sample.

    Args:
        out: folder that contains the folder `scores`, such as that of runs without one silo.
        silo: the silo whose samples are kept.
        names: names of the rows to read.
        facts: facts on the silos.

    Returns:
        The silo with the first cycle's scores of the rows `names`.
    """
    tables = _tables(
        out,
        names,
        1,
        range(FOLDS),
    )
    read_silo = _silo(
        out,
        tables,
        silo.number,
        facts,
    )
    return _part(read_silo, np.isin(read_silo.keys, silo.keys))


def _tables(
    out: Path,
    names: Sequence[str],
    cycles: int,
    folds: Sequence[int],
) -> dict[str, list[Table]]:
    """Read the table of each row and cycle."""
    return {name: [_cycle(out, name, cycle, folds) for cycle in range(cycles)] for name in names}


def _cycle(
    out: Path,
    name: str,
    cycle: int,
    folds: Sequence[int],
) -> Table:
    """Read a row's scores of one cycle, sorted by sample, with a column `fold`."""
    parts = [_table(scores_path(out, name, cycle * FOLDS + fold)) for fold in folds]
    table = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    sizes = [len(part["sample"]) for part in parts]
    table["fold"] = np.repeat(range(len(parts)), sizes)
    order = np.argsort(table["sample"], kind="stable")
    return {key: column[order] for key, column in table.items()}


def _table(path: Path) -> Table:
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            return dict(arrays)
    except UNREADABLE as error:
        raise BadInput(
            "out",
            str(path),
            f"it cannot be read ({error}); delete it, and the command trains again",
        ) from None


def _silo(
    out: Path,
    tables: dict[str, list[Table]],
    client: int,
    facts: SiloFacts,
) -> Silo:
    """Make one silo from the tables of each row by cycle."""
    silo_name = facts.names[client]
    own_tables = {
        name: [_of_client(table, client) for table in cycles] for name, cycles in tables.items()
    }
    first = next(iter(own_tables.values()))
    keys, folds = first[0]["sample"], np.stack([table["fold"] for table in first])
    rows = {}
    for name, cycles in own_tables.items():
        is_alike = all(np.array_equal(table["sample"], keys) for table in cycles)
        if not is_alike or (np.stack([table["fold"] for table in cycles]) != folds).any():
            raise BadInput(
                "out",
                str(out),
                f"row {name!r} tested other samples of {silo_name} than the other rows: the data "
                "have changed; give another --out",
            )
        outputs = np.stack([table["outputs"] for table in cycles])
        right = np.stack([table["right"] for table in cycles]).astype(np.float64)
        rows[name] = Scores(right, outputs if outputs.shape[-1] else None)
    # unique: a silo of a few samples tests some of them twice
    _, counts = np.unique(facts.copies[np.unique(keys)], return_counts=True)
    units = first[0]["unit"] if facts.kind else facts.copies[keys]
    return Silo(
        client,
        silo_name,
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
    """Tabulate which silos (column `silo`) have samples of which group of copies (`copy`), for
    groups that several silos have."""
    copies = [(copy, silo.number) for silo in silos for copy in facts.copies[silo.keys]]
    table = DataFrame(copies, columns=["copy", "silo"]).drop_duplicates()
    return table[table.duplicated("copy", keep=False)]


def _without_shared(silo: Silo, shared: DataFrame, facts: SiloFacts) -> Silo:
    """Leave out samples that another silo has, too: a federated model was trained on them there."""
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
    """Reduce a silo to the samples that are `chosen` (n,)."""
    every = slice(None)
    return replace(
        silo,
        samples=silo.samples.part(every, chosen),
        rows={name: scores.part(every, chosen) for name, scores in silo.rows.items()},
        keys=silo.keys[chosen],
    )
