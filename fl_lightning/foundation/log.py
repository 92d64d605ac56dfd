"""Writes a run's log: its messages, rounds, warnings of libraries and its end, each with the
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
    """Return the local date and time, to the second."""
    return datetime.now(UTC).astimezone().isoformat(timespec="seconds")


def in_bytes(size: float, like: float | None = None) -> str:
    """Return a number of bytes in words: `1.5 MiB`, `12.0 KiB`, `0 B`.

    Args:
        size: number of bytes.
        like: another number of bytes, whose unit is used, so that both can be compared; None: the
            unit that suits `size`.
    """
    suited = size if like is None else like
    for unit, scale in UNITS:
        least = scale if scale > 2**20 else 0.1 * scale
        if suited >= least:
            return f"{size / scale:,.1f} {unit}"
    return f"{size:,.0f} B"


def in_time(seconds: float) -> str:
    """Return seconds in words: `90 s`, `2.5 h`. The unit is the largest that gives at least 2."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


class _PipeStream:
    """A stream to a pipe that drops all text once the reader has closed it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text`; return its length."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._drop_rest()
            return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop_rest()

    def _drop_rest(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def ignore_closed_pipe() -> None:
    """Have stdout and stderr drop text if they are pipes that the reader has closed (`| head`), so
    that no error ends the run."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # an object in place of a stream has no file
        with contextlib.suppress(OSError, ValueError, AttributeError):
            is_new = not isinstance(stream, _PipeStream)
            if is_new and stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
                setattr(sys, name, _PipeStream(stream))


class Log:
    """A log file. Lines are kept in memory until `begin` is called. `who`: prefix of each line."""

    def __init__(self, file: Path, who: str) -> None:
        self.file, self.who = file, who
        self._waiting: list[str] | None = []

    def add(self, line: str) -> None:
        """Add a line with the time."""
        text = f"{now()} {self.who}{redact(line)}\n"
        if self._waiting is None:
            self._write(text)
        else:
            self._waiting.append(text)

    def begin(self) -> None:
        """Write the lines in memory to the file; later ones are written at once."""
        if self._waiting is not None:
            self._write("".join(self._waiting))
            self._waiting = None

    def _write(self, text: str) -> None:
        """Write `text`. Errors of the disk are ignored: the run's tables will raise them."""
        with contextlib.suppress(OSError), self.file.open("a", encoding="utf-8") as file:
            file.write(text)


_log: ContextVar[Log | None] = ContextVar("log", default=None)
"""The log of the current run; runs that train together in one process have a context each."""


def escape_unprintable() -> None:
    """Have stdout and stderr write characters that their encoding lacks as `\\u0141`, so that
    printing a client's or class's name never raises an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's streams write any character
            stream.reconfigure(errors="backslashreplace")


def say(line: str) -> None:
    """Print a line on stderr, and add it to the log."""
    print(line, file=sys.stderr, flush=True)
    note(line)


def note(line: str) -> None:
    """Add a line to the log of the current run; without a run do nothing."""
    log = _log.get()
    if log is not None:
        log.add(line)


def write_waiting() -> None:
    """Write the lines of the current run's log that are still in memory to its file; later lines
    are written at once. Called after the first round, so that a start that is refused leaves no
    log file."""
    log = _log.get()
    if log is not None:
        log.begin()


@contextlib.contextmanager
def logged_to(file: Path, who: str = "") -> Iterator[None]:
    """Log to `file` the messages and the libraries' warnings within the block, and how it ends.
    `who`: prefix of each line.

    If `BadInput` ends the block before `write_waiting` is called, no file is written.
    """
    log = Log(file, who)
    token = _log.set(log)
    _listener.begin()
    try:
        yield
        log.add("ended")
    except BaseException as error:
        reason = " ".join(str(error).split())
        log.add(f"ended by {type(error).__name__}: {reason}".removesuffix(": "))
        if not isinstance(error, BadInput):
            log.begin()
        raise
    finally:
        _log.reset(token)
        _listener.end()


class _Listener:
    """Adds libraries' messages and warnings to the log, each once, while at least one run is going
    on."""

    def __init__(self) -> None:
        self._runs = 0
        self._handler = _Handler(logging.WARNING)
        self._shown: Callable[..., None] = warnings.showwarning

    def begin(self) -> None:
        """Count a run that begins."""
        self._runs += 1
        if self._runs == 1:
            logging.getLogger().addHandler(self._handler)
        if warnings.showwarning != self._show:
            self._shown, warnings.showwarning = warnings.showwarning, self._show

    def end(self) -> None:
        """Count a run that ends."""
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
    """Adds libraries' messages to the log; prints them if no other handler does, as Python
    would."""

    def emit(self, record: logging.LogRecord) -> None:
        """Add a message to the log."""
        note(f"{record.levelname} of {record.name}: {record.getMessage()}")
        if logging.getLogger().handlers == [self] and logging.lastResort is not None:
            logging.lastResort.handle(record)


_listener = _Listener()
