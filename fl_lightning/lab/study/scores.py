"""Finished runs, of a study or not, as a table: a row for each method, setting and seed."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pandas import DataFrame, Series

from fl_lightning.configuration.config import check, flat
from fl_lightning.foundation.errors import BadInput, Damaged
from fl_lightning.foundation.metric import ACCURACY, FURTHER, MODELS
from fl_lightning.lab.report.tables import incomparable
from fl_lightning.lab.study import code, samples
from fl_lightning.lab.study.folder import StudyFolder, default
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
COLUMNS = ("method", "name", "setting", "seed", "model", "metric", "column", "scored", "run")
"""Of the table of runs, beside `scores` (a Series by client): the label of the row, the method's
name, the setting in words, the seed, the kind of model and metric of the scores, the column of
metrics.csv that has their mean by round, whose scores they are in words, and the `RunResult`."""
_JUDGE = "evaluation.judge"
_METHOD_KEYS = ("method.", "optimizer.", "evaluation.finetune_epochs")
"""Beginnings of keys that runs of a row have in common in each setting, beside their callbacks'."""


def read(
    paths: Sequence[Path],
    judge: str | None = None,
    metric: str | None = None,
    accept_code: bool = False,
) -> tuple[DataFrame, list[str]]:
    """The finished runs of one study folder or of several run folders (`COLUMNS`), and notes.

    Args:
        paths: the folder of a study, or run folders.
        judge: the kind of model that all are scored by, but for rows of a study that name another;
            None: each by its own judge, or by the one that a study names.
        metric: accuracy, or what the runs' `evaluation.metrics` name; None: what all runs are
            judged by, else accuracy.
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
    subject = str(paths[0]) if len(paths) == 1 else f"{len(paths)} runs"
    check("compare", subject, bool(entries), "it has no runs to compare")
    ended = [entry for entry in entries if entry["run"] is not None]
    damaged = next((f" ({entry['damage']})" for entry in entries if entry["damage"]), "")
    nothing = f"none of its {len({entry['number'] for entry in entries})} runs has ended yet"
    check("compare", subject, bool(ended), nothing + damaged)
    if metric is None:
        judged = {entry["run"].metric.name for entry in ended}
        metric = judged.pop() if len(judged) == 1 else ACCURACY.name
    notes = []
    if others:
        notes.append(f"left out, since they are judged otherwise: {', '.join(sorted(others))}")
    notes += _left_out(entries, StudyFolder(paths[0]).failures())
    runs = DataFrame([_scored(entry, judge, metric) for entry in ended])
    notes += _warnings(list({entry["number"]: entry["run"] for entry in ended}.values()))
    if metric in FURTHER:
        notes.append(f"scores are {FURTHER[metric].words}, not accuracies")
    _check_pairs(runs)
    _check_methods(runs)
    notes += samples.notes(runs)
    return runs, notes + code.check_rows(runs, code.accepted(paths[0]), accept_code)


def tidy(runs: DataFrame) -> DataFrame:
    """The scores of `runs`, a row for each client, in the columns of `results.runs.tidy`."""
    of_clients = runs.assign(
        client=[list(scores.index) for scores in runs.scores],
        value=[list(scores) for scores in runs.scores],
    )
    return of_clients[TIDY].explode(["client", "value"]).astype({"client": int, "value": float})


def _left_out(entries: Sequence[Mapping[str, Any]], failures: Mapping[str, str]) -> list[str]:
    """How many runs have not ended, and which have failed: a row is a mean over the others."""
    total = len({entry["number"] for entry in entries})
    missing: dict[int, list[Mapping[str, Any]]] = {}
    for entry in entries:
        if entry["run"] is None:
            missing.setdefault(entry["number"], []).append(entry)
    notes = []
    damaged = [rows[0]["damage"] for rows in missing.values() if rows[0]["damage"]]
    if damaged:
        first = f"{len(damaged)} of {total} runs are damaged; the first: {damaged[0]}"
        notes.append(f"left out: {first}: delete its folder to train it again")
    failed = [
        rows
        for rows in missing.values()
        if rows[0].get("folder") in failures and not rows[0]["damage"]
    ]
    if failed:
        counts = Counter(" and ".join(row["label"] for row in rows) for rows in failed)
        listed = ", ".join(f"{label} {count}" for label, count in counts.items())
        first = f"{listed}); the first: {failures[failed[0][0]['folder']]}"
        rest = "a row is a mean over those that ended"
        notes.append(f"left out: {len(failed)} of {total} runs failed ({first}; {rest}")
    if unfinished := len(missing) - len(failed) - len(damaged):
        notes.append(f"unfinished: {unfinished} of {total} runs have not ended and are left out")
    return notes


def _warnings(runs: Sequence[RunResult]) -> list[str]:
    """Runs whose rows look like all others: of made-up data, smoke runs, with failed clients."""
    notes = []
    made_up = [run for run in runs if run.facts.get("made_up_data")]
    if made_up:
        begin = f"{len(made_up)} runs were trained on made-up data"
        notes.append(f"{begin}: their accuracies mean nothing")
    if smoke := sum(bool(run.setting("smoke")) for run in runs if run not in made_up):
        kind = "smoke runs (a few samples and steps)"
        notes.append(f"{smoke} are {kind}: their accuracies mean little")
    lost = [_lost_visits(run) for run in runs]
    if any(lost):
        numbers = f"{sum(lost)} visits in {sum(map(bool, lost))} of {len(runs)} runs"
        begin = "clients failed, and runs went on without them"
        notes.append(f"{begin}: {numbers}, see their failures.csv")
    return notes


def _lost_visits(run: RunResult) -> int:
    """Visits of clients that failed; a retry leaves no trace."""
    with contextlib.suppress(Damaged):
        return sum(row.get("outcome") != "retried" for row in run.files.read("failures"))
    return 0


def _is_study(paths: Sequence[Path]) -> bool:
    studies = [str(path) for path in paths if StudyFolder(path)]
    if studies and len(paths) > 1:
        raise BadInput("compare", studies[0], "it is a study: one study, or several run folders")
    return bool(studies)


def _of_study(folder: Path) -> list[dict[str, Any]]:
    """The cells of `study.json`; `run` is None where a run has not ended, `judge` is what a row
    itself names, `number` the run's: FedAvg's one run serves two rows."""
    study = StudyFolder(folder)
    runs = {name: _usable(run) for name, run in study.ended(regression=False).items()}
    usual = _judge_of_base(study)
    entries = []
    numbers: dict[str, int] = {}
    for cell in study.cells():
        entry = cell | {
            "setting": words(cell["setting"]),
            "number": numbers.setdefault(cell["folder"], len(numbers)),
            **runs.get(cell["folder"], _usable(None)),
        }
        chosen = entry["run"].setting(_JUDGE) if entry["run"] and usual is not None else None
        # its method was given a judge of its own
        if "judge" not in entry and chosen not in (None, "auto", usual):
            entry["judge"] = chosen
        entries.append(entry)
    return entries


def _judge_of_base(study: StudyFolder) -> str | None:
    """What a study's base says of the judge; None: no `study.yaml` tells it."""
    try:
        base = dict(flat(study.definition().get("base")))
    except BadInput:
        return None
    return str(base.get(_JUDGE, default(_JUDGE)))


