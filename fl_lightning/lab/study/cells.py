"""Finished runs, of a study or not, as cells of a table: a method, in a setting, with a seed, by a
judge."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pandas import DataFrame

from fl_lightning.configuration.config import check, flat
from fl_lightning.foundation.errors import BadInput, Damaged
from fl_lightning.foundation.metric import ACCURACY, FURTHER, MODELS
from fl_lightning.lab.report.tables import incomparable
from fl_lightning.lab.study import code, samples
from fl_lightning.lab.study.folder import StudyFolder, default
from fl_lightning.lab.study.grid import by_key
from fl_lightning.results.result import RunResult
from fl_lightning.results.runs import (
    ABSENT,
    QUIET,
    TIDY,
    damage,
    labels,
    load,
    method_of,
    settings,
    words,
)

METHODS_OWN = ("evaluation.", "optimizer.")
"""Groups of keys that a study may give a method of its own: runs that differ in them can still be
paired."""
_JUDGE = "evaluation.judge"
_OWN = ("method.", "optimizer.", "evaluation.finetune_epochs")
"""Beginnings of keys that runs of a row have in common in each setting, beside their callbacks'."""


@dataclass(frozen=True)
class Cell:
    """One finished run, scored by one judge."""

    label: str
    method: str
    setting: str
    """`data.alpha=0.1, model.hidden=[16]`; empty where there is but one."""
    seed: int
    judge: str
    run: RunResult
    scores: dict[int, float]
    """Accuracy of each client that was scored."""
    scored: str
    """Which of its models these are, in words."""
    metric: str = "accuracy"
    """What the scores are."""

    @property
    def column(self) -> str:
        """The column of metrics.csv that has its mean over clients by round."""
        return (
            f"mean_{self.metric}" if self.judge == self.run.judge else f"{self.metric}_{self.judge}"
        )

    @property
    def unit(self) -> tuple[str, int]:
        """What it is paired by: setting and seed."""
        return self.setting, self.seed


def read(
    paths: Sequence[Path],
    judge: str | None = None,
    metric: str = ACCURACY.name,
    accept_code: bool = False,
) -> tuple[list[Cell], list[str]]:
    """The finished cells of one study folder or of several run folders, and what is to be said of
    them.

    Args:
        paths: the folder of a study, or run folders.
        judge: by which kind of model all are scored, but for rows of a study that name another;
            None: each by its own judge, or by the one that a study names.
        metric: by which the models are scored: accuracy, or what the runs' `evaluation.metrics`
            name.
        accept_code: runs of a row may have been trained with different versions of own code.

    Raises:
        BadInput: no such study or run, nothing has ended, a kind of model was not scored, or runs
            of a setting and seed cannot be paired (two of one method, or other data, clients,
            rounds or models), or runs of a row are of different methods.
    """
    entries = _of_study(paths[0]) if _is_study(paths) else _of_runs(paths)
    others = {
        entry["label"]
        for entry in entries
        if judge is not None and entry.get("judge", judge) != judge
    }
    entries = [entry for entry in entries if entry["label"] not in others]
    what = str(paths[0]) if len(paths) == 1 else f"{len(paths)} runs"
    check("compare", what, bool(entries), "it has no runs to compare")
    ended = [entry for entry in entries if entry["run"] is not None]
    damaged = next((f" ({entry['damage']})" for entry in entries if entry["damage"]), "")
    check(
        "compare",
        what,
        bool(ended),
        f"none of its {len(_by_run(entries))} runs has ended yet{damaged}",
    )
    notes = (
        [f"left out, since they are judged otherwise: {', '.join(sorted(others))}"]
        if others
        else []
    )
    notes += _left_out(entries, StudyFolder(paths[0]).failures())
    made_up = {entry["run"].name for entry in ended if entry["run"].facts.get("made_up_data")}
    smoke = {entry["run"].name for entry in ended if entry["run"].setting("smoke")} - made_up
    notes += (
        [f"{len(made_up)} runs were trained on made-up data: their accuracies mean nothing"]
        if made_up
        else []
    )
    notes += (
        [f"{len(smoke)} are smoke runs (a few samples and steps): their accuracies mean little"]
        if smoke
        else []
    )
    notes += _failed_clients([rows[0]["run"] for rows in _by_run(ended).values()])
    cells = [_cell(entry, judge, metric) for entry in ended]
    notes += [f"scores are {FURTHER[metric].words}, not accuracies"] if metric in FURTHER else []
    _check_pairs(cells)
    _check_methods(cells)
    rows = {
        label: [(cell.seed, cell.run.folder) for cell in those]
        for label, those in by_key(cells, lambda cell: cell.label).items()
    }
    settings_of = {
        setting: {cell.run.folder: cell.seed for cell in those}
        for setting, those in by_key(cells, lambda cell: cell.setting).items()
    }
    notes += samples.notes(settings_of)
    return cells, notes + code.check_rows(rows, code.accepted(paths[0]), accept_code)


