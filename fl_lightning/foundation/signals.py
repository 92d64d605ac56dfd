"""Signals that a block of code answers in its own way.

On Ctrl-C and SIGTERM a process unwinds its stack (`unwinding`), with two exceptions. Before a run
or study has begun it ends at once (`leaving`). While it writes a checkpoint it finishes that first
(`undisturbed`).
"""

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
    """Call `answer` when one of these signals comes within the block; then restore the handlers.

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


def received_signal() -> int | None:
    """The first signal that has come within `unwinding`; None: none."""
    return _came[0] if _came else None


def raise_swallowed() -> None:
    """Raise the error of a signal again if a library has caught it, as many do around an optional
    import."""
    if _came and signal.getsignal(signal.SIGTERM) is unwind:
        raise KeyboardInterrupt if _came[0] == signal.SIGINT else Terminated


@contextlib.contextmanager
def exit_at_signal(line: Callable[[], str]) -> Iterator[None]:
    """End the process at once, with `line`, at a signal that would unwind the stack: no library can
    catch that. For blocks that have nothing to close."""

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{line()}\n".encode())
        os._exit(128 + number)

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is unwind]
    with answered(leave, *numbers):
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait for the end of the block (in the main thread)."""
    arrived: list[int] = []
    try:
        with answered(lambda number, _: arrived.append(number), signal.SIGINT, signal.SIGTERM):
            yield
    finally:
        if arrived:
            signal.raise_signal(arrived[0])


def stop_ranks(but: Collection[BaseProcess] = ()) -> None:
    """End the processes that the run has started, `but` those of others: at exit Python would wait
    for them."""
    ranks = [child for child in multiprocessing.active_children() if child not in but]
    deadline = time.monotonic() + PATIENCE
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
        rank.kill()
