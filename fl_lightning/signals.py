"""Signals that a block of code answers in its own way."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def answered(answer: Callable[[int, FrameType | None], Any], *numbers: int) -> Iterator[None]:
    """Have `answer` called when one of these signals comes within the block; afterwards all is as it was.

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
