"""The state of a study as a table, read from its folder: the same whichever process runs the
study."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from fl_lightning.foundation.errors import Damaged
from fl_lightning.foundation.log import in_time
from fl_lightning.foundation.metric import ACCURACY, Metric, of_rows
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.lab.study.grid import by_key
from fl_lightning.results.folder import RunFolder, final_kind
from fl_lightning.results.runs import words as setting_words

State = Literal[
    "finished", "running", "starting", "queued", "stopped", "failed", "unreadable", "waiting"
]

_COUNTED: tuple[State, ...] = ("running", "starting", "queued", "stopped", "failed", "unreadable")
"""States that the heading counts."""


@dataclass(frozen=True)
class Seen:
    """One cell, as its folder tells."""

    state: State
    round: int = 0
    score: float = math.nan
    """Of the models of the cell's judge, mean over clients: of all that have a final model, or else
    of the last judged round's. The same as `fl-train compare` has it."""
    metric: Metric = ACCURACY
    judge: str = ""
    """The kind of model that `score` speaks of; empty before one was judged."""
    seconds: float = math.nan
    """Of the whole run; NaN unless it has ended."""


class Board:
    """The table of a study; what has ended is read once."""

    def __init__(self, folder: StudyFolder, cells: list[dict[str, Any]]) -> None:
        self.folder, self.cells = folder, cells
        self._ended: dict[tuple[str, str], Seen] = {}

    def look(self, now: Callable[[str], State | None]) -> list[Seen]:
        """The state of each cell. `now`: of a run folder (relative) that has not ended, where more
        than that is known: running, starting, queued, failed."""
        return [self._look(cell, now) for cell in self.cells]

    def _look(self, cell: dict[str, Any], now: Callable[[str], State | None]) -> Seen:
        key = cell["folder"], cell["label"]
        if key in self._ended:
            return self._ended[key]
        run = RunFolder(self.folder.path / cell["folder"])
        try:
            rows = run.read("metrics")
            ended = self.folder.finished(cell["folder"])
            summary = run.read_summary() if ended else {}
        except Damaged:
            return Seen("unreadable")
        done = int(rows[-1]["round"]) if rows else 0
        metric = of_rows(rows)
        column = metric.by(cell["judge"]) if "judge" in cell else metric.of("mean")
        score = next((row[column] for row in reversed(rows) if column in row), math.nan)
        judge = cell.get("judge") or run.judge(metric, summary) or ""
        if ended:
            if cell.get("judge") in (None, final_kind(summary)):
                score = float(summary.get(metric.of("final_mean"), score))
            seconds = float(summary.get("wall_seconds", math.nan))
            self._ended[key] = Seen("finished", done, score, metric, judge, seconds)
            return self._ended[key]
        state = now(cell["folder"]) or ("stopped" if run.path.is_dir() else "waiting")
        return Seen(
            "starting" if state == "running" and not rows else state, done, score, metric, judge
        )

    def table(self, seen: list[Seen], most: int | None = None) -> Table:
        """A line for each method in a setting; of more than `most`, those that something is going
        on in."""
        rows = [(json.dumps(cell["setting"]), cell["label"]) for cell in self.cells]
        shown = list(by_key(range(len(rows)), lambda k: rows[k]).values())
        if most is not None and len(shown) > most:
            shown = [
                line for line in shown if {seen[k].state for k in line} & {"running", "failed"}
            ][:most]
        table = Table(title=words(self.cells, seen), title_justify="left", caption_justify="left")
        settings = any(cell["setting"] for cell in self.cells)
        for column in [*(["setting"] if settings else []), "method", "judged"]:
            table.add_column(column, no_wrap=column != "setting")
        for column in ("seeds", "mean ± std"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("now")
        for line in shown:
            first, ended = (
                self.cells[line[0]],
                [seen[k] for k in line if seen[k].state == "finished"],
            )
            judged = ", ".join(sorted({seen[k].judge for k in line} - {""}))
            texts = (judged, f"{len(ended)}/{len(line)}", _spread(ended), self._now(line, seen))
            table.add_row(
                *([escape(setting_words(first["setting"]))] if settings else []),
                first["label"],
                *texts,
            )
        return table

    def _now(self, line: list[int], seen: list[Seen]) -> str:
        parts = []
        for k in line:
            one, at = seen[k], ""
            if one.state in ("running", "stopped"):
                at = f": round {one.round}" + (
                    "" if math.isnan(one.score) else f", {one.metric.shown(one.score)}"
                )
            if one.state not in ("finished", "queued", "waiting"):
                parts.append(f"seed {self.cells[k]['seed']} {one.state}{at}")
        return "; ".join(parts)


def words(cells: list[dict[str, Any]], seen: list[Seen]) -> str:
    """The number of runs in each state, and how long the rest will take."""
    by_run = {cell["folder"]: state for cell, state in zip(cells, seen, strict=True)}
    states = Counter(state.state for state in by_run.values())
    parts = [f"{states['finished']} of {len(by_run)} runs finished"]
    parts += [f"{states[state]} {state}" for state in _COUNTED if states[state]]
    took = [
        s.seconds for s in by_run.values() if s.state == "finished" and not math.isnan(s.seconds)
    ]
    left = len(by_run) - states["finished"] - states["failed"]
    if took and left and (busy := states["running"] + states["starting"]):
        parts.append(f"about {in_time(median(took) * left / busy)} left")
    return ", ".join(parts)


def called(cells: Iterable[dict[str, Any]]) -> str:
    """A run by its cells: `kapc lam=0.5, data.alpha=0.1, seed 2`."""
    cells = list(cells)
    labels = " and ".join(dict.fromkeys(cell["label"] for cell in cells))
    return ", ".join(
        filter(None, [labels, setting_words(cells[0]["setting"]), f"seed {cells[0]['seed']}"])
    )


def _spread(ended: list[Seen]) -> str:
    scores = [seen.score for seen in ended if not math.isnan(seen.score)]
    if not scores:
        return ""
    metric = ended[0].metric
    around = f" ± {metric.shown(stdev(scores))}" if len(scores) > 1 else ""
    return metric.shown(fmean(scores)) + around
