"""A study of a paper's table, run again, and its numbers beside the paper's, cell by cell, with a
verdict on each."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame, isna

from fl_lightning.configuration.config import check, flat
from fl_lightning.configuration.files import Layer
from fl_lightning.configuration.resolve import to_settings
from fl_lightning.foundation import command
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.foundation.metric import ACCURACY
from fl_lightning.lab import statistics
from fl_lightning.lab.report.words import NONE
from fl_lightning.lab.study import studyfile
from fl_lightning.lab.study.comparison import Comparison, write
from fl_lightning.lab.study.folder import PLACE, StudyFolder, default
from fl_lightning.lab.study.grid import Study
from fl_lightning.lab.study.launch import (
    Selection,
    StudyOptions,
    check_over,
    resolved,
    start,
)
from fl_lightning.lab.study.listing import Listing
from fl_lightning.lab.study.papers import Ours, Printed, cells_of, reason
from fl_lightning.lab.study.part import part_of
from fl_lightning.results.result import RunResult

AGREES, DIFFERS, OPEN = (
    "agrees within the spread",
    "differs",
    "too few seeds to tell",
)
ONE, NOT_RUN = "one seed: no verdict", "not run"
MARK = "fl-train reproduce"
VERDICT = ["verdict", "mean", "std", "low", "high"]
OURS = ["label", "figure", "kind", "column"]
COLUMNS = [
    *(
        "source",
        "dataset",
        "setting",
        "method",
        "metric",
        "value",
        "std",
        "runs",
        *OURS,
    ),
    *("seeds", "mean", "low", "high", "verdict", "why", "written"),
]
"""Of the numbers in CSV and JSON; `value` is the paper's, `mean` and `std` are ours."""
HEADS = {
    "method": "method",
    "paper": "paper",
    "ours": "ours ± std",
    "seeds": "seeds",
    "difference": "difference",
    "interval": "95 % interval",
    "verdict": "verdict",
    "is": "ours is",
}


# ---------------------------------------------------------------- the command


def reproduce(
    name: str,
    over: list[Layer],
    chosen: Selection,
    options: StudyOptions,
    rounds: int | None,
    form: str,
    no_run: bool,
) -> Comparison:
    """Runs what is missing of a study, and returns its numbers beside the paper's.

    Args:
        name: of the study, or its file.
        over: settings over those of its base.
        chosen: methods, seeds and settings that are to be run; None: all.
        options: its folder, and how it is run.
        rounds: in place of the study's.
        form: of the text.
        no_run: whether to run nothing.

    Raises:
        RunFailed: runs have failed; the table of all else has been printed.
    """
    check_over(over)
    study = Study.of(studyfile.read(name))
    cells = cells_of(study)
    failure: RunFailed | None = None
    folder = StudyFolder(Path(options.out))
    if no_run:
        check("out", options.out, bool(folder), "there is no study yet; without --no-run it is run")
        keys = zip(
            ("methods", "seeds", "settings", "rounds"),
            (*chosen, rounds),
            strict=True,
        )
        for key, value in keys:
            check(
                key,
                value,
                value is None,
                "it says what to run, and no-run runs nothing",
            )
    else:
        length: list[Layer] = [] if rounds is None else [{"federation": {"rounds": rounds}}]
        definition, part = part_of(study, *chosen)
        line = command.line("reproduce", name)
        with contextlib.redirect_stdout(sys.stderr):  # stdout is the table's
            try:
                print(
                    start(
                        definition,
                        [*over, *length],
                        options,
                        line,
                        part,
                    )
                )
            except RunFailed as error:
                failure = error
    comparison = write(_beside_paper(study, cells, folder, name), form)
    if failure is not None:
        print(comparison)
        raise failure
    return comparison


def _beside_paper(
    study: Study,
    cells: list[Printed],
    folder: StudyFolder,
    name: str,
) -> Listing:
    changes = _changed(study, folder)
    notes = [*changes, *_other_seeds(study, folder)]
    title = str((study.paper or {}).get("title") or name)
    if notes:
        title += "; NOT AS THE STUDY IS WRITTEN, and the verdicts are of this alone: "
        title += ", ".join(notes)
    return listing_of(
        beside(cells, folder, reasons=not changes),
        title,
        _missing(folder),
    )


