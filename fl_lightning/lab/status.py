"""The states of all runs in a folder, or of a study's runs."""

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
"""Without a lock file, a run counts as running until it has been silent for this many of its usual
rounds, and for a minute at least."""


@dataclass(frozen=True)
class Standing:
    """The state of one run, as its folder shows it."""

    name: str
    state: str
    """`finished`, `running`, `starting`, `stopped`, `waiting`, `failed`, `unreadable`, or the state
    of its SLURM job."""
    method: str = ""
    done: int = 0
    rounds: int = 0
    metric: Metric = ACCURACY
    judge: str = ""
    """The kind of model that `last` and `best` score; empty if unknown."""
    last: float = math.nan
    """Mean score of the judge in the last scored round; NaN before the first."""
    best: float = math.nan
    """Best mean score of the judge in any round."""
    left: float | None = None
    """Seconds to the end, by the median of the last rounds; None unless the run is at work."""
    silent: float | None = None
    """Seconds since the run wrote its config or tables; None if it has no folder yet."""
    why: str = ""
    """SLURM's reason why a queued job waits."""


def standing(
    folder: Path,
    now: float,
    job: Queued | None = None,
) -> Standing:
    """The state of the run in `folder`.

    The first condition that holds decides: the run has a summary; a process is at work; SLURM has
    the job; failure.txt is newer than the tables; the run has written something (stopped), else it
    waits.

    Args:
        folder: run folder.
        now: current time in seconds since the epoch.
        job: the run's entry in SLURM's queue, if any.
    """
    name = folder.name
    unreadable = Standing(name, "unreadable", silent=0.0)
    try:
        run = RunResult(folder)
        rows = run.rows("metrics")
        if run.rounds_asked is None or not run.config.get("method") or run.notes["accuracy"]:
            return unreadable
    except BadInput:
        return unreadable
    done, rounds = run.rounds_done, run.rounds_asked
    mean = run.metric.of("mean")
    judged = run.rows_with(mean)
    last_write = max(
        p.stat().st_mtime for p in (folder / CONFIG, folder / "metrics.csv") if p.exists()
    )
    usual_seconds = median(row.get("seconds", 0.0) for row in rows[-5:]) if rows else 0.0
    failure = folder / "failure.txt"
    state: str = "stopped" if rows or (folder / "log.txt").exists() else "waiting"
    if run.finished:
        state = "finished"
    elif _at_work(folder, now - last_write, usual_seconds):
        state = "running" if rows else "starting"
    elif job is not None and (job.state in ALIVE or not rows):
        state = job.state
    elif failure.exists() and failure.stat().st_mtime >= last_write:
        state = "failed"
    seconds_left = (rounds - done) * usual_seconds if state == "running" and usual_seconds else None
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
        left=seconds_left,
        silent=now - last_write,
        why=why,
    )


def standings(out: Path) -> list[Standing]:
    """The states of all runs in the folder `out`, by name; `out` may be a run folder itself.

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
    check(
        "status",
        str(out),
        bool(runs),
        f"there is no run (no {CONFIG} in it or in its folders): give the folder of runs",
    )
    return runs


def locked(folder: Path) -> bool | None:
    """Whether a process holds the lock of the run in `folder`; None if there is no lock file to
    test."""
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
    """The table that `fl-train status` prints, of the runs in a folder or of the study in it."""
    check_path("status", out)
    return _study_table(out) or _runs_table(out)


def _study_table(out: Path) -> Table | None:
    """The state of a study's runs, by method and setting; None if the folder holds no study."""
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


def _runs_table(out: Path) -> Table:
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
    usual_seconds: float,
) -> bool:
    """Whether a process is at work in `folder`: its lock is held, or, without a lock file, its last
    write is recent."""
    lock = locked(folder)
    return silent < max(60.0, STALE * usual_seconds) if lock is None else lock


def _shown(metric: Metric, value: float) -> str:
    return "" if math.isnan(value) else metric.shown(value).removesuffix(" %")
