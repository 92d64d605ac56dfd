"""Names as people and machines write them: one spelling for each, and the files of a folder that
are data."""

import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

SYSTEM = {
    "__MACOSX",
    "__pycache__",
    "@eaDir",
    "lost+found",
    "$RECYCLE.BIN",
    "System Volume Information",
}
"""Folders that systems and archivers put beside data; hidden ones begin with a point."""
SYSTEM_FILES = {"thumbs.db", "ehthumbs.db", "desktop.ini"}
"""Files that Windows puts beside pictures, in small letters."""
SHOWN = 5
"""Names in a line, at most."""


def composed(name: str) -> str:
    """Return `name` in composed Unicode (NFC): macOS writes ü in file names as u and a mark, others
    as one character."""
    return unicodedata.normalize("NFC", name)


def composed_keys(values: dict[str, T]) -> dict[str, T]:
    """Return `values` by composed names."""
    return {composed(name): value for name, value in values.items()}


def is_hidden(path: Path) -> bool:
    """Whether a file or folder is a system's, or hidden: a notebook's checkpoints, thumbnails,
    `._scan.png`."""
    return path.name.startswith(".") or path.name in SYSTEM or path.name.lower() in SYSTEM_FILES


def entries(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the paths in `folder` that match `pattern` and are not hidden, sorted."""
    return sorted(path for path in folder.glob(pattern) if not is_hidden(path))


def some(names: Iterable[str]) -> str:
    """Return the first few of `names`, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