def _changed(study: Study, folder: StudyFolder) -> list[str]:
    """The keys whose values differ between the base of what was run and the study's."""
    base, _ = resolved(study)
    written = dict(flat(to_settings(base)))
    run = dict(flat(folder.definition().get("base")))
    changes = []
    for key in dict.fromkeys([*written, *run]):
        value = run.get(key, default(key))
        may_differ = key.startswith((*PLACE, "fabric.", "seed"))
        if written.get(key) != value and not may_differ:
            changes.append(f"{key} {value} (the study: {written.get(key)})")
    return changes


def _other_seeds(study: Study, folder: StudyFolder) -> list[str]:
    """A note where the seeds that have been run are others than the study's."""
    seeds = {int(cell["seed"]) for cell in folder.cells() if folder.finished(cell["folder"])}
    differ = bool(seeds) and seeds != set(study.seeds)
    return [f"seeds {_listed(sorted(seeds))} (the study: {_listed(study.seeds)})"] if differ else []


def _missing(folder: StudyFolder) -> list[str]:
    names = folder.run_names()
    missing = sum(not folder.finished(name) for name in names)
    return [f"unfinished: {missing} of {len(names)} runs"] if missing else []


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


# ---------------------------------------------------------------- the numbers


def verdict_on(
    ours: Sequence[float],
    printed: float,
    std: float | None,
    runs: int,
    decimals: int = 6,
) -> dict[str, Any]:
    """The verdict on our numbers, one a seed, beside a printed mean: `VERDICT`.

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
    unknown = dict.fromkeys(VERDICT)
    if not ours:
        return unknown | {"verdict": NOT_RUN}
    mean = float(np.mean(ours))
    if len(ours) == 1:
        return unknown | {"verdict": ONE, "mean": mean}
    spread = float(np.std(ours, ddof=1))
    low, high = statistics.welch_interval(ours, printed, std, runs)
    grain = 0.5 * 10.0**-decimals
    of_both = math.hypot(spread, spread if std is None else std)
    if low > grain or high < -grain:
        verdict = DIFFERS
    elif abs(mean - printed) <= of_both + grain:
        verdict = AGREES
    else:
        verdict = OPEN
    return {
        "verdict": verdict,
        "mean": mean,
        "std": spread,
        "low": low,
        "high": high,
    }


def beside(
    cells: Sequence[Printed],
    folder: StudyFolder,
    reasons: bool = True,
) -> DataFrame:
    """A row for each of a paper's cells, with what the runs of a study that have ended come to.

    `reasons`: the runs are those for which reasons were found why they differ.
    """
    table = DataFrame(folder.cells())
    runs = folder.results()
    table = table[table.folder.isin(runs)].assign(run=table.folder.map(runs))
    rows = []
    for cell in cells:
        numbers = [] if cell.ours is None else _numbers(cell.ours, table)
        values = [number for number in numbers if not math.isnan(number)]
        row = verdict_on(
            values,
            cell.value,
            cell.std,
            cell.runs,
            cell.decimals,
        )
        why = written = ""
        if row["verdict"] == NOT_RUN:
            why = cell.absent or ("its runs have no such number" if numbers else "")
        elif row["verdict"] == DIFFERS and reasons:
            why, written = reason(cell)
        ours = {name: getattr(cell.ours, name, None) for name in OURS}
        row |= {
            "printed_std": cell.std,
            "seeds": len(values),
            "why": why,
            "written": written,
        }
        rows.append(
            {
                **vars(cell),
                **ours,
                **row,
            }
        )
    return DataFrame(rows).astype(dict.fromkeys(VERDICT[1:], float))


def _numbers(ours: Ours, table: DataFrame) -> list[float]:
    """Our number of each seed, in the paper's unit."""
    of_setting = table[[ours.setting.items() <= setting.items() for setting in table.setting]]
    alone = of_setting[of_setting.label == ours.alone].set_index("seed").run
    of_row = of_setting[of_setting.label == ours.label]
    if "judge" in of_row and ours.kind is None:
        judges = [*of_row.judge.dropna(), None]
        ours = replace(ours, kind=judges[0])
    runs = zip(of_row.run, of_row.seed, strict=True)
    return [ours.unit * figure(ours, run, alone.get(seed)) for run, seed in runs]


