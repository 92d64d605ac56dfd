"""Units (persons, specimens, documents) with several samples: no unit lies in two parts of a
split."""

from collections.abc import Sequence

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from fl_lightning.data.sampling import in_turn, split
from fl_lightning.foundation.errors import check

CHANCE = 1e-4
"""Equal rows count as copies if fewer than this number of them are expected by chance, from the
frequencies of the columns as if columns were independent. Ours: low, since rows of dependent
columns are equal more often."""
GRID = 1e-3
"""Step, as a share of a column's standard deviation, to which values are rounded before rows are
compared: copies that were exported twice may differ in their last digits."""
EMPTY = 2.0**40
"""Code of an empty cell in `copies`: larger than any value, counted in steps of `GRID`."""
REPEATED = 1.5
"""Smallest mean number of rows of one value in a column that may identify persons. Ours."""


def _strata(
    unit: ndarray,
    strata: ndarray,
) -> ndarray:
    """Return the most frequent stratum (class or group) of each unit; units are numbered from 0."""
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
    """Draw a stratified `share` of the units; return the indices of the samples whose units were
    not drawn, and of those whose units were.

    If there are at least two units, at least one is drawn and one is not.

    Args:
        units: unit of each sample, [n].
        strata: class or group of each sample, [n].
        share: share of the units to draw.
        rng: for the draw.
    """
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
    """Return the number of the fold of each sample, int64 [n], from 0; the units of each stratum
    (class or group) are dealt to the folds in turn."""
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
    """Raise `BadInput` if two clients have samples of one unit, or if there is only one unit.

    Args:
        column: name of the unit column, for errors.
        units: unit of each sample.
        shares: each client's indices.
        names: names of the clients.
    """
    is_one = len(np.unique(units)) == 1
    requirement = "all rows are of one unit: name another column"
    check("data.unit_column", column, not is_one, requirement)
    holder: dict[int, str] = {}
    for name, share in zip(names, shares, strict=True):
        for unit in np.unique(units[share]).tolist():
            first = holder.setdefault(unit, name)
            requirement = (
                f"{first} and {name} have rows of the same unit: give it another name at each, "
                f"or leave the rows out"
            )
            check("data.unit_column", column, first == name, requirement)


def copies(rows: ndarray) -> ndarray:
    """Return a group number for each row of `rows` (n, columns), int64 [n]; rows that are copies of
    each other have the same number.

    Two rows are copies if all cells are equal, up to `GRID`, and this is unlikely to be chance.
    Rows of coarse columns, such as age and sex, may agree by chance: from the columns' frequencies,
    as if columns were independent, the number of other rows that equal a row by chance is computed,
    and a row is grouped only if it is below `CHANCE`.
    """
    is_empty = np.isnan(rows)  # cells that will be imputed
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
    """Return the first column that looks like an identifier of persons who have several rows; None
    if there is none.

    In such a column a value occurs in at least `REPEATED` rows on average, all of them in one
    group, and there are at least two values per group on average.

    Args:
        columns: cells by column.
        groups: client (natural group) of each row.
    """
    clients = len(np.unique(groups))
    for name, cells in columns.items():
        values, place, counts = np.unique(cells, return_inverse=True, return_counts=True)
        is_repeated = counts.mean() >= REPEATED and len(values) >= 2 * clients
        pairs = np.unique(np.stack([place, groups]), axis=1)
        if is_repeated and pairs.shape[1] == len(values):
            return name
    return None
