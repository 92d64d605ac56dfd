"""The arguments of our methods, read off their source: checked and explained without importing torch.

A `sketch` of a method's class has its fields, with types, bounds and defaults, and its own check of their values
(`__post_init__`), but none of its hooks.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

from docstring_parser import parse
from jsonargparse import ArgumentParser

from fl_lightning.cli.parser import describe, typed
from fl_lightning.config import Component, check_finite
from fl_lightning.ranges import allowed
from fl_lightning.search import Choice, Space

LIGHT = ("abc", "dataclasses", "math", "typing", "fl_lightning.config", "fl_lightning.ranges", "fl_lightning.search")
"""Modules that a sketch imports, for the names in annotations, defaults and checks."""
READ = ("fl_lightning.methods.", "fl_lightning.knowledge.")
"""Beginnings of modules whose files are read for such names, but never imported."""
WIDTH = 110


def sketch(class_path: str) -> Any:
    """The class of one of our methods without its hooks; None for anybody else's."""
    module, _, name = class_path.rpartition(".")
    return _names(module).get(name) if module.startswith(READ[0]) else None


def check_arguments(method: Component) -> None:
    """Raise `BadInput` for an argument of one of our methods that there is not, or for a value that cannot work.

    What is anybody else's is checked when its class has been imported.
    """
    kind = sketch(method.class_path)
    if kind is None:
        return
    parser, hints = ArgumentParser(exit_on_error=False), get_type_hints(kind)
    for field in fields(kind):
        parser.add_argument(f"--{field.name}", type=hints[field.name], default=field.default)
    values = typed(parser, method.init_args, prefix="method.").as_dict()
    for name, value in values.items():
        check_finite(f"method.{name}", value)
    kind(**values)


def explained(name: str, kind: Any) -> str:
    """What a method does, and each of its arguments: key, type, bounds, default, where it is searched, meaning."""
    documented = parse(kind.__doc__ or "")
    said = [documented.short_description or "", documented.long_description or ""]
    lines = [f"{name}: {said[0]}", *textwrap.wrap(said[1], WIDTH, initial_indent="  ", subsequent_indent="  ")]
    for field in fields(kind):
        default = "required" if field.default is MISSING else f"default: {_text(field.default)}"
        space = field.metadata.get("search")
        looked = f"; fl-train tune looks {_where(space)}" if space is not None else ""
        lines += ["", f"  --method.{field.name}  {_values(kind, field.name)} ({default}{looked})"]
        lines += textwrap.wrap(_meaning(kind, field.name), WIDTH, initial_indent="      ", subsequent_indent="      ")
    if not fields(kind):
        lines += ["", "  It has no arguments."]
    return "\n".join(lines) + "\n"


def _values(kind: Any, name: str) -> str:
    """The type of a field in words, and its bounds: `a number, 0 or more`."""
    words = describe(get_type_hints(kind)[name])
    bounds, _ = allowed(kind).get(name, (None, False))
    said = str(bounds).removeprefix("it must be ").removeprefix("it must lie ") if bounds is not None else ""
    return words if not said or said.startswith("one of") else f"{words}, {said}"


def _meaning(kind: type, name: str) -> str:
    """What the docstring of the class, or of one that it descends from, says of a field."""
    for base in kind.__mro__:
        for parameter in parse(vars(base).get("__doc__") or "").params:
            if name in parameter.arg_name.split(", "):
                return " ".join((parameter.description or "").split())
    return ""


def _where(space: Space) -> str:
    if isinstance(space, Choice):
        return "at " + ", ".join(map(_text, space.values))
    return f"from {space.low:g} to {space.high:g}"


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@cache
def _names(module: str) -> dict[str, Any]:
    """What the fields of a file's classes speak of, by name, and sketches of these classes."""
    names: dict[str, Any] = {"__name__": f"{module} (sketch)"}
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom):
            names |= _imported(node)
        elif isinstance(node, ast.ClassDef):
            _run(_fields_of(node), names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            _run(node, names)
    return names


def _imported(node: ast.ImportFrom) -> dict[str, Any]:
    source = str(node.module)
    if source in LIGHT:
        known = vars(importlib.import_module(source))
    elif source.startswith(READ):
        known = _names(source)
    else:
        return {}
    return {alias.asname or alias.name: known[alias.name] for alias in node.names if alias.name in known}


def _fields_of(node: ast.ClassDef) -> ast.ClassDef:
    """The class with nothing but its docstring, fields and check."""

    def kept() -> Iterator[ast.stmt]:
        for item in node.body:
            field = isinstance(item, ast.AnnAssign) and not ast.unparse(item.annotation).startswith("ClassVar")
            check = isinstance(item, ast.FunctionDef) and item.name == "__post_init__"
            text = isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)
            if field or check or text:
                yield item

    return ast.ClassDef(**{**dict(ast.iter_fields(node)), "body": [*kept()] or [ast.Pass()]})


def _run(node: ast.stmt, names: dict[str, Any]) -> None:
    """Carry out one statement. One that speaks of what is not imported is left out: a type of torch's, a constant."""
    tree = ast.fix_missing_locations(ast.Module([node], []))
    with contextlib.suppress(NameError, AttributeError):
        exec(compile(tree, names["__name__"], "exec", dont_inherit=True), names)


def _tree(module: str) -> ast.Module:
    package, _, name = module.rpartition(".")
    spec = find_spec(package)  # of `fl_lightning.methods`: found, but not imported
    folders = spec.submodule_search_locations if spec else None
    return ast.parse(Path((folders or [""])[0], f"{name}.py").read_text(encoding="utf-8"))
