"""What each silo tells of the columns of its own table, and what these summaries tell side by side:
other units and codings, identifiers, columns that give the label away.

`summary` reads one silo's rows; `findings` reads summaries alone, so that rows may stay where they
are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from fl_lightning.configuration import tables
from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import units
from fl_lightning.data.load import source_of
from fl_lightning.foundation.cells import is_empty, number
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.named import composed, some

Cells = Mapping[str, Sequence[str]]
ALL = "all"
"""In place of a silo, where a finding holds at every one."""
LEAST = 5
"""Rows of a value that a silo names: fewer may point to a person. A usual threshold of
statistical offices."""
MOST = 50
"""Values of a column that a silo names, at most. Ours."""
CODES = 10
"""Different numbers of a column up to which they are taken for codes. Ours."""
FEW = 10
"""Rows below which a silo's quantiles, constants and rankings say little. Ours."""
RANKED = 0.95
"""AUROC of one column for the label from which on it may give it away. Ours: single laboratory
values stay well below."""
WIDER = 5.0
"""Factor between spreads of a column from which on units may differ. Ours: below those of usual
pairs of units (mmHg and kPa 7.5, mmol/l and mg/dl 18)."""
WORDS = 0.1
"""Share of cells that are no numbers from which on a column is of words. Ours."""
CONSTANT = "one value, or none, in all rows"
KINDS = ("leak", "units", "coding", "constant", "identifier", "missing", "outcome")
"""Of findings, the worst first."""
WARNINGS = KINDS[:5]
"""Kinds of which a run says the worst when it starts."""


@dataclass(frozen=True)
class Column:
    """What one silo tells of a column: all that it would send."""

    rows: int
    missing: int
    different: int
    """Different values."""
    categories: dict[str, int]
    """Rows of values that at least `LEAST` have, the most frequent ones."""
    numbers: int
    """Cells that hold numbers."""
    quantiles: list[float]
    """5, 50 and 95 % of the numbers; none of fewer than `FEW`."""
    predicts: float
    """AUROC of the column alone for the label, mean over classes (of a number: for whether it is
    above its median); NaN: too few rows."""
    whole: bool
    """Whether the numbers are whole."""

    @property
    def filled(self) -> int:
        """Cells that hold something."""
        return self.rows - self.missing

    @property
    def words(self) -> float:
        """Share of these that are no numbers."""
        return 1 - self.numbers / max(self.filled, 1)

    @property
    def spread(self) -> float:
        """Between the outer quantiles."""
        return self.quantiles[2] - self.quantiles[0]


Summary = dict[str, Column]
"""Of one silo, by column."""


class Finding(NamedTuple):
    """What is odd about a column."""

    column: str
    silo: str
    finding: str
    here: float
    elsewhere: float
    """The median of the other silos; NaN: it is not compared."""
    numbers: str
    """Both, in words."""


# ---------------------------------------------------------------- one silo


def summary(rows: Cells, data: DataConfig) -> Summary:
    """Returns what a silo tells of its columns, the label among them.

    Args:
        rows: cells by column.
        data: which is the label, and how cells are written.
    """
    labels = rows[data.label_column]
    columns = {}
    for name, cells in rows.items():
        values = _values(name, cells, data)
        numbers = values[np.isfinite(values)]
        counts = Counter(cell for cell in cells if not is_empty(cell))
        enough = len(numbers) >= FEW
        columns[name] = Column(
            rows=len(cells),
            missing=len(cells) - counts.total(),
            different=len(counts),
            categories={v: count for v, count in counts.most_common(MOST) if count >= LEAST},
            numbers=len(numbers),
            quantiles=np.quantile(numbers, [0.05, 0.5, 0.95]).tolist() if enough else [],
            predicts=_predicts(cells, values, labels, data),
            whole=name not in (data.dates or []) and bool((numbers == np.round(numbers)).all()),
        )
    return columns


def _values(name: str, cells: Sequence[str], data: DataConfig) -> np.ndarray:
    """The numbers in a column's cells; NaN: it is empty; infinite: it holds something else."""
    form = tables.form_of(data)
    values = []
    for cell in cells:
        try:
            values.append(number(name, cell, form))
        except ValueError:
            values.append(math.inf)
    return np.array(values)


def _predicts(
    cells: Sequence[str], values: np.ndarray, labels: Sequence[str], data: DataConfig
) -> float:
    """`Column.predicts`; an empty cell is a value like others, since that it is empty may tell."""
    if data.task == "regression":
        targets = _values(data.label_column, labels, data)
        truths = [targets > np.nanmedian(targets)]
    else:
        truths = [np.array(labels, object) == label for label in sorted(set(labels))]
    truths = [truth for truth in truths if FEW <= truth.sum() <= len(truth) - FEW]
    if np.isinf(values).mean() < WORDS:
        is_number = np.isfinite(values)
        areas = [
            max(_auroc(truth[is_number], values[is_number]), _auroc(truth, is_number))
            for truth in truths
        ]
    else:
        areas = _areas_of_words(cells, truths)
    return fmean(areas) if areas else math.nan


