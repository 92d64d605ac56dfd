"""Trains a study of a paper's table, and compares its numbers with the printed ones, with a verdict
for each cell."""

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
from fl_lightning.lab.study.comparison import Comparison, write_listing
from fl_lightning.lab.study.folder import PLACE, StudyFolder, earlier_default
from fl_lightning.lab.study.grid import Study
from fl_lightning.lab.study.launch import (
    Selection,
    StudyOptions,
    check_overrides,
    resolved,
    run_study,
)
from fl_lightning.lab.study.listing import Listing
from fl_lightning.lab.study.papers import OurNumber, Printed, cells_of, reason_for
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
"""Keys of a verdict."""
OURS = ["label", "figure", "kind", "column"]
"""Fields of `OurNumber` in the table."""
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
"""Columns of the CSV and JSON; `value` is the paper's number, `mean` and `std` are ours."""
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
"""Heads of the columns, by key."""


# ---------------------------------------------------------------- the command


def reproduce(
    name: str,
    overrides: list[Layer],
    chosen: Selection,
    options: StudyOptions,
    rounds: int | None,
    form: str,
    no_run: bool,
) -> Comparison:
    """Trains the runs of a study that have not finished, and compares its numbers with the paper's.

    Args:
        name: name or file of the study.
        overrides: settings that override the study's base.
        chosen: the methods, seeds and settings to run, as texts of the command line.
        options: the folder, and how runs are trained.
        rounds: number of rounds; None: the study's.
        form: format of the text, a key of `listing.FORMATS`.
        no_run: compare the runs that are there, and train none.

    Raises:
        RunFailed: some runs failed; the table of the others was printed.
    """
    check_overrides(overrides)
    study = Study.of(studyfile.read(name))
    cells = cells_of(study)
    failure: RunFailed | None = None
    folder = StudyFolder(Path(options.out))
    if no_run:
        check(
            "out",
            options.out,
            bool(folder),
            "there is no study in it: leave --no-run out to train one",
        )
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
                "it selects what to train: leave it out with --no-run",
            )
    else:
        length: list[Layer] = [] if rounds is None else [{"federation": {"rounds": rounds}}]
        definition, part = part_of(study, *chosen)
        line = command.line("reproduce", name)
        with contextlib.redirect_stdout(sys.stderr):  # stdout is the table's
            try:
                print(
                    run_study(
                        definition,
                        [*overrides, *length],
                        options,
                        line,
                        part,
                    )
                )
            except RunFailed as error:
                failure = error
    comparison = write_listing(_listing_of_study(study, cells, folder, name), form)
    if failure is not None:
        print(comparison)
        raise failure
    return comparison


def _listing_of_study(
    study: Study,
    cells: list[Printed],
    folder: StudyFolder,
    name: str,
) -> Listing:
    """The table, whose title says how the runs differ from the study as written."""
    changes = _changed_keys(study, folder)
    notes = [*changes, *_changed_seeds(study, folder)]
    title = str((study.paper or {}).get("title") or name)
    if notes:
        title += "; NOT AS THE STUDY IS WRITTEN, and the verdicts are of this alone: "
        title += ", ".join(notes)
    return reproduction_listing(
        compare_with_paper(cells, folder, with_reasons=not changes),
        title,
        _unfinished(folder),
    )


def _changed_keys(study: Study, folder: StudyFolder) -> list[str]:
    """The keys of the base whose values differ between the folder's runs and the study as
    written."""
    base, _ = resolved(study)
    written = dict(flat(to_settings(base)))
    run = dict(flat(folder.definition().get("base")))
    changes = []
    for key in dict.fromkeys([*written, *run]):
        value = run.get(key, earlier_default(key))
        may_differ = key.startswith((*PLACE, "fabric.", "seed"))
        if written.get(key) != value and not may_differ:
            changes.append(f"{key} {value} (the study: {written.get(key)})")
    return changes


def _changed_seeds(study: Study, folder: StudyFolder) -> list[str]:
    """A note if other seeds have finished than the study names."""
    seeds = {int(cell["seed"]) for cell in folder.cells() if folder.finished(cell["folder"])}
    has_other_seeds = bool(seeds) and seeds != set(study.seeds)
    return (
        [f"seeds {_listed(sorted(seeds))} (the study: {_listed(study.seeds)})"]
        if has_other_seeds
        else []
    )


