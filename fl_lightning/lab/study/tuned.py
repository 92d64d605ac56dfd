"""What a search came to: the choice of each method, the spread over its trials, and the study file
of the choices."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pandas import DataFrame

from fl_lightning.configuration.search import edge
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.foundation.metric import Metric
from fl_lightning.lab.study.chosen import UNTUNED, words
from fl_lightning.lab.study.folder import as_yaml
from fl_lightning.lab.study.grid import Entry
from fl_lightning.lab.study.listing import Listing
from fl_lightning.lab.study.space import Dimension
from fl_lightning.lab.study.trials import FIRST, METRICS, Trial, best, split_values

HEADS = ("method", "trials", "start", "min", "median", "max", "gain", "choice")


@dataclass(frozen=True)
class Tuned:
    """One method's trials. Raises `RunFailed` where its choice is asked for and none of them ended
    well."""

    entry: Entry
    trials: list[Trial]
    dimensions: Sequence[Dimension] = ()

    @property
    def metric(self) -> Metric:
        """The metric that judges all trials."""
        return METRICS[self.trials[0].metric]

    @property
    def best(self) -> Trial:
        """The choice: the first of the best trials."""
        choice = best(self.trials)
        if choice is None:
            none = f"none of its {len(self.trials)} trials ended well"
            raise RunFailed(f"{self.entry.label}: {none}: {self.trials[0].why}")
        return choice

    def row(self) -> dict[str, Any]:
        """Of `tuned.csv`: scores are on validation data; `gain` is what the best trial has over the
        first."""
        choice, first = self.best, self.trials[0]
        scores = [trial.score for trial in self.trials if trial.score is not None]
        start = math.nan if first.score is None else first.score
        top = math.nan if choice.score is None else choice.score
        return {
            "method": self.entry.label,
            "trials": len(self.trials),
            "refused": len(self.trials) - len(scores),
            "metric": self.metric.name,
            "start": start,
            "min": min(scores),
            "median": median(scores),
            "max": max(scores),
            "best": top,
            "gain": self.metric.merit(top - start) + 0.0,  # 0, not -0
            "trial": choice.number,
            "values": json.dumps(choice.values),
            "start_values": json.dumps(first.values),
            "warnings": "; ".join(self.warnings()),
        }

    def warnings(self) -> list[str]:
        """Why the choice may say little: few trials, the start, or a value at the edge of where it
        was searched."""
        if not self.dimensions:
            return []
        lines = [few(len(self.trials))]
        if self.best.number == 0:
            lines.append("the best trial is the start: nothing was gained")
        for dimension in self.dimensions:
            key, value = dimension.key, self.best.values[dimension.key]
            end = edge(dimension.space, value)
            if end is not None:
                lines.append(f"{key}={value} lies at the edge of its range ({end})")
        return list(filter(None, lines))

    def listed(self, trial: Trial, label: str) -> dict[str, Any]:
        """The method with a trial's values, as a study file lists it."""
        arguments, settings = split_values(trial.values)
        entry = self.entry
        when = {"when": dict(entry.when)} if entry.when else {}
        return {
            "name": entry.name,
            "label": label,
            **entry.settings,
            **settings,
            **when,
            "init_args": {**entry.arguments, **arguments},
        }


def few(number: int) -> str:
    """The warning that so many trials are too few; empty where they are not."""
    line = f"{number} trials: below {FIRST} the luck of the draw decides"
    return line if number < FIRST else ""


def study_file(
    base: str,
    tuned_methods: Sequence[Tuned],
    seeds: list[int],
    grid: dict[str, Any],
    untuned: bool,
) -> str:
    """The study of the choices, as YAML: fresh seeds, no forced rows beside those that were tuned.

    Args:
        base: the resolved base, as YAML.
        untuned: list each method with the settings of its first trial, too, where the choice is
            another.
    """
    methods = [tuned.listed(tuned.best, tuned.entry.label) for tuned in tuned_methods]
    for tuned in tuned_methods if untuned else ():
        start = tuned.trials[0]
        if tuned.best.values != start.values:
            methods.append(tuned.listed(start, f"{tuned.entry.label} {UNTUNED}"))
    rest = {"methods": methods, "seeds": seeds, "forced": False}
    return as_yaml(base, rest | ({"grid": grid} if grid else {}))


def trial_rows(tuned_methods: Sequence[Tuned]) -> list[dict[str, Any]]:
    """A row of `trials.csv` for each trial; an empty score: refused, and why."""
    return [
        {
            "method": tuned.entry.label,
            "trial": trial.number,
            "score": trial.score,
            "why": trial.why,
            "values": json.dumps(trial.values),
        }
        for tuned in tuned_methods
        for trial in tuned.trials
    ]


def listing_of(tuned_methods: Sequence[Tuned]) -> Listing:
    """The choices as a table, for the terminal, and warnings below it."""
    numbers = DataFrame([tuned.row() for tuned in tuned_methods])
    lines = []
    for tuned, row in zip(
        tuned_methods,
        numbers.to_dict("records"),
        strict=True,
    ):
        refused = f" ({row['refused']} refused)" if row["refused"] else ""
        scores = [tuned.metric.shown(row[name]) for name in HEADS[2:-1]]
        trials = f"{row['trials']}{refused}"
        lines.append(
            [
                row["method"],
                trials,
                *scores,
                words(tuned.best.values),
            ]
        )
    shown = DataFrame(
        lines,
        columns=HEADS,
        index=["chosen on validation data"] * len(lines),
    )
    warned = numbers[numbers.warnings != ""]
    notes = list(warned.method + ": " + warned.warnings)
    return Listing(
        "fl-train tune",
        numbers,
        shown,
        dict(zip(HEADS, HEADS, strict=True)),
        notes,
    )
