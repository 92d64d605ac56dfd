"""A process beside the training that draws, so that no round waits for a picture.

It is a fresh Python without torch (some 90 MB once matplotlib is there), started with the first picture and kept for
further runs of this process. It ends when the pipe to it is closed, however this process goes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from fl_lightning.drawing.heatmap import save_png
from fl_lightning.errors import MachineFailed
from fl_lightning.record import Picture

Pictures = dict[str, np.ndarray]
_SOURCES = str(Path(__file__).resolve().parents[2])
_ENDING = 5.0  # seconds that it may take to end, with nothing left to draw


def draw(function: Callable[..., Pictures], *args: object, files: Mapping[str, Path | None]) -> dict[str, Picture]:
    """Have `function(*args)` draw pictures, and write those of `files` that have a path; by the names in `files`.

    Where it finds nothing to see it may leave some out. `function` is found again by its import path: it stands in a
    module, best in one that does not import torch. What `args` hold is copied now.
    """
    places = {name: path and path.absolute() for name, path in files.items()}  # that process stands elsewhere
    return _painter().draw(pickle.dumps((function, args, places)), list(files))


class Painter:
    """The process, and the thread that hands it what there is to draw, one after the other."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[bytes, Future[Pictures]]] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._pass_on, name="pictures", daemon=True).start()
        atexit.register(self.close)

    def draw(self, job: bytes, names: list[str]) -> dict[str, Picture]:
        """Queue a pickled job; its pictures, which are being drawn."""
        done: Future[Pictures] = Future()
        self._jobs.put((job, done))
        return {name: Picture(done, name) for name in names}

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.close()  # type: ignore[union-attr]
            self._process.wait(_ENDING)
        self._lost()

    def _pass_on(self) -> None:
        while True:
            job, done = self._jobs.get()
            try:
                made, reason = self._ask(job)
            except Exception as error:  # whatever it is, nobody is to wait for ever
                code = self._lost()
                reason = f"the process that draws has ended ({type(error).__name__}, exit code {code})"
                done.set_exception(MachineFailed(reason))
                continue
            if reason:
                done.set_exception(MachineFailed(reason))
            else:
                done.set_result(made)

    def _lost(self) -> int | None:
        """Give up a process that does not answer as it should; its exit code, None if it could not be started."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()  # where it has ended already this does nothing
        code = process.wait()
        for pipe in (process.stdin, process.stdout):  # now, since nobody reads any more: closing waits for a reader
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        return code

    def _ask(self, job: bytes) -> tuple[Pictures, str]:
        """What the process answers: pictures, or why there are none; where there is no process, one is started."""
        if self._process is None:
            code = f"import sys; sys.path.append({_SOURCES!r}); from {__name__} import serve; serve()"
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
                cwd="/",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(job)
        stdin.flush()
        answer: tuple[Pictures, str] = pickle.load(stdout)
        return answer


_this: Painter | None = None


def _painter() -> Painter:
    global _this
    if _this is None:
        _this = Painter()
    return _this


def _forget() -> None:
    """In a forked process nobody hands anything on: it begins with a painter of its own."""
    global _this
    _this = None


os.register_at_fork(after_in_child=_forget)


def serve() -> None:
    """Draw what comes on standard input until it is closed; answer with the pictures, or with what went wrong."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints, prints nothing into the answers
    while True:
        try:
            function, args, files = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            made = function(*args)
            for name, path in files.items():
                if path is not None and name in made:
                    save_png(made[name], path)
            answer: tuple[Pictures, str] = made, ""
        except Exception as error:
            answer = {}, f"{type(error).__name__}: {error}"
        try:
            pickle.dump(answer, answers)
            answers.flush()
        except BrokenPipeError:  # nobody waits for it any more
            return