def _left_out(entries: Sequence[Mapping[str, Any]], failures: Mapping[str, str]) -> list[str]:
    """How many runs have not ended, and which have failed: a row is a mean over the others."""
    runs = _by_run(entries)
    missing = {folder: rows for folder, rows in runs.items() if rows[0]["run"] is None}
    damaged = [rows[0]["damage"] for rows in missing.values() if rows[0]["damage"]]
    failed = {
        folder: rows
        for folder, rows in missing.items()
        if folder in failures and not rows[0]["damage"]
    }
    notes = []
    if damaged:
        whole = f"{len(damaged)} of {len(runs)} runs are damaged; the first: {damaged[0]}"
        notes.append(f"left out: {whole}: delete its folder to train it again")
    if failed:
        counts = Counter(" and ".join(row["label"] for row in rows) for rows in failed.values())
        whose = ", ".join(f"{label} {count}" for label, count in counts.items())
        first = failures[str(next(iter(failed)))]
        what = f"{len(failed)} of {len(runs)} runs failed ({whose}); the first: {first}"
        notes.append(f"left out: {what}; a row is a mean over those that ended")
    if unfinished := len(missing) - len(failed) - len(damaged):
        notes.append(
            f"unfinished: {unfinished} of {len(runs)} runs have not ended and are left out"
        )
    return notes


def _failed_clients(runs: Sequence[RunResult]) -> list[str]:
    """That runs went on without clients that had failed: their rows look like all others. A retry
    leaves no trace."""
    lost: list[int] = []
    for run in runs:
        with contextlib.suppress(Damaged):
            lost.append(sum(row.get("outcome") != "retried" for row in run.files.read("failures")))
    numbers = f"{sum(lost)} visits in {sum(map(bool, lost))} of {len(runs)} runs"
    return (
        [f"clients failed, and runs went on without them: {numbers}, see their failures.csv"]
        if any(lost)
        else []
    )


def _by_run(entries: Sequence[Mapping[str, Any]]) -> dict[str | int, list[Mapping[str, Any]]]:
    """The entries of each run, by its folder where it is a study's: FedAvg's one run serves two
    rows."""
    runs = by_key(enumerate(entries), lambda pair: pair[1].get("folder", pair[0]))
    return {folder: [entry for _, entry in pairs] for folder, pairs in runs.items()}


def tidy(cells: Iterable[Cell]) -> DataFrame:
    """Their scores as `results.runs.tidy` has those of runs: a row for each cell and client;
    `model` is the judge's."""
    rows = [
        (cell.label, cell.setting, cell.seed, client, cell.judge, cell.metric, value)
        for cell in cells
        for client, value in sorted(cell.scores.items())
    ]
    return DataFrame(rows, columns=TIDY)


def _is_study(paths: Sequence[Path]) -> bool:
    studies = [path for path in paths if StudyFolder(path)]
    if studies and len(paths) > 1:
        raise BadInput(
            "compare", str(studies[0]), "it is a study: one study, or several run folders"
        )
    return bool(studies)


def _of_study(folder: Path) -> list[dict[str, Any]]:
    """The cells of `study.json`; `run` is None where a run has not ended. `judge`: what a row
    itself names."""
    study = StudyFolder(folder)
    runs = {name: _usable(run) for name, run in study.ended(regression=False).items()}
    usual, none = _judge_of_base(folder), _usable(None)
    entries = [
        cell | {"setting": words(cell["setting"])} | runs.get(cell["folder"], none)
        for cell in study.cells()
    ]
    for entry in entries:
        own = (
            entry["run"].setting(_JUDGE) if entry["run"] is not None and usual is not None else None
        )
        # its method was given a judge of its own
        if "judge" not in entry and own not in (None, "auto", usual):
            entry["judge"] = own
    return entries


def _judge_of_base(folder: Path) -> str | None:
    """What a study's base says of the judge; None: no `study.yaml` tells it."""
    try:
        return str(
            dict(flat(StudyFolder(folder).definition().get("base"))).get(_JUDGE, default(_JUDGE))
        )
    except BadInput:
        return None


