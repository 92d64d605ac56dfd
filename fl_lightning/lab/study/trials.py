"""The trials of one method: what each tries, and its runs.

A trial that has ended is a file. A trial belongs to the process that holds its lock; one whose
process is gone is continued from its runs, and none that has ended is run again.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from fl_lightning.configuration.config import Config, check
from fl_lightning.configuration.files import Layer
from fl_lightning.configuration.resolve import resolve
from fl_lightning.foundation.errors import BadInput, MachineFailed, RunFailed
from fl_lightning.foundation.files import Taken, make_folder, take_lock, write_whole
from fl_lightning.foundation.metric import ACCURACY, BY_TASK, FURTHER, Metric
from fl_lightning.lab.study import launch
from fl_lightning.lab.study.chosen import words
from fl_lightning.lab.study.folder import one_line, reading
from fl_lightning.lab.study.grid import Entry, Run, Setting, place, safe
from fl_lightning.lab.study.grid import words as setting_words
from fl_lightning.lab.study.space import Dimension, drawn, nearby, space
from fl_lightning.results.result import RunResult

ON_VALIDATION: Layer = {"data": {"score_on": "validation"}}
FIRST = 10
"""Trials that are spread over the spaces before others go by scores: as many as optuna's sampler
draws at random."""
METRICS = {metric.name: metric for metric in (*BY_TASK.values(), *FURTHER.values())}


@dataclasses.dataclass(frozen=True)
class Trial:
    """A trial that has ended."""

    number: int
    values: dict[str, Any]
    """By key, as its runs had them."""
    score: float | None
    """None: the method refused the values, failed with them, or came to no number."""
    why: str = ""
    """Why there is no score."""
    metric: str = ACCURACY.name


def best(trials: Sequence[Trial]) -> Trial | None:
    """The first of the best trials; None where none has a score."""
    scored = [trial for trial in trials if trial.score is not None]
    return max(scored, key=lambda t: METRICS[t.metric].merit(t.score or 0.0), default=None)


def split_values(values: dict[str, Any]) -> tuple[dict[str, Any], Setting]:
    """The values of a trial that are a method's arguments, and those that are keys of its own."""
    own = {key: value for key, value in values.items() if not key.startswith("method.")}
    arguments = {key[7:]: value for key, value in values.items() if key not in own}
    return arguments, own


