"""Checks of a table whose groups are silos (hospitals, ...): other units or codings at one of them,
identifiers, columns that give the label away.

`summary` reads the rows of one silo. `findings` compares summaries only, so that rows may stay
where they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from fl_lightning.configuration import tables
from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import units
from fl_lightning.data.load import source_name
from fl_lightning.foundation.cells import is_empty, number
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.named import composed, some

Cells = Mapping[str, Sequence[str]]
ALL = "all"
"""Stands for a silo in findings about all of them."""
LEAST = 5
"""Fewest rows of a value that a silo reports: fewer may point to a person. A usual threshold of
statistical offices."""
MOST_VALUES = 50
"""Largest number of values of a column that a silo reports. Ours."""
CODES = 10
"""Largest number of different numbers in a column that are taken for codes. Ours."""
FEWEST_ROWS = 10
"""Number of rows below which a silo's quantiles, constants and rankings are not used. Ours."""
RANKED = 0.95
"""AUROC of a single column for the label from which on the column may give the label away. Ours:
single laboratory values stay well below."""
WIDER = 5.0
"""Ratio between the spreads of a column from which on units may differ. Ours: below that of usual
pairs of units (mmHg and kPa 7.5, mmol/l and mg/dl 18)."""
WORDS = 0.1
"""Share of cells without a number from which on a column counts as words. Ours."""
CONSTANT = "one value, or none, in all rows"
KINDS = ("leak", "units", "coding", "constant", "identifier", "missing", "outcome")
"""Kinds of findings, the worst first."""
WARNINGS = KINDS[:5]
"""Kinds of findings of which a run prints the worst when it starts."""


@dataclass(frozen=True)
class SiloColumn:
    """Summary of one column at one silo: everything that the silo would send."""

    rows: int
    missing: int
    different: int
    """Number of different values."""
    categories: dict[str, int]
    """Number of rows of each value that at least `LEAST` rows have; only the most frequent
    values."""
    numbers: int
    """Number of cells that hold numbers."""
    quantiles: list[float]
    """Quantiles of the numbers at 5, 50 and 95 %; empty for fewer than `FEWEST_ROWS` numbers."""
    predicts: float
    """AUROC of the column alone for the label, mean over classes (for a target that is a number:
    whether it is above its median); NaN for too few rows."""
    whole: bool
    """Whether all numbers are whole."""

    @property
    def filled(self) -> int:
        """Number of cells that are not empty."""
        return self.rows - self.missing

    @property
    def missing_share(self) -> float:
        """Share of empty cells."""
        return self.missing / self.rows

    @property
    def word_share(self) -> float:
        """Share of filled cells that hold no number."""
        return 1 - self.numbers / max(self.filled, 1)

    @property
    def middle(self) -> float:
        """Median of the numbers; NaN for too few."""
        return self.quantiles[1] if self.quantiles else math.nan

    @property
    def spread(self) -> float:
        """Distance between the 5 % and 95 % quantiles."""
        return self.quantiles[2] - self.quantiles[0]


Summary = dict[str, SiloColumn]
"""Columns of one silo by name."""


class Finding(NamedTuple):
    """An oddity of a column at one silo."""

    column: str
    silo: str
    finding: str
    """Kind of the finding, one of `KINDS`."""
    here: float
    elsewhere: float
    """Median of the other silos; NaN if it is not compared."""
    numbers: str
    """Both values in words."""


# ---------------------------------------------------------------- one silo


def summary(rows: Cells, data: DataConfig) -> Summary:
    """Summarise a silo's columns, including the label.

    Args:
        rows: cells by column.
        data: names the label, and tells how cells are written.
    """
    labels = rows[data.label_column]
    columns = {}
    for name, cells in rows.items():
        values = _values(name, cells, data)
        numbers = values[np.isfinite(values)]
        counts = Counter(cell for cell in cells if not is_empty(cell))
        named = [(cell, count) for cell, count in counts.most_common(MOST_VALUES) if count >= LEAST]
        quantiles = []
        if len(numbers) >= FEWEST_ROWS:
            quantiles = np.quantile(numbers, [0.05, 0.5, 0.95]).tolist()
        is_date = name in (data.dates or [])
        columns[name] = SiloColumn(
            rows=len(cells),
            missing=len(cells) - counts.total(),
            different=len(counts),
            categories=dict(named),
            numbers=len(numbers),
            quantiles=quantiles,
            predicts=_predicts(cells, values, labels, data),
            whole=not is_date and bool((numbers == np.round(numbers)).all()),
        )
    return columns