def _of_runs(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """RunResult folders as cells: label, setting and seed are read off what differs between their
    configurations."""
    runs = load(list(paths), regression=False)
    for run in runs:
        check(
            "run",
            str(run.folder),
            type(run.setting("seed")) is int,
            "its config.yaml names no seed",
        )
    named = zip(runs, labels(runs), settings(runs), strict=True)
    return [
        {
            "label": label,
            "method": method_of(run),
            "setting": setting,
            "seed": run.setting("seed"),
            **_usable(run),
        }
        for run, label, setting in named
    ]


def _usable(run: RunResult | None) -> dict[str, Any]:
    """`run` if it has ended and can be read, else None; `damage`: what of which cannot be read,
    else empty."""
    what = None if run is None else damage(run)
    usable = run is not None and run.finished and what is None
    return {
        "run": run if usable else None,
        "damage": f"{run.folder}: {what}" if run is not None and what else "",
    }


def _cell(entry: dict[str, Any], judge: str | None, metric: str) -> Cell:
    """The cell with its scores; `BadInput` where its judge's kind of model was not scored."""
    run: RunResult = entry["run"]
    kind = judge or entry.get("judge") or run.judge
    scores, words = run.scores(kind, metric) if kind in MODELS else ({}, "")
    if not scores and metric in FURTHER and run.scores(kind)[0]:
        raise BadInput(
            "metric", metric, f"{run.folder} was not scored so: its evaluation.metrics must name it"
        )
    if not scores:
        scored = [name for name in MODELS if run.has(f"accuracy_{name}")]
        raise BadInput(
            "judge",
            kind,
            f"{run.folder} was not scored so; it has {', '.join(scored) or 'no scores'}",
        )
    names = (entry["label"], entry["method"], entry["setting"], entry["seed"])
    return Cell(*names, str(kind), run, scores, words, metric)


def _check_pairs(cells: list[Cell]) -> None:
    """Raise `BadInput` unless the runs of each setting and seed can be paired."""
    judges: dict[str, str] = {}
    for cell in cells:
        before = judges.setdefault(cell.label, cell.judge)
        kinds = f"{MODELS[before]}; {MODELS[cell.judge]}"
        allowed = f"runs of {cell.label!r} are judged differently ({kinds}): --judge KIND"
        check("judge", cell.judge, before == cell.judge, allowed)
    for (setting, seed), those in by_key(cells, lambda cell: cell.unit).items():
        where = ", ".join(filter(None, [setting, f"seed {seed}"]))
        seen: dict[str, Cell] = {}
        for cell in those:
            other = seen.setdefault(cell.label, cell)
            allowed = (
                f"{other.run.folder} and {cell.run.folder} are {cell.label!r} alike, and cannot be "
                f"told apart"
            )
            check("compare", where, other is cell, allowed)
        keys = [
            key
            for key in incomparable([cell.run for cell in those])
            if not key.startswith(METHODS_OWN)
        ]
        check(
            "compare",
            where,
            not keys,
            f"its runs cannot be paired: they differ in {', '.join(keys)}",
        )
        odd = next((cell for cell in those if _other_samples(those[0], cell)), those[0])
        allowed = (
            f"its runs cannot be paired: clients of {those[0].run.folder} and {odd.run.folder} "
            f"have other samples"
        )
        check("compare", where, odd is those[0], allowed)


def _other_samples(one: Cell, other: Cell) -> bool:
    """Whether some client's numbers of samples differ, where both runs have kept them."""
    ours, theirs = one.run.rows("split"), other.run.rows("split")
    if not ours or not theirs:
        return False
    pairs = zip(ours, theirs, strict=False)
    return len(ours) != len(theirs) or any(
        a.get(key, n) != n for a, b in pairs for key, n in b.items()
    )


def _check_methods(cells: list[Cell]) -> None:
    """Raise `BadInput` where runs of a row in a setting are known to differ in more than their
    seed.

    A folder that has grown under another version, or after an own class has changed, may hold such:
    their mean would be of no method.
    """
    for (label, _), those in by_key(cells, lambda cell: (cell.label, cell.setting)).items():
        own = [_own(cell.run) for cell in those]
        for key in dict.fromkeys(key for keys in own for key in keys):
            values = [
                (keys.get(key, _unsaid(key)), cell.run.folder)
                for keys, cell in zip(own, those, strict=True)
            ]
            (first, path), *others = [
                (value, path) for value, path in values if value is not ABSENT
            ]
            for value, other in others:
                allowed = (
                    f"its runs are of different methods: {key} is {first!r} in {path}, {value!r} "
                    f"in {other}"
                )
                check("compare", label, value == first, allowed)


def _own(run: RunResult) -> dict[str, Any]:
    """What a run's method is made of, by dotted key; of callbacks, which these are and what they
    were given."""
    loud = sorted(name for name in run.config.get("callbacks") or {} if name not in QUIET)
    beginnings = [*_OWN, *(f"callbacks.{name}." for name in loud)]
    return {"callbacks": loud} | {
        key: value for key, value in flat(run.config) if key.startswith(tuple(beginnings))
    }


def _unsaid(key: str) -> Any:
    """What a run has that does not name the key, which has come since: its default; of arguments
    nobody can say."""
    return default(key) if key.startswith(("optimizer.", "evaluation.")) else ABSENT
