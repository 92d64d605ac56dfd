"""The trainings of `fl-train worth`: what is missing of them, in worker processes, with a bar of the time left."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.cli.study import run_safely, train, worker_count
from fl_lightning.config import Config
from fl_lightning.errors import RunFailed
from fl_lightning.study.folder import StudyFolder

Task = tuple[Config, Path, Path | None, dict[str, str | None]]
"""As in `gains.further`."""


class TooSlow(Exception):
    """The trainings would take so many seconds, altogether, and may not."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


def missing(tasks: Sequence[Task]) -> list[Task]:
    """Those that have not ended or not been scored."""
    from fl_lightning.gains.scores import place

    return [
        (config, folder, out, rows)
        for config, folder, out, rows in tasks
        if not (folder / "summary.json").is_file()
        or (out is not None and not all(place(out, label, config.seed).is_file() for label in rows))
    ]


def train_and_score(job: Task) -> str | None:
    """Do one job; None, or one line that says why it failed."""
    from fl_lightning.gains.runs import score

    config, folder, out, rows = job

    def work() -> None:
        if not (folder / "summary.json").is_file():
            train(config, folder, accept=True)
        if out is not None:
            score(config, folder, out, rows)

    return run_safely(work)


def run_all_of(
    workers: int | None,
    folder: StudyFolder,
    jobs: Sequence[Task],
    config: Config,
    line: str,
    limit: float,
    begin: float,
) -> None:
    """Do the jobs in workers, with a bar, and write what has failed.

    Args:
        workers: processes; None: one a core.
        folder: has the logs.
        jobs: what is missing.
        config: of one of them.
        line: the command that goes on.
        limit: seconds since `begin` that they may take altogether, as far as two fifths of them can tell.
        begin: on the monotonic clock.

    Raises:
        TooSlow: they would take longer.
        RunFailed: runs have failed; the others have been run.
    """
    import fl_lightning.gains.runs  # noqa: F401  before the workers are forked: they need not import it again
    from fl_lightning import provenance
    from fl_lightning.study.workers import run_all

    provenance.look()  # likewise
    failures: dict[str, str] = {}
    first, done, few = time.monotonic(), 0, max(1, 2 * len(jobs) // 5)
    logs = folder.path / "logs"
    try:
        with _bar(len(jobs)) as step:
            work = run_all(train_and_score, jobs, worker_count(workers, config), logs, lambda numbers: None)
            with contextlib.closing(work) as all_ended:
                for ended in all_ended:
                    done += 1
                    if ended.error is not None:
                        failures[str(jobs[ended.job][1])] = ended.error
                    step(done, failures)
                    whole = (time.monotonic() - first) / done * len(jobs) + first - begin
                    if done >= few and whole > limit:
                        raise TooSlow(whole)
    except BaseException as error:
        if not isinstance(error, Exception):  # Ctrl-C, SIGTERM
            print(f"worth: stopped with {done} of {len(jobs)} trainings done; it goes on with: {line}", file=sys.stderr)
        raise
    folder.write_failures(failures)
    if failures:
        name, why = next(iter(failures.items()))
        raise RunFailed(
            f"{len(failures)} of {len(jobs)} runs failed, the first, {name}: {why}; the same command tries again"
        )


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Any]:
    """What shows how many of `total` are done, and the time left: a bar, or without a terminal a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    start = time.monotonic()
    if console.is_terminal and total:
        columns = (TextColumn("trainings"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, auto_refresh=False) as progress:
            task = progress.add_task("", total=total)
            progress.refresh()

            def drawn(done: int, failures: dict[str, str]) -> None:
                progress.update(task, completed=done, refresh=True)

            yield drawn
        return

    def printed(done: int, failures: dict[str, str]) -> None:
        left = (time.monotonic() - start) / done * (total - done)
        if done in (1, total) or done % max(1, total // 10) == 0:
            print(
                f"worth: {done} of {total} trainings, about {left / 60:.1f} minutes left", file=sys.stderr, flush=True
            )

    yield printed