def _unfinished(folder: StudyFolder) -> list[str]:
    """A note on runs that have not finished."""
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
    """Compare our numbers with a printed mean.

    They *differ* if Welch's interval for the difference of the means excludes 0. They *agree* if it
    includes 0 and the difference is at most the spread of single runs, sqrt(std_ours² +
    std_paper²). Otherwise there are too few seeds to tell. Half a unit of the last printed digit is
    tolerated.

    Args:
        ours: our numbers, one for each seed, in the paper's unit.
        printed: the paper's mean.
        std: standard deviation of the paper's runs; None: not printed, and taken to equal ours.
        runs: number of the paper's runs.
        decimals: decimals of the printed number.

    Returns:
        `verdict`; `mean` and `std` of ours; `low` and `high` of the interval. None where unknown.
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


def compare_with_paper(
    cells: Sequence[Printed],
    folder: StudyFolder,
    with_reasons: bool = True,
) -> DataFrame:
    """A row for each printed number, with ours and the verdict.

    Args:
        cells: the printed numbers.
        folder: the study's folder, of which finished runs count.
        with_reasons: whether to add known reasons for differences; they hold only for runs with the
            settings of the study file.
    """
    table = DataFrame(folder.cells())
    runs = folder.intact_runs()
    table = table[table.folder.isin(runs)].assign(run=table.folder.map(runs))
    rows = []
    for cell in cells:
        numbers = [] if cell.ours is None else _our_numbers(cell.ours, table)
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
        elif row["verdict"] == DIFFERS and with_reasons:
            why, written = reason_for(cell)
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


def _our_numbers(ours: OurNumber, table: DataFrame) -> list[float]:
    """Our number for each seed, in the paper's unit."""
    of_setting = table[[ours.setting.items() <= setting.items() for setting in table.setting]]
    alone = of_setting[of_setting.label == ours.alone].set_index("seed").run
    of_row = of_setting[of_setting.label == ours.label]
    if "judge" in of_row and ours.kind is None:
        judges = [*of_row.judge.dropna(), None]
        ours = replace(ours, kind=judges[0])
    runs = zip(of_row.run, of_row.seed, strict=True)
    return [ours.unit * number_of_run(ours, run, alone.get(seed)) for run, seed in runs]


def number_of_run(
    ours: OurNumber,
    run: RunResult,
    alone: RunResult | None = None,
) -> float:
    """Read from a run the number to compare with a printed one; NaN if the run has none.

    Args:
        ours: how to read the number.
        run: the run.
        alone: the run of training alone with the same seed; only `relative` and `transfer` of
            `papers.FIGURES` need it, which compare each client with training alone.
    """
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
        scores_alone = _scores_at_best(alone, f"accuracy_{alone.judge}") if alone else {}
        return _gain_over_alone(ours.figure, _scores_at_best(run, column), scores_alone)
    rows = run.rows_with(column)
    if ours.figure == "mean":
        return _mean(row[column] for row in rows)
    if ours.figure == "validation":
        chosen = run.best("validation_accuracy")[1]
        rows = [row for row in rows if row["round"] == chosen]
    return rows[-1][column] if rows else math.nan


def _scores_at_best(run: RunResult, column: str) -> dict[int, float]:
    """Each client's score in the round with the best validation accuracy."""
    chosen = run.best("validation_accuracy")[1]
    rows = [row for row in run.rows("clients") if row["round"] == chosen and column in row]
    return {int(row["client"]): row[column] for row in rows}


def _gain_over_alone(
    name: str,
    ours: Mapping[int, float],
    alone: Mapping[int, float],
) -> float:
    """Two figures of the paper on FEDORA: for `transfer` the share of clients whose accuracy is at
    least that of training alone, for `relative` (R-Acc) the mean over clients of
    (accuracy - alone) / alone.

    Args:
        name: the figure.
        ours: accuracy by client.
        alone: accuracy of training alone by client.
    """
    clients = sorted(ours.keys() & alone.keys())
    pairs = [(ours[client], alone[client]) for client in clients]
    if name == "transfer":
        values: list[float] = [score >= score_alone for score, score_alone in pairs]
    else:
        values = [ACCURACY.gain(*pair) for pair in pairs if pair[1] > 0]
    return sum(values) / len(values) if values else math.nan


def _mean(values: Iterable[float]) -> float:
    """The mean, NaN without values."""
    numbers = list(values)
    return float(np.mean(numbers)) if numbers else math.nan


# ---------------------------------------------------------------- the listing


def reproduction_listing(
    lines: DataFrame,
    title: str,
    notes: Sequence[str],
) -> Listing:
    """The table, in blocks of data set, setting and metric.

    Args:
        lines: the rows of `compare_with_paper`.
        title: line above the table.
        notes: lines below it.
    """
    counts = lines.verdict.value_counts()
    verdicts = [verdict for verdict in (AGREES, DIFFERS, OPEN, ONE, NOT_RUN) if verdict in counts]
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in verdicts)
    notes = [*notes, f"{len(lines)} cells: {summary}", *_reason_notes(lines)]
    titles = [f"{row.dataset}; {row.setting}; {row.metric}" for row in lines.itertuples()]
    words = DataFrame([_row_texts(row) for row in lines.itertuples()], index=titles)
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


def _reason_notes(lines: DataFrame) -> list[str]:
    """Each reason why cells differ or have not been run, with their methods."""
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


def _row_texts(row: Any) -> dict[str, str]:
    """A row as texts, by column."""
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
        "is": row.ours.describe() if row.ours else NONE,
    }
