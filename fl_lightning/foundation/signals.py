"""Handles Ctrl-C and SIGTERM for blocks of code.

Usually they raise an exception that unwinds the stack (`unwinding`). Before a run or study has
begun they end the process at once (`exit_at_signal`). While a checkpoint is written they wait until
it is complete (`undisturbed`).
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
"""Seconds until interrupted ranks are killed."""


@contextlib.contextmanager
def answered(answer: Callable[[int, FrameType | None], Any], *numbers: int) -> Iterator[None]:
    """Install a signal handler within the block, and restore the former handlers after it.

    Outside of the main thread, where Python cannot set handlers, the block runs without it.

    Args:
        answer: the handler, called with the signal's number and the current stack frame.
        numbers: the signals that it handles.
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
"""Signals that have arrived since `unwinding` was entered."""


def unwind(number: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt` for Ctrl-C and `Terminated` for SIGTERM. A signal handler."""
    _came.append(number)
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Have Ctrl-C and SIGTERM raise an exception (`unwind`) within the block. A process that
    ignores Ctrl-C, such as a shell's background job, goes on ignoring it."""
    _came.clear()
    hears = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with answered(unwind, *([signal.SIGINT] if hears else []), signal.SIGTERM):
        yield


def received_signal() -> int | None:
    """Return the first signal that has arrived within `unwinding`; None: none."""
    return _came[0] if _came else None


def raise_swallowed() -> None:
    """Raise a signal's exception again if a library has caught and dropped it, as many do around an
    optional import."""
    if _came and signal.getsignal(signal.SIGTERM) is unwind:
        raise KeyboardInterrupt if _came[0] == signal.SIGINT else Terminated


@contextlib.contextmanager
def exit_at_signal(line: Callable[[], str]) -> Iterator[None]:
    """End the process at once when a signal arrives within the block, after printing `line()` on
    stderr. For blocks that have nothing to close: an exception could be caught by a library.

    Only Ctrl-C and SIGTERM that `unwinding` handles are concerned.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{line()}\n".encode())
        os._exit(128 + number)

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is unwind]
    with answered(leave, *numbers):
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of the block (in the main thread)."""
    arrived: list[int] = []
    try:
        with answered(lambda number, _: arrived.append(number), signal.SIGINT, signal.SIGTERM):
            yield
    finally:
        if arrived:
            signal.raise_signal(arrived[0])


def stop_ranks(but: Collection[BaseProcess] = ()) -> None:
    """End the child processes that the run has started; Python would wait for them at exit. `but`:
    children that are not the run's."""
    ranks = [child for child in multiprocessing.active_children() if child not in but]
    deadline = time.monotonic() + PATIENCE
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
        rank.kill()
