"""Our methods, models, callbacks and loggers as `index.json` has them: read off their classes.

`python -m fl_lightning.configuration.describe` writes the index and, in a checkout, the generated
parts of the docs anew: keys of a run, who sees what. Tests compare them with the classes.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import pkgutil
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, get_type_hints

from docstring_parser import parse, parse_from_object

from fl_lightning.configuration import viewers
from fl_lightning.configuration.explain import keys
from fl_lightning.configuration.index import FILE
from fl_lightning.configuration.ranges import Range, allowed, limit, words
from fl_lightning.foundation.docstrings import first_paragraph

Entry = dict[str, Any]
BEGIN, END = "<!-- generated -->", "<!-- end -->"
"""Around a part of a page that `write` makes anew."""


def described(method: Any) -> Entry:
    """A method's class: what it does, its family and its arguments.

    Of each argument: its type in words, bounds, default, where it is searched, meaning.
    """
    documented = parse(method.__doc__ or "")
    more = documented.long_description or ""
    if not documented.blank_after_short_description:  # the first paragraph goes on
        more = more.partition("\n\n")[2]
    return {
        **_entry(method),
        "more": more,
        "family": method.traits.family,
        "arguments": arguments(method),
    }


def arguments(kind: type) -> dict[str, Entry]:
    """Describes each field of a dataclass, as `described` has a method's; those of one within it by
    `NAME.FIELD`."""
    hints, known = get_type_hints(kind), allowed(kind)
    entries: dict[str, Entry] = {}
    for field in fields(kind):
        if is_dataclass(inner := hints[field.name]) and isinstance(inner, type):
            entries |= {f"{field.name}.{name}": one for name, one in arguments(inner).items()}
            continue
        values, _ = limit(known.get(field.name))
        one: Entry = {"words": words(hints[field.name])}
        if isinstance(values, Range):
            one["bounds"] = _bounds(values)
        if field.default is not MISSING:
            one["default"] = field.default
        if space := field.metadata.get("search"):
            one |= {
                "search": {"kind": type(space).__name__, **asdict(space)},
                "why": field.metadata["why"],
            }
        entries[field.name] = one | {"doc": _meaning(kind, field.name)}
    return entries


def index() -> dict[str, dict[str, Entry]]:
    """What `index.json` holds, by kind and name."""
    relation = importlib.import_module("fl_lightning.callbacks.relations").Relation
    callback = importlib.import_module("fl_lightning.callbacks.base").Callback
    module = importlib.import_module("torch.nn").Module
    callbacks = {
        name: cls
        for name, cls in classes("callbacks", callback).items()
        if not issubclass(cls, relation)
    }
    logging = {name for name, cls in callbacks.items() if cls.__module__.endswith(".loggers")}
    return {
        "methods": {name: described(cls) for name, cls in methods().items()},
        "models": {name: _entry(cls) for name, cls in classes("models", module).items()},
        "callbacks": {name: _entry(cls) for name, cls in callbacks.items() if name not in logging},
        "loggers": {name: _entry(cls) for name, cls in callbacks.items() if name in logging},
    }


def methods() -> dict[str, type]:
    """The classes of our methods, by name."""
    return classes("methods", importlib.import_module("fl_lightning.methods.base").Method)


def text() -> str:
    """The content of `index.json`."""
    return json.dumps(index(), indent=1, ensure_ascii=False) + "\n"


def classes(package: str, base: type) -> dict[str, type]:
    """Collects the documented public subclasses of `base` in a subpackage, sorted by name; bases of
    others are left out."""
    named = {}
    for info in pkgutil.iter_modules(importlib.import_module(f"fl_lightning.{package}").__path__):
        name = f"fl_lightning.{package}.{info.name}"
        for cls in vars(importlib.import_module(name)).values() if info.name != "base" else ():
            if not (isinstance(cls, type) and cls.__module__ == name and issubclass(cls, base)):
                continue
            is_base = inspect.isabstract(cls) or any(
                above.__name__ == "ABC" for above in cls.__bases__
            )
            if vars(cls).get("__doc__") and not cls.__name__.startswith("_") and not is_base:
                named[cls.__name__.lower()] = cls
    return dict(sorted(named.items()))


def _entry(cls: type) -> Entry:
    return {
        "class": f"{cls.__module__}.{cls.__name__}",
        "doc": first_paragraph(inspect.getdoc(cls)),
    }


def _bounds(values: Range) -> Entry:
    """What `Range` is made with; JSON has no infinity."""
    high = {"high": values.high} if values.high < math.inf else {}
    return {"low": values.low, **high, "above": values.above, "below": values.below}


def _meaning(kind: type, name: str) -> str:
    """What the docstring of the class, of one that it descends from, or of the field itself, says
    of an argument."""
    for base in kind.__mro__[:-1]:
        for parameter in parse_from_object(base).params:
            if name in parameter.arg_name.split(", "):
                return " ".join((parameter.description or "").split())
    return ""


def write() -> None:
    """Write the index, and the generated parts of the docs where there are docs."""
    FILE.write_text(text(), encoding="utf-8")
    if (docs := FILE.parents[2] / "docs").is_dir():
        for name, made in (
            ("privacy.md", viewers.table(methods())),
            ("reference.md", keys_of_a_run()),
        ):
            if (file := docs / name).is_file():
                file.write_text(replaced(file.read_text(encoding="utf-8"), made), encoding="utf-8")


def keys_of_a_run() -> str:
    """A table of the keys of each group of a configuration, in Markdown; inherited ones come
    last."""
    tables = []
    for name, group in importlib.import_module("fl_lightning.configuration.config").GROUPS.items():
        own = group.__annotations__
        known = sorted(
            arguments(group).items(), key=lambda item: item[0].partition(".")[0] not in own
        )
        tables.append(keys(name, first_paragraph(group.__doc__), dict(known)))
    return "\n".join(tables)


def replaced(text: str, made: str) -> str:
    """A page's `text` with the part between its marks made anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    write()
