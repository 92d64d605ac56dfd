"""Finished runs, of a study or not, as a table of runs: a row for each method, setting and seed."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from pandas import DataFrame, Series

from fl_lightning.configuration.config import check, flat
from fl_lightning.foundation.errors import BadInput, Damaged
from fl_lightning.foundation.metric import ACCURACY, FURTHER, MODELS
from fl_lightning.lab.report.tables import incomparable
from fl_lightning.lab.study import code, samples
from fl_lightning.lab.study.folder import StudyFolder, earlier_default
from fl_lightning.lab.study.grid import by_key
from fl_lightning.results.result import RunResult
from fl_lightning.results.runs import (
    ABSENT,
    NEUTRAL_CALLBACKS,
    TIDY,
    damage,
    labels,
    load,
    method_of,
    settings,
    words,
)

METHODS_OWN = ("evaluation.", "optimizer.")
"""Groups of keys that methods of a study may set for themselves; runs that differ in them can still
be paired."""
COLUMNS = (
    "method",
    "name",
    "setting",
    "seed",
    "model",
    "metric",
    "column",
    "scored",
    "run",
)
"""Columns of a table of runs: `method`, the label of the row; `name`, the method; `setting`, in
words; `seed`; `model` and `metric`, of the scores; `column`, of metrics.csv with the scores' mean
by round; `scored`, in words whose scores they are; `run`, the `RunResult`. Also `scores`, a Series
by client."""
_JUDGE = "evaluation.judge"
_METHOD_KEYS = ("method.", "optimizer.", "evaluation.finetune_epochs")
"""Beginnings of keys that must be equal in all runs of a row and setting; callbacks' keys must be,
too."""


def read(
    paths: Sequence[Path],
    judge: str | None = None,
    metric: str | None = None,
    accept_changed_code: bool = False,
) -> tuple[DataFrame, list[str]]:
    """Read the finished runs of a study or of run folders.

    Args:
        paths: the folder of a study, or run folders.
        judge: kind of model that judges all runs; rows for which the study names another are left
            out. None: each row's own judge.
        metric: `accuracy`, or a metric of `evaluation.metrics`; None: the metric by which all runs
            are judged, else accuracy.
        accept_changed_code: whether runs of a row may have different versions of own code.

    Returns:
        The table of runs (`COLUMNS` and `scores`), and notes.

    Raises:
        BadInput: there is no such study or run, nothing has ended, a kind of model was not scored,
            runs of a setting and seed cannot be paired (two of one method, or different data,
            clients, rounds or models), or runs of a row are of different methods.
    """
    entries = _study_entries(paths[0]) if _is_study(paths) else _run_entries(paths)
    left_out = set()
    if judge is not None:
        left_out = {entry["label"] for entry in entries if entry.get("judge", judge) != judge}
    entries = [entry for entry in entries if entry["label"] not in left_out]
    subject = str(paths[0]) if len(paths) == 1 else f"{len(paths)} runs"
    check("compare", subject, bool(entries), "it has no runs to compare")
    ended = [entry for entry in entries if entry["run"] is not None]
    damaged = next((f" ({entry['damage']})" for entry in entries if entry["damage"]), "")
    count = len({entry["number"] for entry in entries})
    check("compare", subject, bool(ended), f"none of its {count} runs has ended yet{damaged}")
    results = {entry["number"]: entry["run"] for entry in ended}.values()
    if metric is None:
        judged = {run.metric.name for run in results}
        metric = judged.pop() if len(judged) == 1 else ACCURACY.name
    runs = DataFrame([_scored_run(entry, judge, metric) for entry in ended])
    notes = []
    if left_out:
        notes.append(f"left out, since they are judged otherwise: {', '.join(sorted(left_out))}")
    notes += _left_out(entries, StudyFolder(paths[0]).failures()) + _warnings(list(results))
    if metric in FURTHER:
        notes.append(f"scores are {FURTHER[metric].words}, not accuracies")
    _check_pairs(runs)
    _check_methods(runs)
    accepted_versions = code.accepted_versions(paths[0])
    return runs, notes + samples.notes(runs) + code.check_rows(
        runs,
        accepted_versions,
        accept_changed_code,
    )


def tidy(runs: DataFrame) -> DataFrame:
    """The scores of a table of runs, a row for each client, with the columns of
    `results.runs.tidy`."""
    of_clients = runs.assign(
        client=[list(scores.index) for scores in runs.scores],
        value=[list(scores) for scores in runs.scores],
    )
    return of_clients[TIDY].explode(["client", "value"]).astype({"client": int, "value": float})


def _left_out(
    entries: Sequence[Mapping[str, Any]],
    failures: Mapping[str, str],
) -> list[str]:
    """Notes on runs that are left out: damaged, failed or unfinished."""
    total = len({entry["number"] for entry in entries})
    not_ended = (entry for entry in entries if entry["run"] is None)
    missing = by_key(not_ended, itemgetter("number")).values()
    damaged = [rows for rows in missing if rows[0]["damage"]]
    intact = [rows for rows in missing if not rows[0]["damage"]]
    failed = [rows for rows in intact if rows[0].get("folder") in failures]
    unfinished = len(intact) - len(failed)
    notes = []
    if damaged:
        notes.append(
            f"left out: {len(damaged)} of {total} runs are damaged; the first: "
            f"{damaged[0][0]['damage']}: delete its folder to train it again"
        )
    if failed:
        counts = Counter(" and ".join(row["label"] for row in rows) for rows in failed)
        counts_text = ", ".join(f"{label} {count}" for label, count in counts.items())
        notes.append(
            f"left out: {len(failed)} of {total} runs failed ({counts_text}); the first: "
            f"{failures[failed[0][0]['folder']]}; a row is a mean over those that ended"
        )
    if unfinished:
        notes.append(f"unfinished: {unfinished} of {total} runs have not ended and are left out")
    return notes


def _warnings(runs: Sequence[RunResult]) -> list[str]:
    """Notes on runs whose scores say little: on made-up data, smoke runs, or with failed
    clients."""
    notes = []
    made_up = [run for run in runs if run.facts.get("made_up_data")]
    if made_up:
        notes.append(
            f"{len(made_up)} runs were trained on made-up data: their accuracies mean nothing"
        )
    smoke = sum(bool(run.setting("smoke")) for run in runs if run not in made_up)
    if smoke:
        notes.append(
            f"{smoke} are smoke runs (a few samples and steps): their accuracies mean little"
        )
    lost_visits = [_lost_visits(run) for run in runs]
    if any(lost_visits):
        notes.append(
            f"clients failed, and runs went on without them: {sum(lost_visits)} visits in "
            f"{sum(map(bool, lost_visits))} of {len(runs)} runs, see their failures.csv"
        )
    return notes


def _lost_visits(run: RunResult) -> int:
    """Number of visits of clients that failed and were not repaired by a retry."""
    with contextlib.suppress(Damaged):
        return sum(row.get("outcome") != "retried" for row in run.files.read("failures"))
    return 0


def _is_study(paths: Sequence[Path]) -> bool:
    """Whether `paths` is one study; raises `BadInput` for a study among other folders."""
    studies = [str(path) for path in paths if StudyFolder(path)]
    if studies and len(paths) > 1:
        raise BadInput(
            "compare",
            studies[0],
            "it is a study: give it alone, or several run folders",
        )
    return bool(studies)


def _study_entries(folder: Path) -> list[dict[str, Any]]:
    """The cells of a study, each with the further keys `run` (None if it is unfinished or damaged),
    `number` (of the run, which several cells may share), and `judge` if the row names one."""
    study = StudyFolder(folder)
    ended = study.ended_runs(regression=False)
    numbers = {name: number for number, name in enumerate(study.run_names())}
    judge_of_base = _judge_of_base(study)
    entries = []
    for cell in study.cells():
        name = cell["folder"]
        entry = {
            **cell,
            "setting": words(cell["setting"]),
            "number": numbers[name],
            **_loaded(ended.get(name)),
        }
        run = entry["run"]
        judge = run.setting(_JUDGE) if run is not None else None
        # the study gives this method another judge
        if judge_of_base is not None and judge not in (None, "auto", judge_of_base):
            entry.setdefault("judge", judge)
        entries.append(entry)
    return entries


def _judge_of_base(study: StudyFolder) -> str | None:
    """The judge of a study's base; None without a readable `study.yaml`."""
    try:
        base = dict(flat(study.definition().get("base")))
    except BadInput:
        return None
    return str(base.get(_JUDGE, earlier_default(_JUDGE)))


