"""Persons, specimens or documents that several samples are of: no unit lies in two parts of a
split."""

from collections.abc import Sequence

import numpy as np

from fl_lightning.data.sampling import in_turn, split
from fl_lightning.foundation.errors import BadInput

CHANCE = 1e-4
"""Further equal rows that the columns' own frequencies let expect, below which equal rows are
copies. Ours: low, since columns that depend on each other repeat more often."""
GRID = 1e-3
"""Of a column's standard deviation: values that are nearer are the same number, exported twice."""


def _strata(unit: np.ndarray, strata: np.ndarray) -> np.ndarray:
    """The most frequent stratum of each unit, whose numbers run from 0."""
    counts = np.zeros((int(unit.max()) + 1, int(strata.max()) + 1), np.int64)
    np.add.at(counts, (unit, strata), 1)
    return counts.argmax(1)


def by_unit(
    units: np.ndarray, strata: np.ndarray, share: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the samples of a stratified `share` of the units, and before them of the rest.

    At least one unit is in each part, where there are two.
    """
    kinds, unit = np.unique(units, return_inverse=True)
    if not len(kinds):
        return np.arange(0), np.arange(0)
    taken = split(_strata(unit, strata), share, rng)[1]
    if not 0 < len(taken) < len(kinds):
        taken = rng.permutation(len(kinds))[: min(1, len(kinds) - 1)]
    is_taken = np.isin(unit, taken)
    return np.flatnonzero(~is_taken), np.flatnonzero(is_taken)


def folds(
    units: np.ndarray, strata: np.ndarray, count: int, rng: np.random.Generator
) -> np.ndarray:
    """The fold of each sample, int64 [n]: units are dealt in turn, stratum after stratum."""
    _, unit = np.unique(units, return_inverse=True)
    if not len(unit):
        return unit
    return in_turn(_strata(unit, strata), count, rng, drawn_first=True)[unit]


def check_apart(
    column: str | None, units: np.ndarray, shares: Sequence[np.ndarray], names: Sequence[str]
) -> None:
    """Raise `BadInput` for a unit of which two clients have samples, or where there is one unit."""
    if len(np.unique(units)) == 1:
        raise BadInput("data.unit_column", column, "all rows are of one unit: name another column")
    holder: dict[int, str] = {}
    for name, own in zip(names, shares, strict=True):
        for unit in np.unique(units[own]).tolist():
            other = holder.setdefault(unit, name)
            if other != name:
                requirement = (
                    f"{other} and {name} have rows of one unit: give each client's units names of "
                    f"their own, or leave the rows out"
                )
                raise BadInput("data.unit_column", column, requirement)


EMPTY = 2.0**40
"""Stands for an empty cell: no value is so many steps from 0."""


def copies(rows: np.ndarray) -> np.ndarray:
    """Number of each row's group, int64 [n]: copies have one, also where the last digits differ.

    Equal rows (n, columns) are copies where the product of their values' frequencies lets expect
    fewer than `CHANCE` further ones; coarse columns repeat by chance.
    """
    is_empty = np.isnan(rows)  # cells that are filled in later
    deviation = rows.std(0, where=~is_empty) if len(rows) else np.zeros(rows.shape[1])
    steps = np.where(deviation > 0, GRID * deviation, 1)
    cells = np.where(is_empty, EMPTY, np.round(rows / steps)).astype(np.int64)
    _, first, group, equal = np.unique(
        cells, axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    group = group.ravel()
    expected = np.full(len(rows), float(len(rows)))
    for column in cells.T:
        _, place, counts = np.unique(column, return_inverse=True, return_counts=True)
        expected *= (counts[place] - equal[group] + 1) / len(rows)  # without the row's copies
    return np.where(expected < CHANCE, first[group], np.arange(len(rows)))


def identifier(columns: dict[str, list[str]], groups: np.ndarray) -> str | None:
    """The first column that looks like the name of a person with several rows: many values, most
    of them in several rows, each in one group."""
    for name, cells in columns.items():
        values, place, counts = np.unique(cells, return_inverse=True, return_counts=True)
        repeated = counts.mean() >= REPEATED and len(values) >= 2 * len(np.unique(groups))
        if repeated and len(np.unique(place * (int(groups.max()) + 1) + groups)) == len(values):
            return name
    return None


REPEATED = 1.5
"""Rows of a value, in the mean, from which on a column may name persons. Ours."""
