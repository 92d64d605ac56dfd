"""Signals that a block of code answers in its own way."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

PATIENCE = 10.0
"""Seconds that interrupted ranks have to close what is open."""


@contextlib.contextmanager
def answered(answer: Callable[[int, FrameType | None], Any], *numbers: int) -> Iterator[None]:
    """Have `answer` called when one of these signals comes within the block; afterwards all is as
    it was.

    Beside the main thread, where Python takes no signals, nothing changes: the caller handles them.
    """
    try:
        before = {number: signal.signal(number, answer) for number in numbers}
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


class Terminated(BaseException):
    """SIGTERM arrived."""


_came: list[int] = []
"""Signals that `unwind` has been called with since `unwinding` was entered."""


def unwind(number: int, frame: FrameType | None) -> None:
    """Unwind the stack, so that what must be closed is closed: for Ctrl-C and SIGTERM."""
    _came.append(number)
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Unwind the stack on Ctrl-C, unless this process ignores it (a background job of a shell), and
    on SIGTERM."""
    _came.clear()
    hears = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with answered(unwind, *([signal.SIGINT] if hears else []), signal.SIGTERM):
        yield


def came() -> int | None:
    """The first signal that has come within `unwinding`; None: none."""
    return _came[0] if _came else None


def raise_swallowed() -> None:
    """Raise again what a signal has raised and a library has caught, as many do around an optional
    import."""
    if _came and signal.getsignal(signal.SIGTERM) is unwind:
        raise KeyboardInterrupt if _came[0] == signal.SIGINT else Terminated


@contextlib.contextmanager
def leaving(line: Callable[[], str]) -> Iterator[None]:
    """Say `line` and end the process at once where a signal comes that would unwind the stack: no
    library can catch that. For blocks that have nothing to close."""

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{line()}\n".encode())
        os._exit(128 + number)

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is unwind]
    with answered(leave, *numbers):
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait for the end of the block (in the main thread)."""
    came: list[int] = []
    try:
        with answered(lambda number, frame: came.append(number), signal.SIGINT, signal.SIGTERM):
            yield
    finally:
        for number in came[:1]:
            signal.raise_signal(number)


def stop_ranks(but: Collection[BaseProcess] = ()) -> None:
    """Ends the processes that the run has started, `but` those of others; at exit they would be
    waited for."""
    ranks = [child for child in multiprocessing.active_children() if child not in but]
    deadline = time.monotonic() + PATIENCE
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
        rank.kill()
