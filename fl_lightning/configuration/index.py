"""Reads `index.json`, which lists the package's classes and the arguments of its methods, so that
neither they nor torch need be imported."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("index.json")


@cache
def read() -> dict[str, dict[str, Any]]:
    """Return all entries by kind and name; `describe.described` makes those of methods."""
    content: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def method(class_path: str) -> dict[str, Any] | None:
    """Return the entry of a method of this package by import path; None: it is the user's own."""
    return next(
        (entry for entry in read()["methods"].values() if entry["class"] == class_path), None
    )
