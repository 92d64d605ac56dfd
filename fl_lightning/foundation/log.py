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
    """Return a number of bytes in words, in the unit that suits it, or `like`: `1.5 MiB`, `12.0
    KiB`, `0 B`."""
    suited = size if like is None else like
    for unit, scale in UNITS:
        least = scale if scale > 2**20 else 0.1 * scale
        if suited >= least:
            return f"{size / scale:,.1f} {unit}"
    return f"{size:,.0f} B"


def in_time(seconds: float) -> str:
    """Return seconds in words, in the greatest unit of which there are two: `90 s`, `2.5 h`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


class _PipeStream:
    """A stream that drops all text once its reader has gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text`."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._drop_rest()
            return len(text)

    def flush(self) -> None:
        """Hand on what has been written."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop_rest()

    def _drop_rest(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def ignore_closed_pipe() -> None:
    """Drop prints once nobody reads them (`| head`): an error would end a run in the middle."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # a stand-in for a stream has no file
        with contextlib.suppress(OSError, ValueError, AttributeError):
            is_new = not isinstance(stream, _PipeStream)
            if is_new and stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
                setattr(sys, name, _PipeStream(stream))


class Log:
    """A file that lines are added to; until `begin` is called they wait."""

    def __init__(self, file: Path, who: str) -> None:
        self.file, self.who = file, who
        self._waiting: list[str] | None = []

    def add(self, line: str) -> None:
        """Add a line."""
        text = f"{now()} {self.who}{redact(line)}\n"
        if self._waiting is None:
            self._write(text)
        else:
            self._waiting.append(text)

    def begin(self) -> None:
        """Write the lines that have waited."""
        if self._waiting is not None:
            self._write("".join(self._waiting))
            self._waiting = None

    def _write(self, text: str) -> None:
        """Write `text`; if the disk refuses, the run goes on: its tables end it."""
        with contextlib.suppress(OSError), self.file.open("a", encoding="utf-8") as file:
            file.write(text)


_log: ContextVar[Log | None] = ContextVar("log", default=None)
"""The log of the run that is going on: runs that train together have a context each."""


def escape_unprintable() -> None:
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
    log = _log.get()
    if log is not None:
        log.add(line)


def write_waiting() -> None:
    """Write the lines that have waited for the first round: the run has something to keep now."""
    log = _log.get()
    if log is not None:
        log.begin()


@contextlib.contextmanager
def logged_to(file: Path, who: str = "") -> Iterator[None]:
    """Log to `file` all notes within the block, with `who` before them, warnings of libraries, and
    how the block ends.

    A start that is refused (`BadInput`) before its first round leaves no file.
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
    """Notes messages and warnings of libraries while runs are going on, each once."""

    def __init__(self) -> None:
        self._runs = 0
        self._handler = _Handler(logging.WARNING)
        self._shown: Callable[..., None] = warnings.showwarning

    def begin(self) -> None:
        """Count one run more."""
        self._runs += 1
        if self._runs == 1:
            logging.getLogger().addHandler(self._handler)
        if warnings.showwarning != self._show:
            self._shown, warnings.showwarning = warnings.showwarning, self._show

    def end(self) -> None:
        """Count one run less."""
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
    """Notes messages of libraries; shows them where no other handler would, as Python does."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one message."""
        note(f"{record.levelname} of {record.name}: {record.getMessage()}")
        if logging.getLogger().handlers == [self] and logging.lastResort is not None:
            logging.lastResort.handle(record)


_listener = _Listener()