def _run_entries(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Run folders as cells; labels and settings name the config keys that differ."""
    runs = load(list(paths), regression=False)
    entries = []
    columns = zip(runs, labels(runs), settings(runs), strict=True)
    for number, (run, label, setting) in enumerate(columns):
        seed = run.setting("seed")
        is_seed = type(seed) is int
        check(
            "run",
            str(run.folder),
            is_seed,
            "its config.yaml names no seed: leave this run out",
        )
        entry = {
            "number": number,
            "label": label,
            "method": method_of(run),
            "setting": setting,
            "seed": seed,
        }
        entries.append(entry | _loaded(run))
    return entries


def _loaded(run: RunResult | None) -> dict[str, Any]:
    """Two keys of an entry: `run`, the run if it is finished and intact, else None; `damage`, the
    folder and problem of a damaged run, else empty."""
    damaged = None if run is None else damage(run)
    if run is None or damaged is not None:
        return {"run": None, "damage": f"{run.folder}: {damaged}" if run else ""}
    return {"run": run if run.finished else None, "damage": ""}


def _scored_run(
    entry: dict[str, Any],
    judge: str | None,
    metric: str,
) -> dict[str, Any]:
    """A row of the table of runs. Raises `BadInput` if the run has no scores of the judge's kind of
    model."""
    run: RunResult = entry["run"]
    kind = str(judge or entry.get("judge") or run.judge)
    scores, whose = run.scores(kind, metric) if kind in MODELS else ({}, "")
    if not scores and metric in FURTHER and run.scores(kind)[0]:
        raise BadInput(
            "metric",
            metric,
            f"{run.folder} has no such scores: name it in evaluation.metrics and train again",
        )
    kinds = [name for name in MODELS if run.has(f"accuracy_{name}")]
    check(
        "judge",
        kind,
        bool(scores),
        f"{run.folder} has no scores of this kind of model; it has {', '.join(kinds) or 'none'}",
    )
    return {
        "method": entry["label"],
        "name": entry["method"],
        "setting": entry["setting"],
        "seed": entry["seed"],
        "model": kind,
        "metric": metric,
        "column": f"mean_{metric}" if kind == run.judge else f"{metric}_{kind}",
        "scored": whose,
        "run": run,
        "scores": Series(dict(sorted(scores.items())), dtype=float),
    }


def _check_pairs(runs: DataFrame) -> None:
    """Raise `BadInput` unless all runs of a setting and seed can be paired."""
    for label, of_row in runs.groupby("method", sort=False):
        kinds = of_row.model.unique()
        words = "; ".join(MODELS[kind] for kind in kinds)
        check(
            "judge",
            kinds[-1],
            len(kinds) == 1,
            f"runs of {label!r} have different judges ({words}): give --judge KIND",
        )
    for (setting, seed), unit in runs.groupby(["setting", "seed"], sort=False):
        where = ", ".join(filter(None, [setting, f"seed {seed}"]))
        for label, of_label in unit.groupby("method", sort=False):
            folders = " and ".join(str(run.folder) for run in of_label.run.head(2))
            check(
                "compare",
                where,
                len(of_label) == 1,
                f"{folders} are both {label!r}: leave one out",
            )
        keys = [key for key in incomparable([*unit.run]) if not key.startswith(METHODS_OWN)]
        check(
            "compare",
            where,
            not keys,
            f"its runs cannot be paired: they differ in {', '.join(keys)}; leave some out",
        )
        first, *others = unit.run
        for other in others:
            check(
                "compare",
                where,
                not _other_samples(first, other),
                f"its runs cannot be paired: clients of {first.folder} and {other.folder} have "
                "other samples; leave one out",
            )


def _other_samples(run: RunResult, other: RunResult) -> bool:
    """Whether the clients of two runs have different numbers of samples, as far as these are
    recorded."""
    rows, other_rows = run.rows("split"), other.rows("split")
    if not rows or not other_rows:
        return False
    return len(rows) != len(other_rows) or any(
        row.get(key, count) != count
        for row, other_row in zip(rows, other_rows, strict=True)
        for key, count in other_row.items()
    )


def _check_methods(runs: DataFrame) -> None:
    """Raise `BadInput` if runs of a row in a setting differ in more than their seed, so that their
    mean would mix several methods.

    A study may have such runs if another version of this package or of an own class has trained
    some.
    """
    for (label, _), of_row in runs.groupby(["method", "setting"], sort=False):
        keys_of = [_method_keys(run) for run in of_row.run]
        folders = [run.folder for run in of_row.run]
        for key in dict.fromkeys(key for keys in keys_of for key in keys):
            values = [keys.get(key, _value_if_absent(key)) for keys in keys_of]
            known_values = [
                pair for pair in zip(values, folders, strict=True) if pair[0] is not ABSENT
            ]
            first, folder = known_values[0]
            for value, other in known_values[1:]:
                check(
                    "compare",
                    label,
                    value == first,
                    f"its runs are of different methods: {key} is {first!r} in {folder}, "
                    f"{value!r} in {other}",
                )


def _method_keys(run: RunResult) -> dict[str, Any]:
    """The config keys that define the method of a run; of callbacks, the names and arguments."""
    callbacks = sorted(
        name for name in run.config.get("callbacks") or {} if name not in NEUTRAL_CALLBACKS
    )
    beginnings = (*_METHOD_KEYS, *(f"callbacks.{name}." for name in callbacks))
    keys = {key: value for key, value in flat(run.config) if key.startswith(beginnings)}
    return {"callbacks": callbacks, **keys}


def _value_if_absent(key: str) -> Any:
    """The value to assume for a key that a run's config lacks: the key's default, or `ABSENT` for
    arguments, whose former default is unknown."""
    return earlier_default(key) if key.startswith(("optimizer.", "evaluation.")) else ABSENT
