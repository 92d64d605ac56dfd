"""Gives names one spelling, and lists a folder without hidden and system files."""

import unicodedata
from collections.abc import Iterable
from pathlib import Path

SYSTEM = {
    "__MACOSX",
    "__pycache__",
    "@eaDir",
    "lost+found",
    "$RECYCLE.BIN",
    "System Volume Information",
}
"""Folders that operating systems and archivers put next to data; hidden ones begin with a dot."""
SYSTEM_FILES = {"thumbs.db", "ehthumbs.db", "desktop.ini"}
"""Files that Windows puts next to pictures, in lower case."""
SHOWN = 5
"""Maximum number of names in a line."""


def composed(name: str) -> str:
    """Return `name` in composed Unicode (NFC). In file names macOS writes ü as u and a combining
    mark, other systems as one character."""
    return unicodedata.normalize("NFC", name)


def is_hidden(path: Path) -> bool:
    """Return whether a file or folder is hidden or an operating system's: thumbnails, `._scan.png`,
    `.ipynb_checkpoints`."""
    return path.name.startswith(".") or path.name in SYSTEM or path.name.lower() in SYSTEM_FILES


def entries(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the paths in `folder` that match `pattern` and are not hidden, sorted."""
    return sorted(path for path in folder.glob(pattern) if not is_hidden(path))


def some(names: Iterable[str]) -> str:
    """Return the first few `names` and how many more there are: `a, b, c, d, e and 3 more`."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
