"""What a search came to: the choice of each method, the spread over its trials, and the study file
of the choices."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.markup import escape
from rich.table import Table

from fl_lightning.configuration.search import edge
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.foundation.metric import Metric
from fl_lightning.lab.study.chosen import UNTUNED, words
from fl_lightning.lab.study.folder import as_yaml
from fl_lightning.lab.study.grid import ListedMethod
from fl_lightning.lab.study.space import Dimension
from fl_lightning.lab.study.trials import RANDOM, EndedTrial, best


@dataclass(frozen=True)
class Tuned:
    """One method's trials. Raises `RunFailed` where its choice is asked for and none of them ended
    well."""

    entry: ListedMethod
    ended: list[EndedTrial]
    metric: Metric
    dimensions: Sequence[Dimension] = ()

    @property
    def best(self) -> EndedTrial:
        """The choice."""
        chosen = best(self.ended)
        if chosen is None:
            none = f"none of its {len(self.ended)} trials ended well"
            raise RunFailed(f"{self.entry.label}: {none}: {self.ended[0].why}")
        return chosen

    def row(self) -> dict[str, Any]:
        """Of `tuned.csv`: scores are on validation data; `gain` is what the best trial has over the
        first."""
        chosen, first = self.best, self.ended[0]
        merit = self.metric.merit
        # `trial.score` is a merit, greater is better; `merit` turns it back into the metric
        scores = [merit(trial.score) for trial in self.ended if trial.score is not None]
        start = math.nan if first.score is None else merit(first.score)
        top = max(scores, key=merit)
        return {
            "method": self.entry.label,
            "trials": len(self.ended),
            "refused": len(self.ended) - len(scores),
            "metric": self.metric.name,
            "start": start,
            "min": min(scores),
            "median": median(scores),
            "max": max(scores),
            "best": top,
            "gain": merit(top - start) + 0.0,  # 0, not -0
            "trial": chosen.number,
            "values": json.dumps(chosen.values),
            "start_values": json.dumps(first.values),
            "warnings": "; ".join(self.warnings()),
        }

    def warnings(self) -> list[str]:
        """Why the choice may say little: few trials, the start, or a value at the edge of where it
        was searched."""
        if not self.dimensions:
            return []
        lines = [few(len(self.ended))]
        if self.best.number == self.ended[0].number:
            lines.append("the best trial is the start: nothing was gained")
        for dimension in self.dimensions:
            key, value = dimension.key, self.best.values[dimension.key]
            end = edge(dimension.space, value)
            if end is not None:
                lines.append(f"{key}={value} lies at the edge of its range ({end})")
        return list(filter(None, lines))

    def listed(
        self,
        trial: EndedTrial,
        label: str,
    ) -> dict[str, Any]:
        """The method with a trial's values, as a study file lists it."""
        arguments, settings = split_values(trial.values)
        entry = self.entry
        row: dict[str, Any] = {
            "name": entry.name,
            "label": label,
            **entry.settings,
            **settings,
        }
        if entry.when:
            row["when"] = dict(entry.when)
        row["init_args"] = {**entry.arguments, **arguments}
        return row


def few(number: int) -> str:
    """The warning that so many trials are too few; empty where they are not."""
    line = f"{number} trials: below {RANDOM} the luck of the draw decides"
    return line if number < RANDOM else ""


def split_values(
    values: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a trial that are a method's arguments, and those that are keys of its own."""
    arguments, settings = {}, {}
    for key, value in values.items():
        if key.startswith("method."):
            arguments[key.removeprefix("method.")] = value
        else:
            settings[key] = value
    return arguments, settings


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
        start = tuned.ended[0]
        if tuned.best.values != start.values:
            methods.append(tuned.listed(start, f"{tuned.entry.label} {UNTUNED}"))
    rest = {
        "methods": methods,
        "seeds": seeds,
        "forced": False,
    }
    if grid:
        rest["grid"] = grid
    return as_yaml(base, rest)


def trial_rows(tuned_methods: Sequence[Tuned]) -> list[dict[str, Any]]:
    """A row of `trials.csv` for each trial; an empty score: refused, and why."""
    rows = []
    for tuned in tuned_methods:
        for trial in tuned.ended:
            score = None if trial.score is None else tuned.metric.merit(trial.score)
            row = {
                "method": tuned.entry.label,
                "trial": trial.number,
                "score": score,
            }
            rows.append(row | {"why": trial.why, "values": json.dumps(trial.values)})
    return rows


def table(tuned_methods: Sequence[Tuned]) -> Table:
    """For the terminal."""
    shown = Table(title="chosen on validation data", title_justify="left")
    for name in ("method", "trials", "start", "min", "median", "max", "gain"):
        shown.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    shown.add_column("choice")
    for tuned in tuned_methods:
        row = tuned.row()
        refused = f" ({row['refused']} refused)" if row["refused"] else ""
        columns = ("start", "min", "median", "max", "gain")
        scores = [tuned.metric.shown(row[name]) for name in columns]
        choice = escape(words(tuned.best.values))
        shown.add_row(
            escape(tuned.entry.label),
            f"{row['trials']}{refused}",
            *scores,
            choice,
        )
    return shown