@dataclasses.dataclass(frozen=True)
class Search:
    """The search for one method, as a worker is given it."""

    entry: Entry
    folder: Path
    """Of all searches."""
    number: int
    """Trials."""
    seed: int
    """Of the trials' runs, and of what they try."""
    base: Config
    settings: list[Setting]
    """Points of the grid: a trial is a run in each, and its score their mean."""

    @cached_property
    def dimensions(self) -> list[Dimension]:
        """The arguments that neither the list nor the grid sets. `BadInput` where they depend on
        the setting: a trial has the same values in all."""
        listed = set(self.entry.arguments).union(*self.entry.when.values())
        fixed = {f"method.{name}" for name in listed}
        fixed.update(self.entry.settings, *self.settings)
        first, *others = [space(self.config({}, setting), fixed) for setting in self.settings]
        ranges = {d.key: (d.space, d.start) for d in first}
        for setting, dimensions in zip(
            self.settings[1:],
            others,
            strict=True,
        ):
            here = {d.key: (d.space, d.start) for d in dimensions}
            differ = [key for key in ranges | here if ranges.get(key) != here.get(key)]
            requirement = (
                f"{self.entry.label} has another range of {', '.join(differ)} there than in the "
                "first setting: set it in the study file, or tune these settings one by one"
            )
            check("grid", words(setting), not differ, requirement)
        return first

    def values(self, number: int) -> dict[str, Any]:
        """What a trial tries: the first ones spread over the spaces, later ones near the best."""
        label, seed = self.entry.label, self.seed
        if number < FIRST:
            count = min(self.number, FIRST)
            return {d.key: drawn(d, label, count, seed)[number] for d in self.dimensions}
        near = (best(self.ended()) or self.trial(0)).values
        return {d.key: nearby(d, label, number, seed, near[d.key]) for d in self.dimensions}

    def record(self) -> str:
        """Text of all that decides its trials and that searches do not have in common."""
        entry = self.entry
        parts = [f"{entry.name} {entry.arguments | entry.settings}"]
        parts += [f"when {dict(entry.when)}"] if entry.when else []
        parts += [f"{d.key}: {d.space} from {d.start!r}" for d in self.dimensions]
        return "; ".join(parts)

    def config(self, values: dict[str, Any], setting: Setting) -> Config:
        """Of a trial's run in one setting; test data are not read. `BadInput` where the method
        refuses the values."""
        arguments, settings = split_values(values)
        entry = dataclasses.replace(
            self.entry,
            arguments=self.entry.arguments | arguments,
            settings=self.entry.settings | settings,
        )
        layers = launch.layers_of(Run(setting, entry, self.seed))
        config = resolve([*layers, ON_VALIDATION], self.base)
        return dataclasses.replace(config, seed=self.seed)

    def file(self, number: int) -> Path:
        """Where a trial is kept that has ended; its runs are in a folder of that name."""
        return self.folder / place(self.entry.label) / f"trial-{number:03d}.json"

    def trial(self, number: int) -> Trial:
        """A trial that has ended; `BadInput` where its file is damaged."""
        file = self.file(number)
        advice = "delete it, and the search runs it again"
        with reading(
            "out",
            str(self.folder.parent),
            f"{file} is damaged",
            advice,
        ):
            return Trial(**json.loads(file.read_text(encoding="utf-8")))

    def ended(self) -> list[Trial]:
        """The trials that have ended, in order."""
        return [self.trial(k) for k in range(self.number) if self.file(k).is_file()]


def run_trials(search: Search) -> str | None:
    """A worker's job: trials of one method until none is left; None, or one line that says why it
    failed."""

    def work() -> None:
        for number in range(search.number):
            file = search.file(number)
            make_folder(file.parent)
            with suppress(Taken), take_lock(file.with_suffix(".lock")):
                if not file.is_file():
                    _run_trial(search, number)

    return launch.run_safely(work)


def _run_trial(search: Search, number: int) -> None:
    """The runs of a trial, and their mean score. Values with which they fail are refused; where the
    first trial's fail, which are the base's own, or the machine is at fault, the method is not
    tuned."""
    file = search.file(number)
    chosen = file.with_suffix(".values")  # before its runs: a later call goes on with them
    if not chosen.is_file():
        write_whole(chosen, json.dumps(search.values(number)))
    values = json.loads(chosen.read_text(encoding="utf-8"))
    scores, why = [], "its score is no number"
    metric: Metric = ACCURACY
    try:
        for setting in search.settings:
            folder = file.with_suffix("") / safe(",".join(setting_words(setting)) or "run")
            config = search.config(values, setting)
            if not (folder / "summary.json").is_file():
                launch.train(config, folder, accept=True)  # the request has looked at its code
            run = RunResult(folder)
            metric = run.metric
            scores.append(float(run.summary.get(metric.of("final_mean"), math.nan)))
    except (BadInput, RunFailed) as error:
        is_of_machine = isinstance(error, MachineFailed)
        if number == 0 or is_of_machine or getattr(error, "key", "") in ("out", "name"):
            raise
        scores, why = [math.nan], one_line(error)
    mean = sum(scores) / len(scores)
    trial = Trial(number, values, mean, metric=metric.name)
    if math.isnan(mean):
        trial = dataclasses.replace(trial, score=None, why=why)
    write_whole(file, json.dumps(vars(trial)) + "\n")
    for checkpoints in file.with_suffix("").glob("*/checkpoints"):
        shutil.rmtree(checkpoints)  # nobody asks for the models of a trial