def _of_runs(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Run folders as cells: label, setting and seed are read off what differs between their
    configurations."""
    runs = load(list(paths), regression=False)
    for run in runs:
        named = type(run.setting("seed")) is int
        check("run", str(run.folder), named, "its config.yaml names no seed")
    return [
        {
            "number": number,
            "label": label,
            "method": method_of(run),
            "setting": setting,
            "seed": run.setting("seed"),
            **_usable(run),
        }
        for number, (run, label, setting) in enumerate(
            zip(runs, labels(runs), settings(runs), strict=True)
        )
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


def _scored(entry: dict[str, Any], judge: str | None, metric: str) -> dict[str, Any]:
    """A row of the table of runs; `BadInput` where its judge's kind of model was not scored."""
    run: RunResult = entry["run"]
    kind = str(judge or entry.get("judge") or run.judge)
    scores, whose = run.scores(kind, metric) if kind in MODELS else ({}, "")
    if not scores and metric in FURTHER and run.scores(kind)[0]:
        allowed = f"{run.folder} was not scored so: its evaluation.metrics must name it"
        raise BadInput("metric", metric, allowed)
    if not scores:
        kinds = [name for name in MODELS if run.has(f"accuracy_{name}")]
        allowed = f"{run.folder} was not scored so; it has {', '.join(kinds) or 'no scores'}"
        raise BadInput("judge", kind, allowed)
    column = f"mean_{metric}" if kind == run.judge else f"{metric}_{kind}"
    values = (entry["label"], entry["method"], entry["setting"], entry["seed"])
    row = zip(COLUMNS, (*values, kind, metric, column, whose, run), strict=True)
    return {**dict(row), "scores": Series(dict(sorted(scores.items())), dtype=float)}


def _check_pairs(runs: DataFrame) -> None:
    """Raise `BadInput` unless the runs of each setting and seed can be paired."""
    for label, of_row in runs.groupby("method", sort=False):
        kinds = of_row.model.unique()
        words = "; ".join(MODELS[kind] for kind in kinds)
        allowed = f"runs of {label!r} are judged differently ({words}): --judge KIND"
        check("judge", kinds[-1], len(kinds) == 1, allowed)
    for (setting, seed), unit in runs.groupby(["setting", "seed"], sort=False):
        where = ", ".join(filter(None, [setting, f"seed {seed}"]))
        twice = unit[unit.method.duplicated(keep=False)]
        if len(twice):
            label = twice.method.iloc[0]
            first, second, *_ = (run.folder for run in twice.run[twice.method == label])
            alike = f"{first} and {second} are {label!r} alike, and cannot be told apart"
            raise BadInput("compare", where, alike)
        keys = [key for key in incomparable([*unit.run]) if not key.startswith(METHODS_OWN)]
        cannot = "its runs cannot be paired: "
        check("compare", where, not keys, f"{cannot}they differ in {', '.join(keys)}")
        one, *others = unit.run
        for other in others:
            folders = f"{one.folder} and {other.folder}"
            allowed = f"{cannot}clients of {folders} have other samples"
            check("compare", where, not _other_samples(one, other), allowed)


def _other_samples(one: RunResult, other: RunResult) -> bool:
    """Whether some client's numbers of samples differ, where both runs have kept them."""
    ours, theirs = one.rows("split"), other.rows("split")
    if not ours or not theirs:
        return False
    pairs = zip(ours, theirs, strict=False)
    return len(ours) != len(theirs) or any(
        a.get(key, n) != n for a, b in pairs for key, n in b.items()
    )


def _check_methods(runs: DataFrame) -> None:
    """Raise `BadInput` where runs of a row in a setting are known to differ in more than their
    seed.

    A folder that has grown under another version, or after an own class has changed, may hold such:
    their mean would be of no method.
    """
    for (label, _), of_row in runs.groupby(["method", "setting"], sort=False):
        keys_of = [_method_keys(run) for run in of_row.run]
        for key in dict.fromkeys(key for keys in keys_of for key in keys):
            values = [keys.get(key, _unsaid(key)) for keys in keys_of]
            known = [
                (v, r.folder) for v, r in zip(values, of_row.run, strict=True) if v is not ABSENT
            ]
            (first, path), *others = known
            for value, other in others:
                both = f"{key} is {first!r} in {path}, {value!r} in {other}"
                allowed = f"its runs are of different methods: {both}"
                check("compare", label, value == first, allowed)


def _method_keys(run: RunResult) -> dict[str, Any]:
    """The keys and values that make a run's method; of callbacks, which these are and what they
    were given."""
    callbacks = sorted(name for name in run.config.get("callbacks") or {} if name not in QUIET)
    beginnings = (*_METHOD_KEYS, *(f"callbacks.{name}." for name in callbacks))
    keys = {key: value for key, value in flat(run.config) if key.startswith(beginnings)}
    return {"callbacks": callbacks, **keys}


def _unsaid(key: str) -> Any:
    """What a run has that does not name the key, which has come since: its default; of arguments
    nobody can say."""
    return default(key) if key.startswith(("optimizer.", "evaluation.")) else ABSENT
