"""A study's numbers beside those that a paper prints, cell by cell, each with a verdict."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from fl_lightning.foundation.metric import ACCURACY
from fl_lightning.lab.report.words import NONE
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.lab.study.grid import by_key
from fl_lightning.lab.study.papers import Cell, Ours, reason
from fl_lightning.lab.study.sheet import Block, Sheet
from fl_lightning.lab.study.statistics import LEVEL
from fl_lightning.results.result import RunResult

AGREES, DIFFERS, OPEN = "agrees within the spread", "differs", "too few seeds to tell"
ONE, NOT_RUN = "one seed: no verdict", "not run"
MARK = "fl-train reproduce"
HEAD = [
    "method",
    "paper",
    "ours ± std",
    "seeds",
    "difference",
    "95 % interval",
    "verdict",
    "ours is",
]


@dataclass(frozen=True)
class Verdict:
    """Whether our runs and a printed number can be of the same experiment."""

    words: str
    mean: float | None = None
    std: float | None = None
    """Over seeds (n - 1)."""
    low: float | None = None
    high: float | None = None
    """Ends of the interval of ours less the paper's."""


@dataclass(frozen=True)
class Line:
    """A cell of the paper, and our number for it, in the paper's unit."""

    cell: Cell
    seeds: int
    verdict: Verdict
    why: str
    """Why it is not run, or differs, where that was found."""
    written: str
    """Where that is written."""


def judge(
    ours: Sequence[float], printed: float, std: float | None, runs: int, decimals: int = 6
) -> Verdict:
    """The verdict on our numbers, one a seed, beside a printed mean.

    They differ where Welch's interval for the difference of two means leaves out 0, and agree where
    it does not and the difference is within the spread of single runs (the root of the sum of both
    variances); between the two it cannot be told. Where the paper prints no spread, a run of its
    spreads as ours. Half a unit of the last printed digit is forgiven.

    Args:
        ours: in the paper's unit.
        std: of the paper's runs; None: not printed.
        runs: that the printed number is the mean of.
        decimals: of the printed number.
    """
    if not ours:
        return Verdict(NOT_RUN)
    mean, count = float(np.mean(ours)), len(ours)
    if count == 1:
        return Verdict(ONE, mean)
    spread = float(np.std(ours, ddof=1))
    parts = [
        (spread**2 / count, count),
        ((spread if std is None else std) ** 2 / runs, runs if std is not None else 1),
    ]
    error = math.sqrt(sum(part for part, _ in parts))
    below = sum(part**2 / (number - 1) for part, number in parts if number > 1)
    freedom = (count - 1) if std is None or not below else error**4 / below
    reach = float(stats.t.ppf(1 - LEVEL / 2, freedom)) * error
    low, high = mean - printed - reach, mean - printed + reach
    grain = 0.5 * 10.0**-decimals
    near = abs(mean - printed) <= math.hypot(spread, spread if std is None else std) + grain
    words = DIFFERS if low > grain or high < -grain else AGREES if near else OPEN
    return Verdict(words, mean, spread, low, high)


def beside(cells: Sequence[Cell], folder: StudyFolder, reasons: bool = True) -> list[Line]:
    """What the runs of a study that have ended come to, beside a paper's cells.

    `reasons`: the runs are those for which reasons were found why they differ.
    """
    table, runs = folder.cells(), folder.results()
    return [_line(cell, table, runs, reasons) for cell in cells]


def _line(
    cell: Cell, table: list[dict[str, Any]], runs: Mapping[str, RunResult], reasons: bool
) -> Line:
    figures: list[float] = []
    if ours := cell.ours:
        named = next((row.get("judge") for row in table if row["label"] == ours.label), None)
        ours = dataclasses.replace(ours, kind=ours.kind or named)
        of = [
            row
            for row in table
            if row["folder"] in runs and ours.setting.items() <= row["setting"].items()
        ]
        alone = {row["seed"]: runs[row["folder"]] for row in of if row["label"] == ours.alone}
        by_seed = {row["seed"]: runs[row["folder"]] for row in of if row["label"] == ours.label}
        figures = [ours.unit * figure(ours, run, alone.get(seed)) for seed, run in by_seed.items()]
    values = [value for value in figures if not math.isnan(value)]
    verdict = judge(values, cell.value, cell.std, cell.runs, cell.decimals)
    why = reason(cell) if reasons and verdict.words == DIFFERS else ("", "")
    if verdict.words == NOT_RUN:
        why = cell.absent or ("its runs have no such number" if figures else ""), ""
    return Line(cell, len(values), verdict, *why)