def _values(
    name: str,
    cells: Sequence[str],
    data: DataConfig,
) -> ndarray:
    """Return the number in each cell of a column; NaN for an empty cell, infinity for anything
    else."""
    form = tables.form_of(data)
    values = []
    for cell in cells:
        try:
            values.append(number(name, cell, form))
        except ValueError:
            values.append(math.inf)
    return np.array(values)


def _predicts(
    cells: Sequence[str],
    values: ndarray,
    labels: Sequence[str],
    data: DataConfig,
) -> float:
    """Return `SiloColumn.predicts`. An empty cell counts as a value, since its emptiness may
    predict the label."""
    if data.task == "regression":
        targets = _values(data.label_column, labels, data)
        truths = [targets > np.nanmedian(targets)]
    else:
        label_array = np.array(labels, object)
        truths = [label_array == label for label in sorted(set(labels))]
    truths = [truth for truth in truths if FEWEST_ROWS <= truth.sum() <= len(truth) - FEWEST_ROWS]
    if np.isinf(values).mean() < WORDS:
        is_number = np.isfinite(values)
        areas = [
            max(_auroc(truth[is_number], values[is_number]), _auroc(truth, is_number))
            for truth in truths
        ]
    else:
        areas = _areas_of_words(cells, truths)
    return fmean(areas) if areas else math.nan


def _areas_of_words(
    cells: Sequence[str],
    truths: Sequence[ndarray],
) -> list[float]:
    """Return the AUROC of a column of words for each class, with each word ranked by its share of
    the class; empty if most words occur in one row only."""
    words = np.array(cells, object)
    _, place, counts = np.unique(words, return_inverse=True, return_counts=True)
    if len(counts) * FEWEST_ROWS > len(cells):
        return []
    areas = []
    for truth in truths:
        shares = np.bincount(place, truth) / counts
        areas.append(_auroc(truth, shares[place]))
    return areas


def _auroc(truth: ndarray, scores: ndarray) -> float:
    """Return the AUROC in its better direction; 0.5 for too few rows or equal scores."""
    from sklearn.metrics import roc_auc_score

    fewest = min(truth.sum(), (~truth).sum())
    if fewest < FEWEST_ROWS or scores.min() == scores.max():
        return 0.5
    area = float(roc_auc_score(truth, scores))
    return max(area, 1 - area)


# ---------------------------------------------------------------- all silos


def findings(
    summaries: Mapping[str, Summary],
    data: DataConfig,
) -> list[Finding]:
    """Compare the silos' summaries; return findings in the order of `KINDS`, the worst first.

    The last two kinds are no faults: the columns' shares of missing cells, and each silo's outcome
    (median target, or share of the rarest class).

    Args:
        summaries: the summaries by silo.
        data: names the label, and tells whether it holds classes.
    """
    label = data.label_column
    listed: list[Finding] = []
    for name in next(iter(summaries.values())):
        silos = {silo: columns[name] for silo, columns in summaries.items()}
        identifiers: list[Finding] = []
        if name == label:
            listed += _outcome(name, silos, data.task == "regression")
        else:
            listed += _leaks(name, silos)
            identifiers = _identifiers(name, silos)
        listed += identifiers or _units(name, silos)
        listed += _codings(name, silos)
        constant = {}
        for silo, column in silos.items():
            if column.different < 2 and column.rows >= FEWEST_ROWS:
                constant[silo] = 1.0
        listed += _flagged(name, "constant", constant, len(silos), CONSTANT)
        listed += _missing(name, silos)
    return sorted(listed, key=_rank)


def _rank(finding: Finding) -> tuple[int, float]:
    """Return the sort key of a finding: its kind, then its size. For units the size is the distance
    between the values relative to both."""
    size = finding.here
    if finding.finding == "units":
        elsewhere = finding.elsewhere
        size = abs(size - elsewhere) / (abs(size) + abs(elsewhere) or 1)
    return KINDS.index(finding.finding), -size


def _others(values: Mapping[str, float], silo: str) -> float:
    """Return the median of the other silos' values; NaN without others."""
    others = [value for name, value in values.items() if name != silo]
    return median(others) if others else math.nan


