"""Makes `index.json`, the list of the package's methods, models, callbacks and loggers, from their
classes.

`python -m fl_lightning.configuration.describe` writes the index and, in a checkout, the generated
parts of two docs pages: the keys of a run (reference.md), who receives what (privacy.md). Tests
compare them with the classes.
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

from fl_lightning.configuration import receivers
from fl_lightning.configuration.explain import keys
from fl_lightning.configuration.index import FILE
from fl_lightning.configuration.ranges import Range, bounded_fields, limit, words
from fl_lightning.foundation.docstrings import first_paragraph

Description = dict[str, Any]
BEGIN, END = "<!-- generated -->", "<!-- end -->"
"""Lines around the generated part of a docs page."""


def described(method: Any) -> Description:
    """Return a method's entry of `index.json`: class path, summary, family and `arguments`."""
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


def arguments(cls: type) -> dict[str, Description]:
    """Return the type in words, bounds, default, search space and meaning of each field of a
    dataclass, by the field's name. If a field's type is a dataclass, the fields of that dataclass
    take its place, named `FIELD.INNER_FIELD`."""
    hints = get_type_hints(cls)
    bounded = bounded_fields(cls)
    entries: dict[str, Description] = {}
    for field in fields(cls):
        hint = hints[field.name]
        if is_dataclass(hint) and isinstance(hint, type):
            for name, inner_entry in arguments(hint).items():
                entries[f"{field.name}.{name}"] = inner_entry
            continue
        entry: Description = {"words": words(hint)}
        values, _ = limit(bounded.get(field.name))
        if isinstance(values, Range):
            bounds = asdict(values).items()  # JSON has no infinity
            entry["bounds"] = {name: value for name, value in bounds if value != math.inf}
        if field.default is not MISSING:
            entry["default"] = field.default
        if space := field.metadata.get("search"):
            entry["search"] = {"kind": type(space).__name__, **asdict(space)}
            entry["why"] = field.metadata["why"]
        entries[field.name] = entry | {"doc": _meaning(cls, field.name)}
    return entries


def index() -> dict[str, dict[str, Description]]:
    """Return the entries of `index.json` by kind and name."""
    relation = importlib.import_module("fl_lightning.callbacks.relations").Relation
    callback = importlib.import_module("fl_lightning.callbacks.base").Callback
    module = importlib.import_module("torch.nn").Module
    entries: dict[str, dict[str, Description]] = {
        "methods": {name: described(cls) for name, cls in methods().items()},
        "models": {name: _entry(cls) for name, cls in classes("models", module).items()},
        "callbacks": {},
        "loggers": {},
    }
    for name, cls in classes("callbacks", callback).items():
        kind = "loggers" if cls.__module__.endswith(".loggers") else "callbacks"
        if not issubclass(cls, relation):
            entries[kind][name] = _entry(cls)
    return entries


def methods() -> dict[str, type]:
    """Return the classes of the package's methods by name."""
    return classes("methods", importlib.import_module("fl_lightning.methods.base").Method)


def index_text() -> str:
    """Return `index` as the JSON text of `index.json`."""
    return json.dumps(index(), indent=1, ensure_ascii=False) + "\n"


def classes(package: str, base: type) -> dict[str, type]:
    """Return the public subclasses of `base` in a subpackage that have a docstring and are not
    abstract, by lower-case name, sorted."""
    by_name = {}
    folder = importlib.import_module(f"fl_lightning.{package}").__path__
    for info in pkgutil.iter_modules(folder):
        if info.name == "base":
            continue
        module = importlib.import_module(f"fl_lightning.{package}.{info.name}")
        for cls in vars(module).values():
            is_class = isinstance(cls, type) and cls.__module__ == module.__name__
            if not (is_class and issubclass(cls, base) and vars(cls).get("__doc__")):
                continue
            is_base = inspect.isabstract(cls) or "ABC" in [c.__name__ for c in cls.__bases__]
            if not is_base and not cls.__name__.startswith("_"):
                by_name[cls.__name__.lower()] = cls
    return dict(sorted(by_name.items()))


def _entry(cls: type) -> Description:
    return {
        "class": f"{cls.__module__}.{cls.__name__}",
        "doc": first_paragraph(inspect.getdoc(cls)),
    }


def _meaning(cls: type, name: str) -> str:
    """Return the description of an argument in the docstring of the class, of a base class, or of
    the field."""
    for base in cls.__mro__[:-1]:
        for parameter in parse_from_object(base).params:
            if name in parameter.arg_name.split(", "):
                return " ".join((parameter.description or "").split())
    return ""


def write() -> None:
    """Write `index.json` and, in a checkout, the generated parts of the docs."""
    FILE.write_text(index_text(), encoding="utf-8")
    docs = FILE.parents[2] / "docs"
    if not docs.is_dir():
        return
    parts = {"privacy.md": receivers.table(methods()), "reference.md": keys_of_a_run()}
    for name, part in parts.items():
        file = docs / name
        if file.is_file():
            page = file.read_text(encoding="utf-8")
            file.write_text(replaced(page, part), encoding="utf-8")


def keys_of_a_run() -> str:
    """Return a Markdown table of the keys of each group of a configuration; inherited keys come
    last."""
    groups = importlib.import_module("fl_lightning.configuration.config").GROUPS
    tables = []
    for name, group in groups.items():
        first: dict[str, Description] = {}
        inherited: dict[str, Description] = {}
        for key, entry in arguments(group).items():
            is_own = key.partition(".")[0] in group.__annotations__
            (first if is_own else inherited)[key] = entry
        tables.append(keys(name, first_paragraph(group.__doc__), first | inherited))
    return "\n".join(tables)


def replaced(text: str, part: str) -> str:
    """Return a page's `text` with `part` in place of the text between the lines `BEGIN` and
    `END`."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    write()
