"""`index.json`: our classes and the arguments of our methods, read without importing them, and so
without torch."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("index.json")


@cache
def read() -> dict[str, dict[str, Any]]:
    """Entries by kind and name (`describe.described` says what a method's has)."""
    content: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def method(class_path: str) -> dict[str, Any] | None:
    """The entry of one of our methods by its import path; None: it is somebody else's."""
    return next(
        (entry for entry in read()["methods"].values() if entry["class"] == class_path), None
    )
