"""The state of a study as a table, read from its folder: the same whichever process runs the
study."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
class CellState:
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

    @property
    def shown_score(self) -> str:
        """Empty before there is one."""
        return "" if math.isnan(self.score) else self.metric.shown(self.score)


class Board:
    """The table of a study; what has ended is read once."""

    def __init__(self, folder: StudyFolder, cells: list[dict[str, Any]]) -> None:
        self.folder, self.cells = folder, cells
        self._ended: dict[tuple[str, str], CellState] = {}

    def look(self, now: Callable[[str], State | None]) -> list[CellState]:
        """The state of each cell. `now`: of a run folder (relative) that has not ended, where more
        than that is known: running, starting, queued, failed."""
        return [self._look(cell, now) for cell in self.cells]

    def _look(self, cell: dict[str, Any], now: Callable[[str], State | None]) -> CellState:
        folder, judge = cell["folder"], cell.get("judge")
        key = folder, cell["label"]
        if key in self._ended:
            return self._ended[key]
        run = RunFolder(self.folder.path / folder)
        has_ended = self.folder.finished(folder)
        try:
            rows = run.read("metrics")
            summary = run.read_summary() if has_ended else {}
        except Damaged:
            return CellState("unreadable")
        metric = of_rows(rows)
        column = metric.by(judge) if judge else metric.of("mean")
        scores = [row[column] for row in rows if column in row]
        state = CellState(
            now(folder) or ("stopped" if run.path.is_dir() else "waiting"),
            int(rows[-1]["round"]) if rows else 0,
            scores[-1] if scores else math.nan,
            metric,
            judge or run.judge(metric, summary) or "",
        )
        if has_ended:
            score = state.score
            if judge in (None, final_kind(summary)):
                score = float(summary.get(metric.of("final_mean"), score))
            seconds = float(summary.get("wall_seconds", math.nan))
            self._ended[key] = replace(state, state="finished", score=score, seconds=seconds)
            return self._ended[key]
        is_starting = state.state == "running" and not rows
        return replace(state, state="starting") if is_starting else state

    def table(self, states: list[CellState], most: int | None = None) -> Table:
        """A line for each method in a setting; of more than `most`, those that something is going
        on in."""
        pairs = zip(self.cells, states, strict=True)
        lines = by_key(pairs, lambda pair: (json.dumps(pair[0]["setting"]), pair[0]["label"]))
        shown = list(lines.values())
        if most is not None and len(shown) > most:
            busy = {"running", "failed"}
            shown = [line for line in shown if busy & {state.state for _, state in line}][:most]
        title = progress_line(self.cells, states)
        table = Table(title=title, title_justify="left", caption_justify="left")
        has_settings = any(cell["setting"] for cell in self.cells)
        if has_settings:
            table.add_column("setting")
        for column in ("method", "judged"):
            table.add_column(column, no_wrap=True)
        for column in ("seeds", "mean ± std"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("now")
        for line in shown:
            first, _ = line[0]
            ended = [state for _, state in line if state.state == "finished"]
            judges = {state.judge for _, state in line} - {""}
            texts = [
                first["label"],
                ", ".join(sorted(judges)),
                f"{len(ended)}/{len(line)}",
                _spread(ended),
                "; ".join(filter(None, itertools.starmap(_now, line))),
            ]
            if has_settings:
                texts.insert(0, escape(setting_words(first["setting"])))
            table.add_row(*texts)
        return table


def _now(cell: dict[str, Any], state: CellState) -> str:
    """The state of a seed that is at work or has come to grief, else empty."""
    if state.state in ("finished", "queued", "waiting"):
        return ""
    place = ""
    if state.state in ("running", "stopped"):
        place = f": round {', '.join(filter(None, [str(state.round), state.shown_score]))}"
    return f"seed {cell['seed']} {state.state}{place}"


def progress_line(cells: list[dict[str, Any]], states: list[CellState]) -> str:
    """The number of runs in each state, and how long the rest will take."""
    by_run = {cell["folder"]: state for cell, state in zip(cells, states, strict=True)}
    counts = Counter(state.state for state in by_run.values())
    parts = [f"{counts['finished']} of {len(by_run)} runs finished"]
    parts += [f"{counts[state]} {state}" for state in _COUNTED if counts[state]]
    seconds = [state.seconds for state in by_run.values() if not math.isnan(state.seconds)]
    to_come = len(by_run) - counts["finished"] - counts["failed"]
    busy = counts["running"] + counts["starting"]
    if seconds and to_come and busy:
        parts.append(f"about {in_time(median(seconds) * to_come / busy)} left")
    return ", ".join(parts)


def called(cells: Sequence[dict[str, Any]]) -> str:
    """A run by its cells: `kapc lam=0.5, data.alpha=0.1, seed 2`."""
    labels = " and ".join(dict.fromkeys(cell["label"] for cell in cells))
    parts = [labels, setting_words(cells[0]["setting"]), f"seed {cells[0]['seed']}"]
    return ", ".join(filter(None, parts))


def _spread(ended: list[CellState]) -> str:
    scores = [state.score for state in ended if not math.isnan(state.score)]
    if not scores:
        return ""
    metric = ended[0].metric
    deviation = f" ± {metric.shown(stdev(scores))}" if len(scores) > 1 else ""
    return metric.shown(fmean(scores)) + deviation
