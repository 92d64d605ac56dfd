"""The log of a run: its messages, each round, warnings of libraries and how it ended, with the
time."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from fl_lightning.foundation.errors import BadInput, redact

UNITS = (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def now() -> str:
    """The date and time here, to the second."""
    return datetime.now(UTC).astimezone().isoformat(timespec="seconds")


def in_bytes(size: float, like: float | None = None) -> str:
    """A number of bytes in words, in the unit that suits it, or `like`: `1.5 MiB`, `12.0 KiB`, `0
    B`."""
    suited = size if like is None else like
    unit, scale = next(
        (u for u in UNITS if suited >= u[1] * (1 if u[1] > 2**20 else 0.1)), ("B", 1)
    )
    return f"{size / scale:,.{int(scale > 1)}f} {unit}"


def in_time(seconds: float) -> str:
    """Seconds in words, in the greatest unit of which there are two: `90 s`, `2.5 h`."""
    units = (("d", 86400), ("h", 3600), ("min", 60))
    return next(
        (f"{seconds / size:.1f} {unit}" for unit, size in units if seconds >= 2 * size),
        f"{seconds:.0f} s",
    )


class _Outliving:
    """A stream whose reader may go: what is written then goes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text`."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._let_go()
            return len(text)

    def flush(self) -> None:
        """Hand on what has been written."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._let_go()

    def _let_go(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def outlive_readers() -> None:
    """Have prints go nowhere once nobody reads them (`| head`): an error would end a run in the
    middle."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # a stand-in for a stream has no file
        with contextlib.suppress(OSError, ValueError, AttributeError):
            is_new = not isinstance(stream, _Outliving)
            if is_new and stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
                setattr(sys, name, _Outliving(stream))


class Log:
    """A file that lines are added to, once the run has `begun`; until then they wait."""

    def __init__(self, file: Path, who: str) -> None:
        self.file, self.who = file, who
        self._waiting: list[str] | None = []

    def add(self, line: str) -> None:
        """Add a line. A disk that refuses does not end the run: its tables do."""
        text = f"{now()} {self.who}{redact(line)}\n"
        if self._waiting is not None:
            self._waiting.append(text)
            return
        with contextlib.suppress(OSError), self.file.open("a", encoding="utf-8") as file:
            file.write(text)

    def begin(self) -> None:
        """Write what has waited."""
        if self._waiting is not None:
            with contextlib.suppress(OSError), self.file.open("a", encoding="utf-8") as file:
                file.write("".join(self._waiting))
            self._waiting = None


_log: ContextVar[Log | None] = ContextVar("log", default=None)
"""Of the run that is going on: runs that train together each have a context of their own."""


def print_anything() -> None:
    """Have stdout and stderr write characters that their encoding lacks as `\\u0141`: names of
    clients and classes are any text, and no line that is printed may end a run."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's streams take any character
            stream.reconfigure(errors="backslashreplace")


def say(line: str) -> None:
    """Print a line on stderr, and keep it."""
    print(line, file=sys.stderr, flush=True)
    note(line)


def note(line: str) -> None:
    """Keep a line in the log of the run that is going on in this process, if one is."""
    if (log := _log.get()) is not None:
        log.add(line)


def begun() -> None:
    """The first round is done: from now on there is something to keep."""
    if (log := _log.get()) is not None:
        log.begin()


@contextlib.contextmanager
def kept(file: Path, who: str = "") -> Iterator[None]:
    """Keep in `file` what is noted within the block, with `who` before it, what libraries warn of,
    and how it ends.

    A start that is refused (`BadInput`) before its first round leaves nothing.
    """
    log = Log(file, who)
    before = _log.set(log)
    _listener.begin()
    try:
        yield
        log.add("ended")
    except BaseException as error:
        log.add(
            f"ended by {type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
        )
        if not isinstance(error, BadInput):
            log.begin()
        raise
    finally:
        _log.reset(before)
        _listener.end()


class _Listener:
    """Notes what libraries log and warn of, as long as a run is going on: once, however many runs
    are."""

    def __init__(self) -> None:
        self._runs = 0
        self._handler = _Handler(logging.WARNING)
        self._shown: Callable[..., None] = warnings.showwarning

    def begin(self) -> None:
        """One run more."""
        self._runs += 1
        if self._runs == 1:
            logging.getLogger().addHandler(self._handler)
        if warnings.showwarning != self._show:
            self._shown, warnings.showwarning = warnings.showwarning, self._show

    def end(self) -> None:
        """One run less."""
        self._runs -= 1
        if self._runs == 0:
            logging.getLogger().removeHandler(self._handler)
            if warnings.showwarning == self._show:
                warnings.showwarning = self._shown

    def _show(
        self, message: Warning | str, category: type[Warning], *where: Any, **more: Any
    ) -> None:
        note(f"{category.__name__}: {message}")
        self._shown(message, category, *where, **more)


class _Handler(logging.Handler):
    """Keeps what libraries log; where nobody else would, it is shown, too, as Python does without a
    handler."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one message."""
        note(f"{record.levelname} of {record.name}: {record.getMessage()}")
        if logging.getLogger().handlers == [self] and logging.lastResort is not None:
            logging.lastResort.handle(record)


_listener = _Listener()
