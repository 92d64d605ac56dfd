"""Runs what is missing of a study, in worker processes, and shows how it goes."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from rich.console import Console
from rich.live import Live

from fl_lightning.foundation.errors import RunFailed
from fl_lightning.foundation.signals import raise_swallowed
from fl_lightning.lab.study.board import Board, CellState, State, called, progress_line
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.lab.study.grid import Run
from fl_lightning.lab.study.workers import Ended, Serve, serve_all

NAMED = 3
"""Failed runs that the last line names."""
SECONDS = 1.0
"""Between two pictures of the table: each reads the tables of the runs that are going on."""


class Runner:
    """One call of `fl-train study`.

    Args:
        folder: the study's.
        runs: that are to be; those that have finished are left alone.
        serve: what a worker does (study/workers.py).
        jobs: what it is given, in the order of `runs`.
    """

    def __init__(
        self,
        folder: StudyFolder,
        runs: list[Run],
        serve: Serve,
        jobs: list[Any],
    ) -> None:
        self.folder, self.serve = folder, serve
        pairs = zip(runs, jobs, strict=True)
        missing = [pair for pair in pairs if not folder.finished(pair[0].folder)]
        self.todo = [run for run, _ in missing]
        self.jobs = [job for _, job in missing]
        self.board = Board(folder, [cell for run in runs for cell in run.cells()])
        self.number = len(runs)
        self.ended = len(runs) - len(missing)
        self.failures: dict[str, str] = {}
        # but for those that are tried again
        self._earlier_failures = folder.failures()
        for run in self.todo:
            self._earlier_failures.pop(run.folder, None)
        self._console = Console(stderr=True)
        self._live: Live | None = None
        self._shown = -SECONDS

    def run(self, count: int, most: int = 1) -> None:
        """Run what is missing in `count` workers, `most` runs at a time in each.

        Raises:
            RunFailed: runs have failed; the others have been run.
        """
        self.folder.write_failures(self._earlier_failures)
        if self._console.is_terminal:
            # No thread of its own: workers that take a dead one's place are forked from this
            # process.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        try:
            logs = self.folder.path / "logs"
            ends = serve_all(self.serve, self.jobs, count, logs, self._show, most)
            with contextlib.closing(ends):
                for ended in ends:
                    self._tell(ended)
            self._show([], last=True)
        finally:
            if self._live is not None:
                self._live.stop()
        if self.failures:
            names = [called(run.cells()) for run in self.todo if run.folder in self.failures]
            more = f"; and {len(names) - NAMED} more" if len(names) > NAMED else ""
            first = next(iter(self.failures.values()))
            raise RunFailed(
                f"{len(names)} of {self.number} runs failed ({'; '.join(names[:NAMED])}{more}), "
                f"the first: {first}; the same command tries them again"
            )

    def progress(self) -> str:
        """The number of runs in each state."""
        return progress_line(self.board.cells, self._states([]))

    def _states(self, running: list[int]) -> list[CellState]:
        busy = {self.todo[k].folder for k in running}

        def now(run: str) -> State | None:
            if run in busy:
                return "running"
            return "failed" if run in self.failures else None

        return self.board.look(now)

    def _show(self, running: list[int], last: bool = False) -> None:
        """Draw the table anew, where there is a terminal."""
        raise_swallowed()
        now = time.monotonic()
        if self._live is None or (now - self._shown < SECONDS and not last):
            return
        self._shown = now
        most = max(1, self._console.height - 6)  # title, frame and heading
        self._live.update(self.board.table(self._states(running), most), refresh=True)

    def _tell(self, ended: Ended) -> None:
        """Keep a failure, and say what has ended: a line each, where there is no terminal (failures
        always)."""
        run = self.todo[ended.job]
        name = called(run.cells())
        if ended.error is not None:
            self.failures[run.folder] = ended.error
            self.folder.write_failures(self._earlier_failures | self.failures)
            self._print(f"{name} failed: {ended.error}")
            return
        self.ended += 1
        if self._live is None:
            states = Board(self.folder, run.cells()).look(lambda run: None)
            scores = [f"{state.metric.shown(state.score)} ({state.judge})" for state in states]
            begin = f"[{self.ended}/{self.number}] {name}"
            self._print(f"{begin}: {', '.join(scores)}, {states[0].seconds:.1f} s")

    def _print(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(line, soft_wrap=True, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)
