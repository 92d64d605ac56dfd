"""The table of a study's state, read from its folder, whichever processes run the study."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from rich.markup import escape
from rich.table import Table

from fl_lightning.foundation.errors import Damaged
from fl_lightning.foundation.log import in_time
from fl_lightning.foundation.metric import ACCURACY, Metric, of_rows
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.lab.study.grid import by_key
from fl_lightning.results.folder import RunFolder, usual_final_kind
from fl_lightning.results.runs import words as setting_words


@dataclass(frozen=True)
class CellState:
    """The state of one cell (method, setting and seed) of a study, read from its run folder."""

    cell: dict[str, Any]
    """The cell's entry in `study.json`."""
    state: str
    """`finished`, `running`, `starting`, `failed`, `stopped`, `waiting`, `unreadable`, or the state
    of its SLURM job."""
    round: int = 0
    """The last round that was written."""
    score: float = math.nan
    """The judge's score, mean over clients, as in `fl-train compare`: over all clients if they have
    final scores, else over those of the last scored round."""
    metric: Metric = ACCURACY
    judge: str = ""
    """The kind of model that is scored; empty before the first score."""
    seconds: float = math.nan
    """Seconds of the whole run; NaN unless it is finished."""

    @property
    def shown_score(self) -> str:
        """The score as text; empty before the first score."""
        return "" if math.isnan(self.score) else self.metric.shown(self.score)


def state_of(
    folder: StudyFolder, cell: dict[str, Any], live_state: Callable[[str], str | None]
) -> CellState:
    """The state of a cell.

    Args:
        folder: the study's folder.
        cell: an entry of `study.json`.
        live_state: returns the state of a run that has not ended, given its folder (relative to the
            study's): running, starting, queued or failed; None if no more is known than the folder
            shows.
    """
    run = RunFolder(folder.path / cell["folder"])
    has_ended = folder.finished(cell["folder"])
    try:
        rows = run.read("metrics")
        summary = run.read_summary() if has_ended else {}
    except Damaged:
        return CellState(cell, "unreadable")
    state = "finished"
    if not has_ended:
        state = live_state(cell["folder"]) or ("stopped" if run.path.is_dir() else "waiting")
        state = "starting" if state == "running" and not rows else state
    metric, judge = of_rows(rows), cell.get("judge")
    column = metric.by(judge) if judge else metric.of("mean")
    scores = [row[column] for row in rows if column in row] or [math.nan]
    if has_ended and judge in (None, usual_final_kind(summary)):
        scores.append(float(summary.get(metric.of("final_mean"), scores[-1])))
    return CellState(
        cell,
        state,
        int(rows[-1]["round"]) if rows else 0,
        scores[-1],
        metric,
        judge or run.judge(metric, summary) or "",
        float(summary.get("wall_seconds", math.nan)),
    )


def table(folder: StudyFolder, live_state: Callable[[str], str | None]) -> Table:
    """The table of a study's state, with a row for each method in a setting.

    Args:
        folder: the study's folder.
        live_state: returns the state of a run that has not ended (`state_of`).
    """
    states = [state_of(folder, cell, live_state) for cell in folder.cells()]
    board = Table(
        title=_title(states),
        title_justify="left",
        caption_justify="left",
    )
    heads = ("setting", "method", "judged", "seeds", "mean ± std", "now")
    columns = heads if any(state.cell["setting"] for state in states) else heads[1:]
    for column in columns:
        justify: Any = "right" if column in ("seeds", "mean ± std") else "left"
        board.add_column(column, justify=justify, no_wrap=column not in ("setting", "now"))
    lines = by_key(states, lambda s: (json.dumps(s.cell["setting"]), s.cell["label"]))
    for line in lines.values():
        cell = line[0].cell
        ended = [state for state in line if state.state == "finished"]
        cells = {
            "setting": setting_words(cell["setting"]),
            "method": cell["label"],
            "judged": ", ".join(sorted({state.judge for state in line} - {""})),
            "seeds": f"{len(ended)}/{len(line)}",
            "mean ± std": _mean_and_std(ended),
            "now": "; ".join(filter(None, map(_activity, line))),
        }
        board.add_row(*(escape(cells[column]) for column in columns))
    return board


def _activity(state: CellState) -> str:
    """The seed, state and score of a cell that is running, stopped or failed; else empty."""
    if state.state in ("finished", "queued", "waiting"):
        return ""
    place = ""
    if state.state in ("running", "stopped"):
        place = f": round {', '.join(filter(None, [str(state.round), state.shown_score]))}"
    return f"seed {state.cell['seed']} {state.state}{place}"


def _title(states: Sequence[CellState]) -> str:
    """The number of runs in each state, and an estimate of the remaining time."""
    by_run = {state.cell["folder"]: state for state in states}.values()
    counts = Counter(state.state for state in by_run)
    finished = counts.pop("finished", 0)
    parts = [f"{finished} of {len(by_run)} runs finished"]
    parts += [f"{count} {state}" for state, count in counts.items() if state != "waiting"]
    seconds = [state.seconds for state in by_run if not math.isnan(state.seconds)]
    remaining = len(by_run) - finished - counts["failed"]
    busy = counts["running"] + counts["starting"]
    if seconds and remaining and busy:
        parts.append(f"about {in_time(median(seconds) * remaining / busy)} left")
    return ", ".join(parts)


def describe_run(cells: Sequence[dict[str, Any]]) -> str:
    """Name a run by its cells: `kapc lam=0.5, data.alpha=0.1, seed 2`."""
    labels = " and ".join(dict.fromkeys(cell["label"] for cell in cells))
    parts = labels, setting_words(cells[0]["setting"]), f"seed {cells[0]['seed']}"
    return ", ".join(filter(None, parts))


def _mean_and_std(ended: list[CellState]) -> str:
    """The mean over seeds and its standard deviation, as text."""
    scores = [state.score for state in ended if not math.isnan(state.score)]
    if not scores:
        return ""
    metric = ended[0].metric
    deviation = f" ± {metric.shown(stdev(scores))}" if len(scores) > 1 else ""
    return metric.shown(fmean(scores)) + deviation
