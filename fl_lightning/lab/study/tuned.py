"""The results of a search: each method's best trial, the spread over trials, and the study file
with the best values."""

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
from fl_lightning.lab.study.chosen import UNTUNED, values_text
from fl_lightning.lab.study.folder import study_yaml
from fl_lightning.lab.study.grid import ListedMethod
from fl_lightning.lab.study.space import Dimension
from fl_lightning.lab.study.trials import RANDOM, EndedTrial, best


@dataclass(frozen=True)
class Tuned:
    """The trials of one method. `best` raises `RunFailed` if no trial has a score, and so do `row`
    and `warnings`."""

    entry: ListedMethod
    ended: list[EndedTrial]
    metric: Metric
    dimensions: Sequence[Dimension] = ()

    @property
    def best(self) -> EndedTrial:
        """The trial with the best score."""
        chosen = best(self.ended)
        if chosen is None:
            raise RunFailed(
                f"{self.entry.label}: none of its {len(self.ended)} trials ended well: "
                f"{self.ended[0].why}"
            )
        return chosen

    def row(self) -> dict[str, Any]:
        """The row of `tuned.csv`. Scores are on validation data; `gain` is the best trial's score
        minus the first's."""
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
        """Reasons to doubt the choice: few trials, the first trial is the best, or a value lies at
        the edge of its range."""
        if not self.dimensions:
            return []
        lines = [few_trials_warning(len(self.ended))]
        if self.best.number == self.ended[0].number:
            lines.append("the best trial is the start: nothing was gained")
        for dimension in self.dimensions:
            key, value = dimension.key, self.best.values[dimension.key]
            end = edge(dimension.space, value)
            if end is not None:
                lines.append(f"{key}={value} lies at the edge of its range ({end})")
        return list(filter(None, lines))

    def as_listed(
        self,
        trial: EndedTrial,
        label: str,
    ) -> dict[str, Any]:
        """The method with a trial's values, as an entry of a study file."""
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


def few_trials_warning(number: int) -> str:
    """A warning if `number` trials are too few, else an empty text."""
    line = f"{number} trials: below {RANDOM} the luck of the draw decides"
    return line if number < RANDOM else ""


def split_values(
    values: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A trial's values as arguments of the method, and as flat config keys."""
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
    """The study file with the chosen values, as YAML. It sets `forced: false`: baselines that the
    searched study added were tuned, too, and are listed like the other methods.

    Args:
        base: the resolved base, as YAML.
        tuned_methods: the trials of each method.
        seeds: seeds of the study.
        grid: its grid.
        untuned: whether to list each method a second time, with the values of its first trial (the
            base's or the method's defaults), unless those were chosen.
    """
    methods = [tuned.as_listed(tuned.best, tuned.entry.label) for tuned in tuned_methods]
    for tuned in tuned_methods if untuned else ():
        start = tuned.ended[0]
        if tuned.best.values != start.values:
            methods.append(tuned.as_listed(start, f"{tuned.entry.label} {UNTUNED}"))
    rest = {
        "methods": methods,
        "seeds": seeds,
        "forced": False,
    }
    if grid:
        rest["grid"] = grid
    return study_yaml(base, rest)


def trial_rows(tuned_methods: Sequence[Tuned]) -> list[dict[str, Any]]:
    """The rows of `trials.csv`; a refused trial has no score but a reason."""
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
    """The table of results that `fl-train tune` prints."""
    shown = Table(title="chosen on validation data", title_justify="left")
    for name in ("method", "trials", "start", "min", "median", "max", "gain"):
        shown.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    shown.add_column("choice")
    for tuned in tuned_methods:
        row = tuned.row()
        refused = f" ({row['refused']} refused)" if row["refused"] else ""
        columns = ("start", "min", "median", "max", "gain")
        scores = [tuned.metric.shown(row[name]) for name in columns]
        choice = escape(values_text(tuned.best.values))
        shown.add_row(
            escape(tuned.entry.label),
            f"{row['trials']}{refused}",
            *scores,
            choice,
        )
    return shown