def _usual(values: Mapping[str, float], silo: str) -> float:
    """Return the usual value, with which `silo` is compared: the median of all silos if there are
    three or more, which one odd silo hardly moves; of two silos, the other's value."""
    if len(values) > 2:
        return median(values.values())
    return _others(values, silo)


def _flagged(
    name: str,
    kind: str,
    values: dict[str, float],
    silos: int,
    words: str,
) -> list[Finding]:
    """Return a finding for each silo that has a value, or one for `ALL` if all `silos` have."""
    if 1 < len(values) == silos:
        values = {ALL: fmean(values.values())}
    listed = []
    for silo, value in values.items():
        text = words.format(value)
        listed.append(
            Finding(
                name,
                silo,
                kind,
                value,
                math.nan,
                text,
            )
        )
    return listed


def _units(
    name: str,
    silos: Mapping[str, SiloColumn],
) -> Iterator[Finding]:
    """Find silos with another unit: their median is further from the usual median than the usual
    distance between the 5 % and 95 % quantiles, or their own distance differs from the usual one by
    a factor of more than `WIDER`."""
    if max(column.different for column in silos.values()) <= CODES:
        return
    measured = {silo: column for silo, column in silos.items() if column.quantiles}
    middles = {silo: column.middle for silo, column in measured.items()}
    spreads = {silo: column.spread for silo, column in measured.items()}
    for silo in measured:
        middle = middles[silo]
        spread = spreads[silo]
        usual_spread = _usual(spreads, silo)
        if abs(middle - _usual(middles, silo)) > usual_spread:
            elsewhere = _others(middles, silo)
            words = f"median {middle:.4g}, {elsewhere:.4g} elsewhere"
            yield Finding(
                name,
                silo,
                "units",
                middle,
                elsewhere,
                words,
            )
        elif max(spread, usual_spread) > WIDER * min(spread, usual_spread) > 0:
            words = f"5 to 95 % span {spread:.4g}, {usual_spread:.4g} elsewhere"
            yield Finding(
                name,
                silo,
                "units",
                spread,
                usual_spread,
                words,
            )


def _codings(
    name: str,
    silos: Mapping[str, SiloColumn],
) -> Iterator[Finding]:
    """Find silos that code a column otherwise: words where most silos have numbers, or frequent
    values that most silos lack although they have enough rows."""
    are_numbers = median(column.word_share for column in silos.values()) < WORDS
    if are_numbers and max(column.different for column in silos.values()) > CODES:
        for silo, column in silos.items():
            share = column.word_share
            if share >= WORDS:
                words = f"{share:.0%} of its cells are no numbers"
                yield Finding(
                    name,
                    silo,
                    "coding",
                    share,
                    0.0,
                    words,
                )
        return
    for silo, column in silos.items():
        rows_of_value = {}
        for value, count in column.categories.items():
            # so many filled cells hold the value 2 * LEAST times if it is as frequent as here
            filled_cells = 2 * LEAST * column.filled / count
            holders = [c for c in silos.values() if value in c.categories]
            other_columns = [c for c in silos.values() if c not in holders]
            other_columns = [c for c in other_columns if c.filled >= filled_cells]
            if len(other_columns) >= len(holders):
                rows_of_value[value] = count
        if rows_of_value:
            share = sum(rows_of_value.values()) / column.filled
            words = (
                f"{some(map(repr, rows_of_value))} in {share:.0%} of its rows, not at most others"
            )
            yield Finding(
                name,
                silo,
                "coding",
                share,
                0.0,
                words,
            )


def _missing(
    name: str,
    silos: Mapping[str, SiloColumn],
) -> list[Finding]:
    """Find the silo with the largest share of empty cells."""
    shares = {silo: column.missing_share for silo, column in silos.items()}
    worst_silo = max(shares, key=shares.__getitem__)
    share = shares[worst_silo]
    if not share:
        return []
    elsewhere = _others(shares, worst_silo)
    words = f"{share:.0%} missing"
    words += "" if math.isnan(elsewhere) else f", {elsewhere:.0%} elsewhere"
    return [
        Finding(
            name,
            worst_silo,
            "missing",
            share,
            elsewhere,
            words,
        )
    ]