def figure(
    ours: Ours,
    run: RunResult,
    alone: RunResult | None = None,
) -> float:
    """The number of a run that a paper's cell is compared with, by `ours.figure`; NaN where it has
    none. `alone`: training alone with the same seed."""
    kind = ours.kind or run.judge or ""
    column = ours.column or f"accuracy_{kind}"
    if ours.figure == "best":
        return run.best(column)[0]
    if ours.figure == "bests":
        return run.mean_of_bests(column)[0]
    if ours.figure == "final":
        scores, _ = run.scores(kind)
        return _mean(scores.values())
    if ours.figure in ("relative", "transfer"):
        others = _clients(alone, f"accuracy_{alone.judge}") if alone else {}
        return _beside_alone(ours.figure, _clients(run, column), others)
    rows = run.judged(column)
    if ours.figure == "mean":
        return _mean(row[column] for row in rows)
    if ours.figure == "validation":
        chosen = run.best("validation_accuracy")[1]
        rows = [row for row in rows if row["round"] == chosen]
    return rows[-1][column] if rows else math.nan


def _clients(run: RunResult, column: str) -> dict[int, float]:
    """Each client's score in the round that is best on validation data."""
    chosen = run.best("validation_accuracy")[1]
    rows = [row for row in run.rows("clients") if row["round"] == chosen and column in row]
    return {int(row["client"]): row[column] for row in rows}


def _beside_alone(
    name: str,
    ours: Mapping[int, float],
    alone: Mapping[int, float],
) -> float:
    """FEDORA's R-Acc (mean of (accuracy - alone) / alone), or its ratio of positive transfer."""
    clients = sorted(ours.keys() & alone.keys())
    pairs = [(ours[client], alone[client]) for client in clients]
    if name == "transfer":
        values: list[float] = [score >= score_alone for score, score_alone in pairs]
    else:
        values = [ACCURACY.gain(*pair) for pair in pairs if pair[1] > 0]
    return sum(values) / len(values) if values else math.nan


def _mean(values: Iterable[float]) -> float:
    """NaN where there are none."""
    numbers = list(values)
    return float(np.mean(numbers)) if numbers else math.nan


# ---------------------------------------------------------------- the listing


def listing_of(
    lines: DataFrame,
    title: str,
    notes: Sequence[str],
) -> Listing:
    """A block for each of the paper's data sets, settings and metrics."""
    counts = lines.verdict.value_counts()
    verdicts = [verdict for verdict in (AGREES, DIFFERS, OPEN, ONE, NOT_RUN) if verdict in counts]
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in verdicts)
    notes = [*notes, f"{len(lines)} cells: {summary}", *_reasons(lines)]
    titles = [f"{row.dataset}; {row.setting}; {row.metric}" for row in lines.itertuples()]
    words = DataFrame([_words(row) for row in lines.itertuples()], index=titles)
    words = words.loc[list(dict.fromkeys(titles))]
    more = {"title": title, "notes": notes}
    return Listing(
        MARK,
        lines[COLUMNS],
        words,
        HEADS,
        notes,
        more,
        title,
    )


def _reasons(lines: DataFrame) -> list[str]:
    """Why cells differ, or have not been run, each reason once with the methods that it is of."""
    explained = lines[lines.why != ""].groupby(
        [
            "verdict",
            "why",
            "written",
        ],
        sort=False,
    )
    sentences = []
    for (verdict, why, written), methods in explained.method:
        place = f" ({written})" if written else ""
        sentences.append(f"{', '.join(methods.unique())} ({verdict}): {why}{place}")
    return sentences


def _words(row: Any) -> dict[str, str]:
    """A line in words, by column."""
    digits = row.decimals
    has_run = not isna(row.mean)
    spread = "" if isna(row.std) else f" ± {row.std:.{digits}f}"
    printed = "" if isna(row.printed_std) else f" ± {row.printed_std:.{digits}f}"
    interval = f"[{row.low:+.{digits}f}, {row.high:+.{digits}f}]"
    return {
        "method": row.method,
        "paper": f"{row.value:.{digits}f}{printed}",
        "ours": f"{row.mean:.{digits}f}{spread}" if has_run else NONE,
        "seeds": str(row.seeds),
        "difference": f"{row.mean - row.value:+.{digits}f}" if has_run else NONE,
        "interval": NONE if isna(row.low) else interval,
        "verdict": row.verdict,
        "is": row.ours.words() if row.ours else NONE,
    }
