"""Worker processes that stay up between runs: what they import is imported once, and the loss of
one costs one run.

They are forked from the process that has checked the study, and so has imported everything. It must
run no other threads (none may hold a lock that the fork would copy), and must not have touched a
GPU.

`serve_all` starts the workers and sends numbered jobs through each one's pipe. In a worker `_serve`
calls `serve(more)`: it asks `more` for the next job, does it, and yields the job's number and
error, which `_serve` sends back.
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
"""Seconds that interrupted workers have to close what is open: as `fl-train` gives its ranks."""
TICK = 0.5
"""Seconds between looks at what goes on."""


@dataclass
class EndedJob:
    """How job number `job` has ended: `error` is None, or one line that says why it failed."""

    job: int
    error: str | None


More = Callable[[bool], "tuple[int, Any] | None"]
"""The next job with its number; None: there is none now, or, asked with True, none at all."""
Serve = Callable[[More], Iterator[tuple[int, "str | None"]]]
"""Runs jobs, and says of each how it has ended: None, or one line that says why it failed."""


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
            # Python 3.12 on threads: libraries' idle ones here
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        end.close()

    def start(self, number: int, job: Any) -> None:
        """Begin with a job."""
        self.jobs.append(number)
        self.pipe.send((number, job))

    def answers(self) -> list[EndedJob]:
        """The job that has ended; of a process that has died, all of its jobs."""
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
    """Runs one job after the other."""

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
    """As `serve_all`, one job after the other in each process: `work` returns None, or why the job
    failed."""
    return serve_all(one_by_one(work), jobs, count, logs, on_look)


def in_a_process(
    work: Callable[[Any], Any],
    argument: Any,
) -> Any:
    """Returns `work(argument)` from a process of its own: one that forks workers must run no
    threads.

    Raises:
        BadInput: `work` has raised it.
        RunFailed: the process died, or `work` has raised something else.
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
            # in place of an error: what `tried` returns, or a line on a process that died
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
    """Run all jobs in `count` processes, `most` at a time in each, and say of each how it has
    ended, as it ends.

    Args:
        serve: what a process does. Ctrl-C and SIGTERM of this process reach it as
            KeyboardInterrupt.
        logs: folder for what workers print.
        on_look: called with the numbers of the jobs that are running, every `TICK` seconds.
    """
    waiting = deque(enumerate(jobs))
    most = min(most, max(1, -(-len(jobs) // count)))  # all processes have their share
    files = [logs / f"worker-{k + 1}.log" for k in range(min(count, len(jobs)))]
    workers = [WorkerProcess(serve, file, most) for file in files]
    try:
        while True:
            while waiting:
                # each has its share of jobs that take long: who has fewest gets the next one
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
                yield from busy[pipe].answers()  # type: ignore[index]
    finally:
        _stop(workers)


def _stop(workers: list[WorkerProcess]) -> None:
    """End all workers; those at work may close what is open."""
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
    gc.freeze()  # what has been imported is not looked through again and again

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
            gc.collect()  # a run's models are in circles, and another's come on top
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # what the parent wants done at its exit is not ours to do