def figure(ours: Ours, run: RunResult, alone: RunResult | None = None) -> float:
    """One number of one run; NaN where it has none. `alone`: training alone with the same seed."""
    kind = ours.kind or run.judge or ""
    column = ours.column or f"accuracy_{kind}"
    if ours.figure == "best":
        return run.best(column)[0]
    if ours.figure == "bests":
        return run.mean_of_bests(column)[0]
    if ours.figure == "final":
        return float(np.mean([*run.scores(kind)[0].values()] or [math.nan]))
    if ours.figure in ("relative", "transfer"):
        others = _clients(alone, f"accuracy_{alone.judge}") if alone else {}
        return _beside_alone(ours.figure, _clients(run, column), others)
    rows = run.judged(column)
    if ours.figure == "mean":
        return float(np.mean([row[column] for row in rows] or [math.nan]))
    if ours.figure == "validation":
        chosen = run.best("validation_accuracy")[1]
        rows = [row for row in rows if row["round"] == chosen]
    return rows[-1][column] if rows else math.nan


def _clients(run: RunResult, column: str) -> dict[int, float]:
    """Each client's score in the round that is best on validation data."""
    chosen = run.best("validation_accuracy")[1]
    return {
        int(row["client"]): row[column]
        for row in run.rows("clients")
        if row["round"] == chosen and column in row
    }


def _beside_alone(name: str, ours: Mapping[int, float], alone: Mapping[int, float]) -> float:
    """FEDORA's R-Acc (mean of (accuracy - alone) / alone), or its ratio of positive transfer."""
    pairs = [(ours[client], alone[client]) for client in sorted(ours.keys() & alone.keys())]
    gains = [ACCURACY.gain(mine, other) for mine, other in pairs if other > 0]
    values = [mine >= other for mine, other in pairs] if name == "transfer" else gains
    return sum(values) / len(values) if values else math.nan


# ---------------------------------------------------------------- the sheet


def sheet_of(lines: Sequence[Line], title: str, notes: Sequence[str]) -> Sheet:
    """A block for each of the paper's data sets, settings and metrics."""
    groups = by_key(
        lines, lambda line: f"{line.cell.dataset}; {line.cell.setting}; {line.cell.metric}"
    )
    blocks = [
        Block(name, list(map(_cells, those)), list(map(_span, those)))
        for name, those in groups.items()
    ]
    counts = Counter(line.verdict.words for line in lines)
    summary = ", ".join(
        f"{counts[words]} {words}"
        for words in (AGREES, DIFFERS, OPEN, ONE, NOT_RUN)
        if counts[words]
    )
    below = [*notes, f"{len(lines)} cells: {summary}", *_whys(lines)]
    return Sheet(
        MARK,
        HEAD,
        blocks,
        below,
        [_record(line) for line in lines],
        {"title": title, "notes": below},
        title,
    )


def _whys(lines: Sequence[Line]) -> list[str]:
    """Why cells differ, or have not been run, each reason once with the methods that it is of."""
    reasons = by_key(
        (one for one in lines if one.why), lambda one: (one.verdict.words, one.why, one.written)
    )
    methods = [
        ", ".join(dict.fromkeys(line.cell.method for line in those)) for those in reasons.values()
    ]
    return [
        f"{of} ({verdict}): {why}{f' ({written})' * bool(written)}"
        for of, (verdict, why, written) in zip(methods, reasons, strict=True)
    ]


def _cells(line: Line) -> list[str]:
    """In the order of `HEAD`."""
    cell, verdict = line.cell, line.verdict
    digits = cell.decimals
    mean, std = verdict.mean, verdict.std
    shown = (
        NONE
        if mean is None
        else f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")
    )
    span = (
        NONE if verdict.low is None else f"[{verdict.low:+.{digits}f}, {verdict.high:+.{digits}f}]"
    )
    return [
        cell.method,
        f"{cell.value:.{digits}f}" + ("" if cell.std is None else f" ± {cell.std:.{digits}f}"),
        shown,
        str(line.seeds),
        NONE if mean is None else f"{mean - cell.value:+.{digits}f}",
        span,
        verdict.words,
        cell.ours.words() if cell.ours else NONE,
    ]


def _span(line: Line) -> tuple[float, float, float] | None:
    verdict = line.verdict
    if verdict.low is None or verdict.high is None or verdict.mean is None:
        return None
    return verdict.low, verdict.mean - line.cell.value, verdict.high


def _record(line: Line) -> dict[str, Any]:
    cell, verdict = line.cell, line.verdict
    own = {name: getattr(cell.ours, name, None) for name in ("label", "figure", "kind", "column")}
    printed = {
        name: value
        for name, value in vars(cell).items()
        if name not in ("ours", "absent", "decimals")
    }
    rest = {"verdict": verdict.words, "why": line.why, "written": line.written}
    numbers = {
        name: value for name, value in dataclasses.asdict(verdict).items() if name != "words"
    }
    return {**printed, **own, "seeds": line.seeds, **numbers, **rest}
