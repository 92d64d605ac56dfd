"""The state of all runs of a folder, or of a study."""

from __future__ import annotations

import contextlib
import fcntl
import math
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.markup import escape
from rich.table import Table

from fl_lightning.configuration.config import check
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.log import in_time
from fl_lightning.foundation.metric import ACCURACY, Metric
from fl_lightning.lab.queue import ALIVE, Queued, queued
from fl_lightning.lab.study.board import table as study_table
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.results.opening import CONFIG, LOCK, check_path
from fl_lightning.results.result import RunResult

STALE = 3.0
"""Without a lock to ask, a run counts as running if it wrote a round within so many times its usual
round."""


@dataclass(frozen=True)
class Standing:
    """The state of one run, by its folder."""

    name: str
    state: str
    method: str = ""
    done: int = 0
    rounds: int = 0
    metric: Metric = ACCURACY
    judge: str = ""
    """The kind of model that `last` and `best` speak of; empty while that is not known."""
    last: float = math.nan
    """The judge's mean in the last judged round; NaN before there is one."""
    best: float = math.nan
    left: float | None = None
    """Seconds to the end, by the median of the last rounds, where it is running."""
    silent: float | None = None
    """Seconds since it wrote; None where it never has."""
    why: str = ""
    """What a queued job waits for, in SLURM's word."""


def standing(
    folder: Path,
    now: float,
    job: Queued | None = None,
) -> Standing:
    """The state of the run in `folder` at time `now` (seconds since the epoch); `job` is what SLURM
    says of it.

    The first that holds decides: it has a summary; a process is at work; SLURM has the job;
    failure.txt is newer than the tables; else it has stopped, or waits.
    """
    name = folder.name
    try:
        run = RunResult(folder)
        rows = run.rows("metrics")
        if run.rounds_asked is None or not run.config.get("method") or run.notes["accuracy"]:
            raise BadInput("status", str(folder), "its tables cannot be read")
    except BadInput:
        return Standing(name, "unreadable", silent=0.0)
    done, rounds = run.rounds_done, run.rounds_asked
    mean = run.metric.of("mean")
    judged = run.rows_with(mean)
    wrote = max(p.stat().st_mtime for p in (folder / CONFIG, folder / "metrics.csv") if p.exists())
    usual = median(row.get("seconds", 0.0) for row in rows[-5:]) if rows else 0.0
    state: str = "stopped" if rows or (folder / "log.txt").exists() else "waiting"
    if run.finished:
        state = "finished"
    elif _at_work(folder, now - wrote, usual):
        state = "running" if rows else "starting"
    elif job is not None and (job.state in ALIVE or not rows):
        state = job.state
    elif (folder / "failure.txt").exists() and (folder / "failure.txt").stat().st_mtime >= wrote:
        state = "failed"
    to_come = (rounds - done) * usual if state == "running" and usual else None
    why = job.why if job is not None and state == "queued" else ""
    return Standing(
        name,
        state,
        method=str(run.method or ""),
        done=done,
        rounds=rounds,
        metric=run.metric,
        judge=run.judge or "",
        last=judged[-1][mean] if judged else math.nan,
        best=run.best(mean)[0],
        left=to_come,
        silent=now - wrote,
        why=why,
    )


def standings(out: Path) -> list[Standing]:
    """All runs in `out`, by name.

    Raises:
        BadInput: there is no such folder, or no run in it.
    """
    check("status", str(out), out.is_dir(), "there is no such folder")
    try:
        list(out.iterdir())
    except OSError as error:
        raise BadInput("status", str(out), f"it cannot be read ({error.strerror})") from None
    is_run = (out / CONFIG).exists()
    jobs = {job.folder.resolve(): job for job in queued(out.resolve().parent if is_run else out)}
    folders = [out] if is_run else sorted(file.parent for file in out.glob(f"*/{CONFIG}"))
    runs = [standing(folder, time.time(), jobs.get(folder.resolve())) for folder in folders]
    if not is_run:
        for job in jobs.values():
            if not (job.folder / CONFIG).exists():
                name = job.folder.name
                runs.append(
                    Standing(
                        name,
                        job.state,
                        job.method,
                        rounds=job.rounds,
                        why=job.why,
                    )
                )
    requirement = f"it holds no run: no {CONFIG} in it or in a folder of it"
    check("status", str(out), bool(runs), requirement)
    return runs


def locked(folder: Path) -> bool | None:
    """Whether a process holds the lock of `folder`; None if there is none to ask."""
    with (
        contextlib.suppress(OSError),
        (folder / LOCK).open(encoding="utf-8") as file,
    ):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
    return None


def table(out: Path) -> Table:
    """Returns a table of the runs in a folder, or of the study in it."""
    check_path("status", out)
    return _of_study(out) or _of_runs(out)


def _of_study(out: Path) -> Table | None:
    """The state of a study's runs, by method and setting; None if the folder holds none."""
    folder = StudyFolder(out)
    if not folder:
        return None
    failures = folder.failures()
    jobs = {job.folder.resolve(): job.state for job in queued(out) if job.state in ALIVE}

    def now(run: str) -> str | None:
        if locked(out / run):
            return "running"
        return jobs.get((out / run).resolve()) or ("failed" if run in failures else None)

    board = study_table(folder, now)
    board.caption = escape("\n".join(f"{run}: {why}" for run, why in failures.items()))
    return board


def _of_runs(out: Path) -> Table:
    table = Table()
    for column in ("run", "method", "judged"):
        table.add_column(column, no_wrap=True)
    for column in ("round", "last", "best", "state", "left", "wrote"):
        table.add_column(column, justify="right", no_wrap=True)
    for s in standings(out):
        cells = (
            f"{s.done}/{s.rounds}",
            _shown(s.metric, s.last),
            _shown(s.metric, s.best),
            f"{s.state} ({s.why})" if s.why else s.state,
            "" if s.left is None else in_time(s.left),
            "" if s.silent is None else f"{in_time(s.silent)} ago",
        )
        table.add_row(*map(escape, (s.name, s.method, s.judge, *cells)))
    return table


def _at_work(
    folder: Path,
    silent: float,
    usual: float,
) -> bool:
    """Whether a process is at work in `folder`: by its lock, or, where there is none to ask, by its
    silence."""
    lock = locked(folder)
    return silent < max(60.0, STALE * usual) if lock is None else lock


def _shown(metric: Metric, value: float) -> str:
    return "" if math.isnan(value) else metric.shown(value).removesuffix(" %")
