"""Our methods, models, callbacks and loggers as `index.json` has them: read off their classes.

`python -m fl_lightning.configuration.describe` writes the index and, in a checkout, the page of arguments anew; a test
compares both with the classes.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import pkgutil
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from docstring_parser import parse

from fl_lightning.configuration import viewers
from fl_lightning.configuration.explain import page
from fl_lightning.configuration.index import FILE, TYPES
from fl_lightning.ranges import Range, allowed, limit

Entry = dict[str, Any]


def described(method: type) -> Entry:
    """A method's class: what it does, its family, its arguments and the rules between them.

    Of each argument: its type in words and, where it is a simple one, by name; bounds, default, where it is searched,
    meaning.
    """
    documented, known = parse(method.__doc__ or ""), allowed(method)
    hints, arguments = get_type_hints(method), {}
    for field in fields(method):
        values, _ = limit(known.get(field.name))
        one: Entry = {"words": words(hints[field.name]), **_type(hints[field.name])}
        if isinstance(values, Range):
            one["bounds"] = _bounds(values)
        if field.default is not MISSING:
            one["default"] = field.default
        if space := field.metadata.get("search"):
            one |= {"search": {"kind": type(space).__name__, **asdict(space)}, "why": field.metadata["why"]}
        arguments[field.name] = one | {"doc": _meaning(method, field.name)}
    return {
        **_entry(method),
        "more": documented.long_description or "",
        "family": getattr(method, "family", ""),
        "arguments": arguments,
        "needs": [asdict(need) for need in getattr(method, "needs", ())],
    }


def words(kind: Any) -> str:
    """A type in words."""
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null"}
    if kind in plain:
        return plain[kind]
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(words(part) for part in get_args(kind))
    origin = get_origin(kind) or kind
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return f"a list: [{', '.join(words(part) for part in get_args(kind) if part is not ...)}, ...]"
    return str(kind).replace("typing.", "")


def index() -> dict[str, dict[str, Entry]]:
    """What `index.json` holds, by kind and name."""
    method = importlib.import_module("fl_lightning.methods.base").Method
    callback = importlib.import_module("fl_lightning.callbacks.base").Callback
    relation = importlib.import_module("fl_lightning.callbacks.relations").Relation
    module = importlib.import_module("torch.nn").Module
    hung = {cls.__name__.lower(): cls for cls in _classes("callbacks", callback) if not issubclass(cls, relation)}
    logging = {name for name, cls in hung.items() if cls.__module__.endswith(".loggers")}
    entries = {
        "methods": {cls.__name__.lower(): described(cls) for cls in _classes("methods", method)},
        "models": {cls.__name__.lower(): _entry(cls) for cls in _classes("models", module)},
        "callbacks": {name: _entry(cls) for name, cls in hung.items() if name not in logging},
        "loggers": {name: _entry(cls) for name, cls in hung.items() if name in logging},
    }
    return {kind: dict(sorted(named.items())) for kind, named in entries.items()}


def methods() -> dict[str, type]:
    """The classes of our methods, by name."""
    base = importlib.import_module("fl_lightning.methods.base").Method
    return {cls.__name__.lower(): cls for cls in sorted(_classes("methods", base), key=lambda c: c.__name__.lower())}


def text() -> str:
    """The content of `index.json`."""
    return json.dumps(index(), indent=1, ensure_ascii=False) + "\n"


def _classes(package: str, base: type) -> Iterator[type]:
    """The public classes with a docstring of a subpackage that descend from `base`, but for the bases of others."""
    for info in pkgutil.iter_modules(importlib.import_module(f"fl_lightning.{package}").__path__):
        name = f"fl_lightning.{package}.{info.name}"
        for cls in vars(importlib.import_module(name)).values() if info.name != "base" else ():
            ours = isinstance(cls, type) and cls.__module__ == name and issubclass(cls, base)
            if ours and vars(cls).get("__doc__") and not cls.__name__.startswith("_") and not _is_base(cls):
                yield cls


def _is_base(cls: type) -> bool:
    return any(base.__name__ == "ABC" for base in cls.__bases__) or inspect.isabstract(cls)


def _entry(cls: type) -> Entry:
    return {"class": f"{cls.__module__}.{cls.__name__}", "doc": (inspect.getdoc(cls) or "").partition("\n")[0]}


def _type(kind: Any) -> Entry:
    """The name of a simple type, or its choices, and whether it may be null; nothing for any other type."""
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    (own, *others) = [part for part in parts if part is not types.NoneType]
    null = {"null": True} if types.NoneType in parts else {}
    if others:
        return {}
    if get_origin(own) is Literal:
        return {"choices": list(get_args(own)), **null}
    return next(({"type": name, **null} for name, known in TYPES.items() if known is own), {})


def _bounds(values: Range) -> Entry:
    """What `Range` is made with; JSON has no infinity."""
    high = {"high": values.high} if values.high < math.inf else {}
    return {"low": values.low, **high, "above": values.above, "below": values.below}


def _meaning(method: type, name: str) -> str:
    """What the docstring of the class, or of one that it descends from, says of an argument."""
    for base in method.__mro__:
        for parameter in parse(vars(base).get("__doc__") or "").params:
            if name in parameter.arg_name.split(", "):
                return " ".join((parameter.description or "").split())
    return ""


def write() -> None:
    """Write the index, and the page of arguments where there are docs."""
    FILE.write_text(text(), encoding="utf-8")
    if (docs := FILE.parents[2] / "docs").is_dir():
        (docs / "method-arguments.md").write_text(page(index()["methods"]), encoding="utf-8")
        if (privacy := docs / "privacy.md").is_file():
            privacy.write_text(viewers.replaced(privacy.read_text(encoding="utf-8"), methods()), encoding="utf-8")


if __name__ == "__main__":
    write()
