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
from fl_lightning.lab.study.grid import Entry
from fl_lightning.lab.study.space import Dimension
from fl_lightning.lab.study.trials import RANDOM, Ended, best


@dataclass(frozen=True)
class Tuned:
    """One method's trials. Raises `RunFailed` where its choice is asked for and none of them ended
    well."""

    entry: Entry
    ended: list[Ended]
    metric: Metric
    dimensions: Sequence[Dimension] = ()

    @property
    def best(self) -> Ended:
        """The choice."""
        chosen = best(self.ended)
        if chosen is None:
            raise RunFailed(
                f"{self.entry.label}: none of its {len(self.ended)} trials ended well: "
                f"{self.ended[0].why}"
            )
        return chosen

    def row(self) -> dict[str, Any]:
        """Of `tuned.csv`: scores are on validation data; `gain` is what the best trial has over the
        first."""
        chosen = self.best
        scores = [trial.score for trial in self.ended if trial.score is not None]
        start = self.ended[0].score  # None: its models came to no number
        first, last = (
            self.metric.merit(math.nan if start is None else start),
            self.metric.merit(max(scores)),
        )
        return {
            "method": self.entry.label,
            "trials": len(self.ended),
            "refused": len(self.ended) - len(scores),
            "metric": self.metric.name,
            "start": first,
            "min": min(map(self.metric.merit, scores)),
            "median": median(map(self.metric.merit, scores)),
            "max": max(map(self.metric.merit, scores)),
            "best": last,
            "gain": self.metric.merit(last - first) + 0.0,  # 0, not -0
            "trial": chosen.number,
            "values": json.dumps(chosen.values),
            "start_values": json.dumps(self.ended[0].values),
            "warnings": "; ".join(self.warnings()),
        }

    def warnings(self) -> list[str]:
        """Why the choice may say little: few trials, the start, or a value at the edge of where it
        was searched."""
        if not self.dimensions:
            return []
        values, number = self.best.values, len(self.ended)
        lines = [line] if (line := few(number)) else []
        lines += (
            ["the best trial is the start: nothing was gained"]
            if self.best.number == self.ended[0].number
            else []
        )
        for one in self.dimensions:
            end = edge(one.space, values[one.key])
            lines += (
                [f"{one.key}={values[one.key]} lies at the edge of its range ({end})"]
                if end is not None
                else []
            )
        return lines

    def listed(self, trial: Ended, label: str) -> dict[str, Any]:
        """The method with a trial's values, as a study file lists it."""
        arguments, settings = split_values(trial.values)
        listed: dict[str, Any] = {
            "name": self.entry.name,
            "label": label,
            **self.entry.settings,
            **settings,
        }
        listed |= {"when": dict(self.entry.when)} if self.entry.when else {}
        return listed | {"init_args": {**self.entry.arguments, **arguments}}


def few(number: int) -> str:
    """The warning that so many trials are too few; empty where they are not."""
    return (
        f"{number} trials: below {RANDOM} the luck of the draw decides" if number < RANDOM else ""
    )


def split_values(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a method is given as arguments, and what as keys of its own, of the `values` of a
    trial."""
    arguments = {
        key.removeprefix("method."): v for key, v in values.items() if key.startswith("method.")
    }
    return arguments, {key: v for key, v in values.items() if not key.startswith("method.")}


def study_file(
    base: str, tuned_methods: Sequence[Tuned], seeds: list[int], grid: dict[str, Any], untuned: bool
) -> str:
    """The study of the choices, as YAML: fresh seeds, no forced rows beside those that were tuned.

    Args:
        base: the resolved base, as YAML.
        untuned: list each method with the settings of its first trial, too, where the choice is
            another.
    """
    methods = [one.listed(one.best, one.entry.label) for one in tuned_methods]
    moved = [one for one in tuned_methods if untuned and one.best.values != one.ended[0].values]
    methods += [one.listed(one.ended[0], f"{one.entry.label} {UNTUNED}") for one in moved]
    rest = {"methods": methods, "seeds": seeds, "forced": False, **({"grid": grid} if grid else {})}
    return as_yaml(base, rest)


def trial_rows(tuned_methods: Sequence[Tuned]) -> list[dict[str, Any]]:
    """A row of `trials.csv` for each trial; an empty score: refused, and why."""
    return [
        {
            "method": one.entry.label,
            "trial": trial.number,
            "score": None if trial.score is None else one.metric.merit(trial.score),
            "why": trial.why,
            "values": json.dumps(trial.values),
        }
        for one in tuned_methods
        for trial in one.ended
    ]


def table(tuned_methods: Sequence[Tuned]) -> Table:
    """For the terminal."""
    shown = Table(title="chosen on validation data", title_justify="left")
    for name in ("method", "trials", "start", "min", "median", "max", "gain"):
        shown.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    shown.add_column("choice")
    for one in tuned_methods:
        row, say = one.row(), one.metric.shown
        trials = f"{row['trials']}" + (f" ({row['refused']} refused)" if row["refused"] else "")
        scores = [say(row[name]) for name in ("start", "min", "median", "max")]
        shown.add_row(
            escape(one.entry.label),
            trials,
            *scores,
            say(row["gain"]),
            escape(words(one.best.values)),
        )
    return shown
