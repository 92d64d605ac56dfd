"""Writes files that a crash cannot leave half written (written next to their place, flushed to the
disk, renamed), and locks folders."""

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
"""Files flushed in parallel: 100 small ones then take a tenth of the time."""
# seconds that the children of a dead process may take to end: torch's timeout for them
_ENDING = 30.0


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the disk within the block into a `MachineFailed` that names `path`.

    Raises:
        MachineFailed: no space, no permission, a name that is too long.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise MachineFailed(f"cannot write {path}: {reason or error}") from error


@contextlib.contextmanager
def atomic_write(path: Path, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path, which is renamed to `path` after the block: readers see the old file
    or the whole new one.

    With `durable`, wait until content and rename are on the disk, where a crash of the machine
    cannot lose them.
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
            # on a full disk the rest of the file would take up space
            with contextlib.suppress(OSError):
                aside.unlink()
            raise
        if durable:
            flush(path.parent)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[None]:
    """Remove the folder `path` and its content if the block raises an error, so that the name is
    free again. The block makes the folder and writes its files."""
    try:
        yield
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def aside_of(path: Path) -> Path:
    """Return the temporary path, in the same folder, at which `atomic_write` has a file written
    before it renames it to `path`."""
    return path.with_name(f".{path.name}.part")


def make_folder(path: Path) -> None:
    """Make a folder and its parents; wait until their names are on the disk."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_all(paths: Iterable[Path]) -> None:
    """Call `flush` for all paths, several at a time; raise `MachineFailed` if the disk fails."""

    def one(path: Path) -> None:
        with writing(path):
            flush(path)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, paths))


class Taken(Exception):
    """Another process holds the lock; the text names it."""


def take_lock(path: Path) -> IO[str]:
    """Take the lock `path` for this process, until the returned file is closed or the process ends.

    Processes that this one starts hold the lock, too, by `share_lock`: it is free when the last of
    them has ended. If the holder was a process of this machine that has died, wait some seconds for
    its children to end.

    Raises:
        Taken: another process holds the lock.
        OSError: the file cannot be opened, or the file system has no locks.
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
    # shared, so that processes which this one starts can hold it, too (`share_lock`)
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def share_lock(path: Path) -> IO[str]:
    """Hold the lock `path`, which the parent process has taken, in this process, too."""
    file = path.open(encoding="utf-8")
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def _dead(holder: str) -> bool:
    """Return whether the holder of a lock was a process of this machine that has ended.

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
    """Write `content` (text in UTF-8) to `path` by `atomic_write`: after a crash the file has its
    old content or the whole new one."""
    with atomic_write(path, durable) as aside:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)
