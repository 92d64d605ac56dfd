"""Files that are whole or not there: written aside, flushed to the disk, renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from fl_lightning.errors import RunFailed


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
        raise RunFailed(f"cannot write {path}: {reason or error}") from error


@contextlib.contextmanager
def whole(path: Path, durable: bool = True) -> Iterator[Path]:
    """Where to write what shall become `path`: a reader sees the old file or the new one, never a half.

    With `durable` the content and the rename have reached the disk when this ends (a crash of the machine spares it).
    """
    aside = path.with_name(f".{path.name}.part")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        if durable:
            _flush(aside)
        os.replace(aside, path)
        if durable:
            _flush(path.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