def _identifiers(
    name: str,
    silos: Mapping[str, SiloColumn],
) -> list[Finding]:
    """Find columns of words or whole numbers whose values are all different."""
    different = {}
    for silo, column in silos.items():
        are_different = column.filled == column.different > 2 * FEWEST_ROWS
        if are_different and (column.word_share > WORDS or column.whole):
            different[silo] = float(column.different)
    return _flagged(name, "identifier", different, len(silos), "another value in every row")


def _leaks(
    name: str,
    silos: Mapping[str, SiloColumn],
) -> list[Finding]:
    predicts = {silo: column.predicts for silo, column in silos.items()}
    ranked = [area for area in predicts.values() if not math.isnan(area)]
    leaks = {silo: area for silo, area in predicts.items() if area >= RANKED}
    words = "alone it predicts the label (AUROC {:.3f})"
    return _flagged(name, "leak", leaks, len(ranked), words)


def _outcome(
    label: str,
    silos: Mapping[str, SiloColumn],
    are_numbers: bool,
) -> Iterator[Finding]:
    """Return each silo's median target, or its share of the class that is rarest over all silos."""
    counts = Counter[str]()
    for column in silos.values():
        counts.update(column.categories)
    rarest = min(counts, key=counts.__getitem__, default="")
    values = {}
    for silo, column in silos.items():
        share = column.categories.get(rarest, 0) / column.rows
        values[silo] = column.middle if are_numbers else share
    for silo, value in values.items():
        rows = silos[silo].rows
        count = f"{value:.1%}" if value else f"fewer than {LEAST}"
        words = f"{count} of {rows} rows are {rarest!r}"
        if are_numbers:
            words = f"median {value:.4g} of {rows} rows"
        yield Finding(
            label,
            silo,
            "outcome",
            value,
            _others(values, silo),
            words,
        )


# ---------------------------------------------------------------- a table here


def is_table(data: DataConfig) -> bool:
    """Return whether the data are a table, whose columns can be compared."""
    return source_name(data) == "table"


def check_table(data: DataConfig) -> tuple[list[Finding], dict[str, Summary]]:
    """Check the table `data.root`; return the findings, the worst first, and the summary of each
    silo.

    A table without groups is one silo. The rows of all silos are read for one further finding: a
    column that may identify persons with several rows.

    Raises:
        BadInput: there is no such file or column.
    """
    data = tables.spelled(data)
    cells = tables.read(data)
    label, group, features = tables.columns_of(data, list(cells))
    if len(features) == 1 and not data.one_hot:
        [only] = features
        are_words = np.isinf(_values(only, cells[only], data)).all()
        if are_words or data.tokens is not None:  # file names of images, or texts
            features = []
    silo_of_row = np.full(len(cells[label]), ALL)
    if group is not None:
        silo_of_row = np.array([composed(cell) for cell in cells[group]])
    summaries: dict[str, Summary] = {}
    for silo in dict.fromkeys(silo_of_row.tolist()):
        rows = np.flatnonzero(silo_of_row == silo)
        of_silo = {}
        for name in [*features, label]:
            of_silo[name] = [cells[name][row] for row in rows]
        summaries[silo] = summary(of_silo, data)
    listed = findings(summaries, data)
    if group is not None and data.unit_column is None:
        feature_cells = dict(cells)
        for name in (group, label):
            feature_cells.pop(name, None)
        identifier = units.identifier(feature_cells, np.unique(silo_of_row, return_inverse=True)[1])
        if identifier is not None:
            words = "looks like an identifier of persons with several rows: if so, data.unit_column"
            listed.append(
                Finding(
                    identifier,
                    ALL,
                    "identifier",
                    math.inf,
                    math.nan,
                    words,
                )
            )
    return sorted(listed, key=_rank), summaries


def warning_lines(data: DataConfig) -> list[str]:
    """Return a line for the worst finding of each kind in `WARNINGS`; empty if the data are no
    table."""
    if not is_table(data):
        return []
    try:
        warnings = [finding for finding in check_table(data)[0] if finding.finding in WARNINGS]
    except BadInput:  # the run itself refuses the data, or replaces them in a smoke run
        return []
    worst: dict[str, Finding] = {}
    for finding in warnings:
        worst.setdefault(finding.finding, finding)
    shown = []
    for finding in worst.values():
        silo = "" if finding.silo == ALL else f" at {finding.silo}"
        shown.append(f"data: column {finding.column!r}{silo}: {finding.numbers}")
    more = len(warnings) - len(worst)
    return [*shown, f"data: {more} more like these: fl-train check-data"] if more else shown