def _areas_of_words(cells: Sequence[str], truths: Sequence[np.ndarray]) -> list[float]:
    """AUROC of a column of words, each ranked by its rows' labels; none where most words are of
    one row."""
    _, place, counts = np.unique(np.array(cells, object), return_inverse=True, return_counts=True)
    if len(counts) * FEW > len(cells):
        return []
    return [_auroc(truth, np.bincount(place, truth)[place] / counts[place]) for truth in truths]


def _auroc(truth: np.ndarray, scores: np.ndarray) -> float:
    """In whichever direction is better; 0.5 of too few rows, or of equal scores."""
    from sklearn.metrics import roc_auc_score

    if min(truth.sum(), (~truth).sum()) < FEW or scores.min() == scores.max():
        return 0.5
    area = float(roc_auc_score(truth, scores))
    return max(area, 1 - area)


# ---------------------------------------------------------------- all silos


def findings(summaries: Mapping[str, Summary], data: DataConfig) -> list[Finding]:
    """Returns what is odd about the silos' columns, the worst first, then shares that are missing
    and what the outcome is.

    Args:
        summaries: by silo.
        data: which column is the label, and whether it holds classes.
    """
    label = data.label_column
    listed: list[Finding] = []
    for name in next(iter(summaries.values())):
        silos = {silo: columns[name] for silo, columns in summaries.items()}
        identifiers = _identifiers(name, silos) if name != label else []
        leaks = _leaks(name, silos) if name != label else []
        listed += [*leaks, *(identifiers or _units(name, silos)), *_codings(name, silos)]
        constant = {s: 1.0 for s, c in silos.items() if c.different < 2 and c.rows >= FEW}
        listed += _flagged(name, "constant", constant, len(silos), CONSTANT)
        listed += _missing(name, silos)
    outcomes = {silo: columns[label] for silo, columns in summaries.items()}
    listed += _outcome(label, outcomes, data.task == "regression")
    return _worst_first(listed)


def _worst_first(listed: Sequence[Finding]) -> list[Finding]:
    return sorted(listed, key=lambda one: (KINDS.index(one.finding), -_size(one)))


def _size(finding: Finding) -> float:
    """How bad it is beside others of its kind: of units how far apart, relative to both."""
    here, elsewhere = finding.here, finding.elsewhere
    apart = abs(here - elsewhere) / (abs(here) + abs(elsewhere) or 1)
    return apart if finding.finding == "units" else here


def _others(silos: Mapping[str, Column], silo: str, value: Callable[[Column], float]) -> float:
    """The median of `value` over the other silos; NaN: there are none."""
    values = [value(column) for other, column in silos.items() if other != silo]
    return median(values) if values else math.nan


def _usual(silos: Mapping[str, Column], silo: str, value: Callable[[Column], float]) -> float:
    """The median of `value` over the silos, which one of three cannot move; of two, the other's."""
    if len(silos) < 3:
        return _others(silos, silo, value)
    return median(map(value, silos.values()))


def _flagged(
    name: str, kind: str, values: dict[str, float], silos: int, words: str
) -> list[Finding]:
    """A finding for each silo that has a value, or one where all `silos` have."""
    if 1 < len(values) == silos:
        values = {ALL: fmean(values.values())}
    return [Finding(name, s, kind, v, math.nan, words.format(v)) for s, v in values.items()]


def _units(name: str, silos: Mapping[str, Column]) -> Iterator[Finding]:
    """Medians further apart than the others' values, or spreads of another size."""
    if max(column.different for column in silos.values()) <= CODES:
        return
    measured = {silo: column for silo, column in silos.items() if column.quantiles}
    for silo, column in measured.items():
        middle = _usual(measured, silo, lambda column: column.quantiles[1])
        spread = _usual(measured, silo, lambda column: column.spread)
        if abs(column.quantiles[1] - middle) > spread:
            elsewhere = _others(measured, silo, lambda column: column.quantiles[1])
            words = f"median {column.quantiles[1]:.4g}, {elsewhere:.4g} elsewhere"
            yield Finding(name, silo, "units", column.quantiles[1], elsewhere, words)
        elif max(column.spread, spread) > WIDER * min(column.spread, spread) > 0:
            words = f"5 to 95 % span {column.spread:.4g}, {spread:.4g} elsewhere"
            yield Finding(name, silo, "units", column.spread, spread, words)


def _codings(name: str, silos: Mapping[str, Column]) -> Iterator[Finding]:
    """Words among numbers, or values that most silos would have too, if they were as frequent
    there."""
    is_number = median(column.words for column in silos.values()) < WORDS
    if is_number and max(column.different for column in silos.values()) > CODES:
        for silo, column in silos.items():
            if column.words >= WORDS:
                words = f"{column.words:.0%} of its cells are no numbers"
                yield Finding(name, silo, "coding", column.words, 0.0, words)
        return
    for silo, column in silos.items():
        alone = {}
        for value, count in column.categories.items():
            enough = 2 * LEAST * column.filled / count
            holders = [c for c in silos.values() if value in c.categories]
            others = [c for c in silos.values() if c not in holders and c.filled >= enough]
            if len(others) >= len(holders):
                alone[value] = count
        if alone:
            share = sum(alone.values()) / column.filled
            words = f"{some(map(repr, alone))} in {share:.0%} of its rows, not at most others"
            yield Finding(name, silo, "coding", share, 0.0, words)


