"""Files that are whole or not there: written aside, flushed to the disk, renamed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from fl_lightning.foundation.errors import MachineFailed

AT_ONCE = 8
"""Files flushed at a time: a disk takes 100 small ones in a tenth of the time that one by one
needs."""
# seconds that the processes of a dead one may take to end: torch's own patience with them
_ENDING = 30.0


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the disk's refusal into one line that names the file.

    Raises:
        RunFailed: no space, no permission, a name that is too long.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise MachineFailed(f"cannot write {path}: {reason or error}") from error


@contextlib.contextmanager
def atomic_write(path: Path, durable: bool = True) -> Iterator[Path]:
    """Yield a path aside, renamed to `path` after the block: a reader sees the old file or the new
    one, never a half.

    With `durable` content and rename have reached the disk when this ends: a crash of the machine
    spares them.
    """
    aside = aside_of(path)
    with writing(path):
        make_folder(path.parent)
        try:
            yield aside
            if durable:
                flush(aside)
            os.replace(aside, path)
        except BaseException:
            # on a full disk a part would take the room that is left
            with contextlib.suppress(OSError):
                aside.unlink()
            raise
        if durable:
            flush(path.parent)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[None]:
    """Remove the new folder `path` where the block that fills it fails: its name is free again."""
    try:
        yield
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def aside_of(path: Path) -> Path:
    """Return the path that is renamed to `path` once it is written."""
    return path.with_name(f".{path.name}.part")


def make_folder(path: Path) -> None:
    """Make a folder and its parents; their names have reached the disk when this ends."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        flush(path.parent)


def flush(path: Path) -> None:
    """Wait until the disk has a file's content, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_all(paths: Iterable[Path]) -> None:
    """Wait until the disk has all of these, some at a time; `RunFailed` if it refuses one."""

    def one(path: Path) -> None:
        with writing(path):
            flush(path)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, paths))


class Taken(Exception):
    """Another process holds the lock; the text says which."""


def take_lock(path: Path) -> IO[str]:
    """Take the lock `path` for this process, until the returned file is closed or the process is
    gone, however it goes.

    Processes that this one starts `share_lock`: nobody can take the lock before the last of them is
    gone. If its holder on this machine has died and they are still ending, wait for them.

    Raises:
        Taken: another process holds it.
        OSError: the file cannot be opened, or the file system knows no locks.
    """
    file = path.open("a+", encoding="utf-8")
    deadline = time.monotonic() + _ENDING
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
            if not _dead(holder) or time.monotonic() > deadline:
                file.close()
                raise Taken(holder) from None
            time.sleep(0.1)
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    # From here on it is shared with processes that this one starts (`share_lock`): nobody can take
    # it alone until all of them are gone.
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def share_lock(path: Path) -> IO[str]:
    """Hold the lock `path` together with the process that has taken it and started this one."""
    file = path.open(encoding="utf-8")
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def _dead(holder: str) -> bool:
    """Whether the process that wrote `holder` ran on this machine and is gone.

    `holder`: the line that `take_lock` writes, `process PID on HOST`.
    """
    words = holder.split()
    if len(words) != 4 or words[3] != socket.gethostname():
        return False
    try:
        os.kill(int(words[1]), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        return False
    return False


def write_whole(path: Path, content: bytes | str, durable: bool = True) -> None:
    """Have `path` hold `content` (of text, in UTF-8), or what it held before: never a part of
    it."""
    with atomic_write(path, durable) as aside:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)
