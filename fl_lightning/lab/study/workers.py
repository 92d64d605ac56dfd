"""Worker processes that stay up between runs: what they import is imported once, and the loss of
one costs one run.

They are forked from the process that has checked the study, and so has imported everything. It must
run no other threads (none may hold a lock that the fork would copy), and must not have touched a
GPU.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from fl_lightning.foundation.errors import BadInput, RunFailed

PATIENCE = 10.0
"""Seconds that interrupted workers have to close what is open: as `fl-train` gives its ranks."""
TICK = 0.5
"""Seconds between looks at what goes on."""


@dataclass
class Ended:
    """How job number `job` has ended: `error` is None, or one line that says why it failed."""

    job: int
    error: str | None


More = Callable[[bool], "tuple[int, Any] | None"]
"""The next job with its number; None: there is none now, or, asked with True, none at all."""
Serve = Callable[[More], Iterator[tuple[int, "str | None"]]]
"""Runs jobs, and says of each how it has ended: None, or one line that says why it failed."""


class Worker:
    """One process that runs jobs, up to `most` at a time; its output goes to the file `log`."""

    def __init__(self, serve: Serve, log: Path, most: int = 1) -> None:
        context = multiprocessing.get_context("fork")
        self.jobs: list[int] = []
        self.most = most
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, self.pipe, serve, log, os.getpid())
        )
        with warnings.catch_warnings():
            # Python 3.12 on threads: libraries' idle ones here
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()

    def start(self, number: int, job: Any) -> None:
        """Begin with a job."""
        self.jobs.append(number)
        self.pipe.send((number, job))

    def answers(self) -> list[Ended]:
        """How a job has ended; a process that died takes all of its jobs along."""
        try:
            number, error = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(PATIENCE)
            code = self.process.exitcode
            how = (
                f"killed by {signal.Signals(-code).name}"
                if code is not None and code < 0
                else f"exit code {code}"
            )
            ended, self.jobs = [Ended(job, f"its process died ({how})") for job in self.jobs], []
            return ended
        self.jobs.remove(number)
        return [Ended(number, error)]


def one_by_one(work: Callable[[Any], str | None]) -> Serve:
    """Runs one job after the other."""

    def serve(more: More) -> Iterator[tuple[int, str | None]]:
        while (job := more(True)) is not None:
            yield job[0], work(job[1])

    return serve


def run_all(
    work: Callable[[Any], str | None],
    jobs: Sequence[Any],
    count: int,
    logs: Path,
    on_look: Callable[[list[int]], None],
) -> Generator[Ended, None, None]:
    """As `serve_all`, one job after the other in each process: `work` returns None, or why the job
    failed."""
    return serve_all(one_by_one(work), jobs, count, logs, on_look)


def in_a_process(work: Callable[[Any], Any], given: Any) -> Any:
    """What `work` makes of `given` in a process of its own: one that forks workers must run no
    threads.

    Raises:
        BadInput: `work` has raised it.
        RunFailed: the process died, or `work` has raised something else.
    """

    def tried(given: Any) -> Any:
        try:
            return (work(given),)
        except (BadInput, RunFailed) as error:
            return error
        except Exception as error:
            return RunFailed(f"{type(error).__name__}: {error}")

    with (
        tempfile.TemporaryDirectory() as logs,
        contextlib.closing(run_all(tried, [given], 1, Path(logs), lambda numbers: None)) as ended,
    ):
        # what `tried` returns, or a line on a process that died
        answer: Any = next(iter(ended)).error
    if isinstance(answer, tuple):
        return answer[0]
    raise answer if isinstance(answer, Exception) else RunFailed(answer)


def serve_all(
    serve: Serve,
    jobs: Sequence[Any],
    count: int,
    logs: Path,
    on_look: Callable[[list[int]], None],
    most: int = 1,
) -> Generator[Ended, None, None]:
    """Run all jobs in `count` processes, `most` at a time in each, and say of each how it has
    ended, as it ends.

    Args:
        serve: what a process does. Ctrl-C and SIGTERM of this process reach it as
            KeyboardInterrupt.
        logs: folder for what workers print.
        on_look: called with the numbers of the jobs that are running, every `TICK` seconds.
    """
    left = list(range(len(jobs)))[::-1]
    most = min(most, max(1, -(-len(jobs) // count)))  # all processes have their share
    workers = [
        Worker(serve, logs / f"worker-{k + 1}.log", most) for k in range(min(count, len(jobs)))
    ]
    try:
        while True:
            while left:  # who has fewest gets the next one: each has its share of what takes long
                k = min(range(len(workers)), key=lambda k: len(workers[k].jobs))
                if len(workers[k].jobs) == most:
                    break
                if not workers[k].jobs and not workers[k].process.is_alive():
                    workers[k] = Worker(serve, logs / f"worker-{k + 1}.log", most)
                number = left.pop()
                workers[k].start(number, jobs[number])
            busy = {worker.pipe: worker for worker in workers if worker.jobs}
            if not busy:
                return
            on_look([job for worker in busy.values() for job in worker.jobs])
            for pipe in wait(list(busy), TICK):
                yield from busy[pipe].answers()  # type: ignore[index]
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


def _serve(pipe: Connection, parents: Connection, serve: Serve, log: Path, parent: int) -> None:
    """One worker: jobs in, answers out, until this process is told to end."""
    ended = False

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal ended
        ended = True  # where nobody sees the exception: what a destructor raises is dropped
        raise KeyboardInterrupt

    # Ctrl-C reaches all processes of a terminal; the parent tells us
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)  # unwind: close what is open
    # an orphan would hold its run against the study that goes on with it
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    # an agent of W&B has started one run, and these are several
    os.environ.pop("WANDB_SWEEP_PARAM_PATH", None)
    parents.close()
    log.parent.mkdir(exist_ok=True)
    into = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(into, stream)
    sys.stdout, sys.stderr = (
        os.fdopen(stream, "w", buffering=1, encoding="utf-8", errors="backslashreplace")
        for stream in (1, 2)
    )
    gc.freeze()  # what has been imported is not looked through again and again

    def more(waits: bool) -> tuple[int, Any] | None:
        while os.getppid() == parent and not ended:
            if pipe.poll(1.0 if waits else 0.0):
                job: tuple[int, Any] = pipe.recv()
                return job
            if not waits:
                break
        return None

    try:
        for number, error in serve(more):
            pipe.send((number, error))
            gc.collect()  # a run's models are in circles, and another's come on top
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # what the parent wants done at its exit is not ours to do
