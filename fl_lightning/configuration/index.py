"""`index.json`: our classes and the arguments of our methods, read without importing them, and so without torch."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from fl_lightning import renames
from fl_lightning.ranges import Range

FILE = Path(__file__).with_name("index.json")
TYPES: dict[str, Any] = {"number": float, "integer": int, "boolean": bool, "text": str}


@cache
def read() -> dict[str, dict[str, Any]]:
    """Entries by kind and name (`describe.described` says what a method's has)."""
    content: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def method(class_path: str) -> dict[str, Any] | None:
    """The entry of one of our methods by its import path; None: it is somebody else's."""
    return next((entry for entry in read()["methods"].values() if entry["class"] == class_path), None)


def arguments(class_path: str, given: dict[str, Any], key: str | None = None) -> dict[str, Any]:
    """The arguments `given` to a method, where it is one of ours by today's names; `key`: as in `renames.arguments`."""
    entry = method(class_path)
    return renames.arguments(given, entry["arguments"], key) if entry else given


def current(config: dict[str, Any]) -> dict[str, Any]:
    """The content of a `config.yaml`, of this version or the one before, by today's names."""
    given = config.get("method")
    if not isinstance(given, dict) or not isinstance(given.get("init_args"), dict):
        return config
    entry = read()["methods"].get(str(given.get("name")), {"class": str(given.get("class_path"))})
    return config | {"method": given | {"init_args": arguments(entry["class"], given["init_args"])}}


def type_of(argument: dict[str, Any]) -> Any:
    """The type of an argument of one of our methods, with its bounds."""
    kind = Literal[tuple(argument["choices"])] if "choices" in argument else TYPES[argument["type"]]
    kind = Annotated[kind, Range(**argument["bounds"])] if "bounds" in argument else kind
    return kind | None if argument.get("null") else kind