def _missing(name: str, silos: Mapping[str, Column]) -> list[Finding]:
    """The silo where most is missing, beside the others."""
    shares = {silo: column.missing / column.rows for silo, column in silos.items()}
    most = max(shares, key=lambda silo: shares[silo])
    elsewhere = _others(silos, most, lambda other: other.missing / other.rows)
    words = f"{shares[most]:.0%} missing"
    words += "" if math.isnan(elsewhere) else f", {elsewhere:.0%} elsewhere"
    finding = Finding(name, most, "missing", shares[most], elsewhere, words)
    return [finding] if shares[most] else []


def _identifiers(name: str, silos: Mapping[str, Column]) -> list[Finding]:
    """Columns of words or whole numbers, of which no two rows have the same."""
    different = {
        silo: float(column.different)
        for silo, column in silos.items()
        if column.filled == column.different > 2 * FEW and (column.words > WORDS or column.whole)
    }
    return _flagged(name, "identifier", different, len(silos), "another value in every row")


def _leaks(name: str, silos: Mapping[str, Column]) -> list[Finding]:
    predicts = {s: column.predicts for s, column in silos.items() if column.predicts >= RANKED}
    ranked = sum(not math.isnan(column.predicts) for column in silos.values())
    return _flagged(name, "leak", predicts, ranked, "alone it predicts the label (AUROC {:.3f})")


def _outcome(label: str, silos: Mapping[str, Column], are_numbers: bool) -> Iterator[Finding]:
    """For each silo the median target, or the share of the class that is rarest over all."""
    counts = sum((Counter(column.categories) for column in silos.values()), Counter[str]())
    rarest = min(counts, key=lambda value: counts[value], default="")

    def value(column: Column) -> float:
        if are_numbers:
            return column.quantiles[1] if column.quantiles else math.nan
        return column.categories.get(rarest, 0) / column.rows

    for silo, column in silos.items():
        here = value(column)
        share = f"{here:.1%}" if here else f"fewer than {LEAST}"
        words = f"{share} of {column.rows} rows are {rarest!r}"
        if are_numbers:
            words = f"median {here:.4g} of {column.rows} rows"
        yield Finding(label, silo, "outcome", here, _others(silos, silo, value), words)


# ---------------------------------------------------------------- a table here


def is_table(data: DataConfig) -> bool:
    """Whether the data are a table, whose columns can be compared."""
    return source_of(data) == "table"


def checked(data: DataConfig) -> tuple[list[Finding], dict[str, Summary]]:
    """Returns `findings` of the table `data.root`, and of which column is of persons with several
    rows, which takes the rows of all silos; and each silo's summary (of a table without groups,
    one).

    Raises:
        BadInput: no such file or column.
    """
    data = tables.spelled(data)
    cells = tables.read(data)
    label, group, features = tables.columns_of(data, list(cells))
    is_words = len(features) == 1 and not data.one_hot
    is_words = is_words and np.isinf(_values(features[0], cells[features[0]], data)).all()
    if is_words or data.tokens is not None:  # images by their names, or texts
        features = []
    groups = np.array([ALL if group is None else composed(c) for c in cells[group or label]])
    summaries: dict[str, Summary] = {}
    for silo in dict.fromkeys(groups.tolist()):
        rows = np.flatnonzero(groups == silo)
        of_silo = {name: [cells[name][row] for row in rows] for name in [*features, label]}
        summaries[silo] = summary(of_silo, data)
    listed = findings(summaries, data)
    others = {name: column for name, column in cells.items() if name not in (group, label)}
    asked = group is not None and data.unit_column is None
    person = units.identifier(others, np.unique(groups, return_inverse=True)[1]) if asked else None
    if person is not None:
        words = "looks like an identifier of persons with several rows: if so, data.unit_column"
        listed.append(Finding(person, ALL, "identifier", math.inf, math.nan, words))
    return _worst_first(listed), summaries


def lines(data: DataConfig) -> list[str]:
    """Returns the worst finding of each kind that may spoil a run on a table, a line each; none of
    other sources."""
    if not is_table(data):
        return []
    try:
        warnings = [finding for finding in checked(data)[0] if finding.finding in WARNINGS]
    except BadInput:  # the run says what is wrong, or in a smoke run makes up what is not there
        return []
    worst: dict[str, Finding] = {}
    for finding in warnings:
        worst.setdefault(finding.finding, finding)
    shown = [
        f"data: column {f.column!r}{'' if f.silo == ALL else f' at {f.silo}'}: {f.numbers}"
        for f in worst.values()
    ]
    more = len(warnings) - len(worst)
    return [*shown, f"data: {more} more like these: fl-train check-data"] if more else shown
