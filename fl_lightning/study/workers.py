"""Worker processes that stay up between runs: what they import is imported once, and the loss of one costs one run.

They are forked from the process that has checked the study, and so has imported everything. It must run no other
threads (none may hold a lock that the fork would copy), and must not have touched a GPU.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

PATIENCE = 10.0
"""Seconds that interrupted workers have to close what is open: as `fl-train` gives its ranks."""
TICK = 0.5
"""Seconds between looks at what goes on."""


@dataclass
class Ended:
    """How job number `job` has ended: `error` is None, or one line that says why it failed."""

    job: int
    error: str | None


class Worker:
    """One process that runs `work(job)` for one job after another; its output goes to the file `log`."""

    def __init__(self, work: Callable[[Any], str | None], log: Path) -> None:
        context = multiprocessing.get_context("fork")
        self.job: int | None = None
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.pipe, work, log, os.getpid()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on threads: libraries' idle ones here
            self.process.start()
        theirs.close()

    def start(self, number: int, job: Any) -> None:
        """Begin with a job."""
        self.job = number
        self.pipe.send(job)

    def answer(self) -> Ended:
        """How its job has ended; a process that died takes its job along."""
        assert self.job is not None
        try:
            error = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(PATIENCE)
            code = self.process.exitcode
            how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
            error = f"its process died ({how})"
        ended, self.job = Ended(self.job, error), None
        return ended


def run_all(
    work: Callable[[Any], str | None], jobs: Sequence[Any], count: int, logs: Path, on_look: Callable[[list[int]], None]
) -> Generator[Ended, None, None]:
    """Run `work(job)` for all jobs in `count` processes, and say of each how it has ended, as it ends.

    Args:
        work: returns None, or one line that says why it failed. Ctrl-C and SIGTERM of this process reach it as
            KeyboardInterrupt.
        logs: folder for what workers print.
        told: called with the numbers of the jobs that are running, every `TICK` seconds.
    """
    left = list(range(len(jobs)))[::-1]
    workers = [Worker(work, logs / f"worker-{k + 1}.log") for k in range(min(count, len(jobs)))]
    try:
        while True:
            for k, worker in enumerate(workers):
                if worker.job is None and left:
                    if not worker.process.is_alive():
                        worker = workers[k] = Worker(work, logs / f"worker-{k + 1}.log")
                    number = left.pop()
                    worker.start(number, jobs[number])
            busy = {worker.pipe: worker for worker in workers if worker.job is not None}
            if not busy:
                return
            on_look([worker.job for worker in busy.values() if worker.job is not None])
            for pipe in wait(list(busy), TICK):
                yield busy[pipe].answer()  # type: ignore[index]
    finally:
        _stop(workers)


def _stop(workers: list[Worker]) -> None:
    """End all workers; those at work may close what is open."""
    deadline = time.monotonic() + PATIENCE
    for worker in workers:
        worker.process.terminate()
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()


def _serve(pipe: Connection, parents: Connection, work: Callable[[Any], str | None], log: Path, parent: int) -> None:
    """One worker: jobs in, answers out, until this process is told to end."""
    ended = False

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal ended
        ended = True  # where nobody sees the exception: what a destructor raises is dropped
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent tells us
    signal.signal(signal.SIGTERM, end)  # unwind: close what is open
    _prctl_pr_set_pdeathsig(signal.SIGKILL)  # an orphan would hold its run against the study that goes on with it
    parents.close()
    log.parent.mkdir(exist_ok=True)
    into = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(into, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    gc.freeze()  # what has been imported is not looked through again and again
    try:
        while os.getppid() == parent and not ended:
            if pipe.poll(1.0):
                pipe.send(work(pipe.recv()))
                gc.collect()  # a run's models are in circles, and another's come on top
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # what the parent wants done at its exit is not ours to do
