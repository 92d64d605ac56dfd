"""What each silo tells of the columns of its own table, and what these summaries tell side by side:
other units and codings, identifiers, columns that give the label away.

`summary` reads one silo's rows; `findings` reads summaries alone, so that rows may stay where they
are.
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
"""In place of a silo, where a finding holds at every one."""
LEAST = 5
"""Rows of a value that a silo names: fewer may point to a person. A usual threshold of
statistical offices."""
MOST_VALUES = 50
"""Values of a column that a silo names, at most. Ours."""
CODES = 10
"""Different numbers of a column up to which they are taken for codes. Ours."""
FEWEST_ROWS = 10
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
class SiloColumn:
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
    """5, 50 and 95 % of the numbers; none of fewer than `FEWEST_ROWS`."""
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
    def missing_share(self) -> float:
        """Share of cells that are empty."""
        return self.missing / self.rows

    @property
    def word_share(self) -> float:
        """Share of filled cells that are no numbers."""
        return 1 - self.numbers / max(self.filled, 1)

    @property
    def middle(self) -> float:
        """The median of the numbers; NaN: there are too few."""
        return self.quantiles[1] if self.quantiles else math.nan

    @property
    def spread(self) -> float:
        """Between the outer quantiles."""
        return self.quantiles[2] - self.quantiles[0]


Summary = dict[str, SiloColumn]
"""Of one silo, by column."""


class Finding(NamedTuple):
    """What is odd about a column."""

    column: str
    silo: str
    finding: str
    """Its kind, of `KINDS`."""
    here: float
    elsewhere: float
    """The median of the other silos; NaN: it is not compared."""
    numbers: str
    """Both values, in words."""


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
    cells: Sequence[str],
    values: ndarray,
    labels: Sequence[str],
    data: DataConfig,
) -> float:
    """Returns `SiloColumn.predicts`; an empty cell is a value like others: that it is empty may
    tell."""
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
    """AUROC of a column of words, each ranked by its rows' labels; none where most words are of
    one row."""
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
    """In whichever direction is better; 0.5 of too few rows, or of equal scores."""
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
    """By which findings are ordered: their kind, then the worst; of units how far apart, relative
    to both."""
    here = finding.here
    if finding.finding == "units":
        elsewhere = finding.elsewhere
        here = abs(here - elsewhere) / (abs(here) + abs(elsewhere) or 1)
    return KINDS.index(finding.finding), -here


def _others(values: Mapping[str, float], silo: str) -> float:
    """The median of the other silos' values; NaN: there are none."""
    others = [value for name, value in values.items() if name != silo]
    return median(others) if others else math.nan


def _usual(values: Mapping[str, float], silo: str) -> float:
    """The median of the silos' values, which one of three cannot move; of two, the other's."""
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
    """A finding for each silo that has a value, or one where all `silos` have."""
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
    """Medians further apart than the others' values, or spreads of another size."""
    if max(column.different for column in silos.values()) <= CODES:
        return
    measured = {silo: column for silo, column in silos.items() if column.quantiles}
    middles = {silo: column.middle for silo, column in measured.items()}
    spreads = {silo: column.spread for silo, column in measured.items()}
    for silo in measured:
        middle = middles[silo]
        spread = spreads[silo]
        usual = _usual(spreads, silo)
        if abs(middle - _usual(middles, silo)) > usual:
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
        elif max(spread, usual) > WIDER * min(spread, usual) > 0:
            words = f"5 to 95 % span {spread:.4g}, {usual:.4g} elsewhere"
            yield Finding(
                name,
                silo,
                "units",
                spread,
                usual,
                words,
            )


def _codings(
    name: str,
    silos: Mapping[str, SiloColumn],
) -> Iterator[Finding]:
    """Words among numbers, or values that most silos would have too, if they were as frequent
    there."""
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
        alone = {}
        for value, count in column.categories.items():
            # of so many filled cells 2 * LEAST would hold it, were it as frequent as here
            enough = 2 * LEAST * column.filled / count
            holders = [c for c in silos.values() if value in c.categories]
            others = [c for c in silos.values() if c not in holders]
            others = [c for c in others if c.filled >= enough]
            if len(others) >= len(holders):
                alone[value] = count
        if alone:
            share = sum(alone.values()) / column.filled
            words = f"{some(map(repr, alone))} in {share:.0%} of its rows, not at most others"
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
    """The silo where most is missing, beside the others."""
    shares = {silo: column.missing_share for silo, column in silos.items()}
    most = max(shares, key=shares.__getitem__)
    share = shares[most]
    if not share:
        return []
    elsewhere = _others(shares, most)
    words = f"{share:.0%} missing"
    words += "" if math.isnan(elsewhere) else f", {elsewhere:.0%} elsewhere"
    return [
        Finding(
            name,
            most,
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
    """Columns of words or whole numbers, of which no two rows have the same."""
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
    """For each silo the median target, or the share of the class that is rarest over all."""
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
    """Whether the data are a table, whose columns can be compared."""
    return source_name(data) == "table"


def checked(data: DataConfig) -> tuple[list[Finding], dict[str, Summary]]:
    """Returns findings of the table `data.root`, the worst first, and each silo's summary (of a
    table without groups, one). One more finding, for which the rows of all silos are read, names a
    column that may be of persons with several rows.

    Raises:
        BadInput: no such file or column.
    """
    data = tables.spelled(data)
    cells = tables.read(data)
    label, group, features = tables.columns_of(data, list(cells))
    if len(features) == 1 and not data.one_hot:
        [only] = features
        are_words = np.isinf(_values(only, cells[only], data)).all()
        if are_words or data.tokens is not None:  # images by their names, or texts
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
        others = dict(cells)
        for name in (group, label):
            others.pop(name, None)
        person = units.identifier(others, np.unique(silo_of_row, return_inverse=True)[1])
        if person is not None:
            words = "looks like an identifier of persons with several rows: if so, data.unit_column"
            listed.append(
                Finding(
                    person,
                    ALL,
                    "identifier",
                    math.inf,
                    math.nan,
                    words,
                )
            )
    return sorted(listed, key=_rank), summaries


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
    shown = []
    for finding in worst.values():
        silo = "" if finding.silo == ALL else f" at {finding.silo}"
        shown.append(f"data: column {finding.column!r}{silo}: {finding.numbers}")
    more = len(warnings) - len(worst)
    return [*shown, f"data: {more} more like these: fl-train check-data"] if more else shown
