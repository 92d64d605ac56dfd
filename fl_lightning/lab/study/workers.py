"""Worker processes that run several jobs each: imports happen once, and a process that dies costs
one job.

Workers are forked from the process that has checked the study and has imported everything. It must
have no other threads (one might hold a lock, which the fork would copy), and must not have used a
GPU.

`serve_all` starts the workers and sends numbered jobs through each one's pipe. In a worker,
`_serve` calls `serve(more)`, which asks `more` for the next job, does it, and yields the job's
number and error; `_serve` sends these back.
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
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from fl_lightning.foundation.errors import BadInput, RunFailed

PATIENCE = 10.0
"""Seconds that interrupted workers have to close files and connections: as many as `fl-train` gives
its ranks."""
TICK = 0.5
"""Seconds between calls of `on_look`."""


@dataclass
class EndedJob:
    """The end of job number `job`; `error` is None, or a line that says why it failed."""

    job: int
    error: str | None


More = Callable[[bool], "tuple[int, Any] | None"]
"""Returns the next job with its number. Called with True, it waits, and None means that there are
no more jobs; called with False, None may also mean that no job is there yet."""
Serve = Callable[[More], Iterator[tuple[int, "str | None"]]]
"""Runs the jobs that `More` gives, and yields the number and error (or None) of each as it ends."""


class WorkerProcess:
    """One process that runs jobs, up to `most` at a time; its output goes to the file `log`."""

    def __init__(
        self,
        serve: Serve,
        log: Path,
        most: int = 1,
    ) -> None:
        context = multiprocessing.get_context("fork")
        self.jobs: list[int] = []
        self.most = most
        self.pipe, end = context.Pipe()
        arguments = (end, self.pipe, serve, log, os.getpid())
        self.process = context.Process(target=_serve, args=arguments)
        with warnings.catch_warnings():
            # Python 3.12 warns of threads; here they are libraries' idle ones
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        end.close()

    def start(self, number: int, job: Any) -> None:
        """Send the process a job."""
        self.jobs.append(number)
        self.pipe.send((number, job))

    def ended_jobs(self) -> list[EndedJob]:
        """Wait for the process to report that a job has ended, and return its end; if the process
        has died, return the ends of all its jobs."""
        try:
            number, error = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(PATIENCE)
            code = self.process.exitcode
            how = f"exit code {code}"
            if code is not None and code < 0:
                how = f"killed by {signal.Signals(-code).name}"
            numbers, self.jobs = self.jobs, []
            return [EndedJob(number, f"its process died ({how})") for number in numbers]
        self.jobs.remove(number)
        return [EndedJob(number, error)]


def one_by_one(work: Callable[[Any], str | None]) -> Serve:
    """Returns a `Serve` that does one job after the other by calling `work`."""

    def serve(more: More) -> Iterator[tuple[int, str | None]]:
        while (numbered := more(True)) is not None:
            number, job = numbered
            yield number, work(job)

    return serve


def run_all(
    work: Callable[[Any], str | None],
    jobs: Sequence[Any],
    count: int,
    logs: Path,
    on_look: Callable[[list[int]], None],
) -> Generator[EndedJob, None, None]:
    """Run all jobs in `count` processes, one at a time in each, and yield each job's end.

    Args:
        work: does one job; returns None, or a line that says why the job failed.
        jobs: arguments of the jobs, which are numbered from 0.
        count: number of processes.
        logs: folder for the workers' output.
        on_look: called every `TICK` seconds with the numbers of the running jobs.
    """
    return serve_all(one_by_one(work), jobs, count, logs, on_look)


def in_a_process(
    work: Callable[[Any], Any],
    argument: Any,
) -> Any:
    """Returns `work(argument)`, called in a process of its own, since a process that forks workers
    must have no threads.

    Raises:
        BadInput: `work` raised it.
        RunFailed: the process died, or `work` raised another error.
    """

    def tried(argument: Any) -> Any:
        try:
            return (work(argument),)
        except (BadInput, RunFailed) as error:
            return error
        except Exception as error:
            return RunFailed(f"{type(error).__name__}: {error}")

    with tempfile.TemporaryDirectory() as logs:
        ends = run_all(
            tried,
            [argument],
            1,
            Path(logs),
            lambda numbers: None,
        )
        with contextlib.closing(ends):
            # in place of an error: the result of `tried`, or a line on a process that died
            answer: Any = next(ends).error
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
) -> Generator[EndedJob, None, None]:
    """Run all jobs in `count` processes, `most` at a time in each, and yield each job's end.

    Args:
        serve: runs jobs in a process. Ctrl-C and SIGTERM of this process reach it as
            KeyboardInterrupt.
        jobs: arguments of the jobs, which are numbered from 0.
        count: number of processes.
        logs: folder for the workers' output.
        on_look: called every `TICK` seconds with the numbers of the running jobs.
        most: most jobs of a process at a time.
    """
    waiting = deque(enumerate(jobs))
    most = min(most, max(1, -(-len(jobs) // count)))  # jobs are spread over all processes
    files = [logs / f"worker-{k + 1}.log" for k in range(min(count, len(jobs)))]
    workers = [WorkerProcess(serve, file, most) for file in files]
    try:
        while True:
            while waiting:
                # the worker with the fewest jobs gets the next one
                k, worker = min(enumerate(workers), key=lambda pair: len(pair[1].jobs))
                if len(worker.jobs) == most:
                    break
                if not worker.jobs and not worker.process.is_alive():
                    worker = workers[k] = WorkerProcess(serve, files[k], most)
                worker.start(*waiting.popleft())
            busy = {worker.pipe: worker for worker in workers if worker.jobs}
            if not busy:
                return
            on_look([number for worker in busy.values() for number in worker.jobs])
            for pipe in wait(list(busy), TICK):
                yield from busy[pipe].ended_jobs()  # type: ignore[index]
    finally:
        _stop(workers)


def _stop(workers: list[WorkerProcess]) -> None:
    """End all workers; they have `PATIENCE` seconds to close files and connections."""
    deadline = time.monotonic() + PATIENCE
    for worker in workers:
        worker.process.terminate()
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()


def _serve(
    pipe: Connection,
    parents: Connection,
    serve: Serve,
    log: Path,
    parent: int,
) -> None:
    """Run a worker: receive jobs and send back their ends, until the process is told to end."""
    ended = False

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal ended
        ended = True  # in case the exception is dropped, as in a destructor
        raise KeyboardInterrupt

    # Ctrl-C reaches all processes of a terminal; the parent sends SIGTERM
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)  # unwind, so that files are closed
    # an orphan would keep the lock of its run
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    # this variable of a W&B agent is for one run, and a worker has several
    os.environ.pop("WANDB_SWEEP_PARAM_PATH", None)
    parents.close()
    log.parent.mkdir(exist_ok=True)
    into = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    streams = []
    for stream in (1, 2):
        os.dup2(into, stream)
        file = os.fdopen(
            stream,
            "w",
            buffering=1,
            encoding="utf-8",
            errors="backslashreplace",
        )
        streams.append(file)
    sys.stdout, sys.stderr = streams
    gc.freeze()  # the garbage collector need not search imported modules

    def more(waits: bool) -> tuple[int, Any] | None:
        while os.getppid() == parent and not ended:
            if pipe.poll(1.0 if waits else 0.0):
                numbered: tuple[int, Any] = pipe.recv()
                return numbered
            if not waits:
                break
        return None

    try:
        for number, error in serve(more):
            pipe.send((number, error))
            gc.collect()  # free the models of this run, which are in reference cycles
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # without the parent's exit handlers
