"""Persons, specimens or documents that several samples are of: no unit lies in two parts of a
split."""

from collections.abc import Sequence

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from fl_lightning.data.sampling import in_turn, split
from fl_lightning.foundation.errors import check

CHANCE = 1e-4
"""Further equal rows that the columns' own frequencies let expect, below which equal rows are
copies. Ours: low, since columns that depend on each other repeat more often."""
GRID = 1e-3
"""Of a column's standard deviation: values that are nearer are the same number, exported twice."""
EMPTY = 2.0**40
"""Stands for an empty cell: no value is so many steps from 0."""
REPEATED = 1.5
"""Rows of a value, in the mean, from which on a column may name persons. Ours."""


def _strata(
    unit: ndarray,
    strata: ndarray,
) -> ndarray:
    """The most frequent stratum of each unit, whose numbers run from 0."""
    shape = 1 + int(unit.max()), 1 + int(strata.max())
    counts = np.zeros(shape, np.int64)
    np.add.at(counts, (unit, strata), 1)
    return counts.argmax(1)


def by_unit(
    units: ndarray,
    strata: ndarray,
    share: float,
    rng: Generator,
) -> tuple[ndarray, ndarray]:
    """Returns (rest, chosen): indices of the samples of all other units, and of a stratified
    `share` of the units. At least one unit is in each, where there are two."""
    kinds, unit = np.unique(units, return_inverse=True)
    if not len(kinds):
        return np.arange(0), np.arange(0)
    chosen = split(_strata(unit, strata), share, rng)[1]
    if not 0 < len(chosen) < len(kinds):
        order = rng.permutation(len(kinds))
        chosen = order[: min(1, len(kinds) - 1)]
    is_chosen = np.isin(unit, chosen)
    return np.flatnonzero(~is_chosen), np.flatnonzero(is_chosen)


def folds(
    units: ndarray,
    strata: ndarray,
    count: int,
    rng: Generator,
) -> ndarray:
    """The fold of each sample, int64 [n]: units are dealt in turn, stratum after stratum."""
    _, unit = np.unique(units, return_inverse=True)
    if not len(unit):
        return unit
    return in_turn(_strata(unit, strata), count, rng, drawn_first=True)[unit]


def check_apart(
    column: str | None,
    units: ndarray,
    shares: Sequence[ndarray],
    names: Sequence[str],
) -> None:
    """Raise `BadInput` for a unit of which two clients have samples, or where there is one unit."""
    is_one = len(np.unique(units)) == 1
    requirement = "all rows are of one unit: name another column"
    check("data.unit_column", column, not is_one, requirement)
    holder: dict[int, str] = {}
    for name, share in zip(names, shares, strict=True):
        for unit in np.unique(units[share]).tolist():
            first = holder.setdefault(unit, name)
            requirement = (
                f"{first} and {name} have rows of one unit: give each client's units names of "
                f"their own, or leave the rows out"
            )
            check("data.unit_column", column, first == name, requirement)


def copies(rows: ndarray) -> ndarray:
    """Number of each row's group, int64 [n], in which copies are together, also where the last
    digits differ.

    Rows (n, columns) that are equal within `GRID` are copies, unless so many equal rows are likely
    by chance: `CHANCE` further ones or more, were the columns independent. Coarse columns repeat.
    """
    is_empty = np.isnan(rows)  # cells that are filled in later
    deviation = np.zeros(rows.shape[1])
    if len(rows):
        deviation = rows.std(0, where=~is_empty)
    steps = np.where(deviation > 0, GRID * deviation, 1)
    rounded = np.round(rows / steps)
    cells = np.where(is_empty, EMPTY, rounded).astype(np.int64)
    _, first, group, equal = np.unique(
        cells, axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    group = group.ravel()
    expected = np.full(len(rows), float(len(rows)))
    for column in cells.T:
        _, place, counts = np.unique(column, return_inverse=True, return_counts=True)
        expected *= (counts[place] - equal[group] + 1) / len(rows)  # without the row's copies
    places = np.arange(len(rows))
    return np.where(expected < CHANCE, first[group], places)


def identifier(
    columns: dict[str, list[str]],
    groups: ndarray,
) -> str | None:
    """The first column that looks like the name of a person with several rows: many values, most
    of them in several rows, each in one group."""
    clients = len(np.unique(groups))
    for name, cells in columns.items():
        values, place, counts = np.unique(cells, return_inverse=True, return_counts=True)
        is_repeated = counts.mean() >= REPEATED and len(values) >= 2 * clients
        pairs = np.unique(np.stack([place, groups]), axis=1)
        if is_repeated and pairs.shape[1] == len(values):
            return name
    return None
