"""Describes methods and keys, by their entries in `index.json`: as text for the terminal and as
Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from fl_lightning.configuration.ranges import Range

WIDTH = 110
HEAD = """# Arguments of methods

Generated from the methods' classes when the site is built. `fl-train list methods NAME` and
`fl-train fit --method NAME --help` print the same. A note such as `0.5: paper` names the source of
a default. The column `tune` says where `fl-train tune` searches and why (the learning rate is
searched for every method; what changes how much a client trains, such as epochs, never is).
"""


def explained(name: str, entry: dict[str, Any]) -> str:
    """Return the help on a method: its summary and, for each argument, key, type, bounds, default,
    search space and meaning.

    `entry`: the method's entry in `index.json`, or `describe.described` of its class.
    """
    lines = [f"{name}: {entry['doc']}"]
    lines += textwrap.wrap(entry["more"], WIDTH, initial_indent="  ", subsequent_indent="  ")
    for key, argument in entry["arguments"].items():
        default = "required"
        if "default" in argument:
            default = f"default: {as_text(argument['default'])}"
        searched = ""
        if "search" in argument:
            searched = f"; fl-train tune searches {_where(argument['search'])}"
        lines += ["", f"  --method.{key}  {_values(argument)} ({default}{searched})"]
        indent = 6 * " "
        lines += textwrap.wrap(
            argument["doc"], WIDTH, initial_indent=indent, subsequent_indent=indent
        )
    if not entry["arguments"]:
        lines += ["", "  It has no arguments."]
    return "\n".join(lines) + "\n"


def page(methods: dict[str, dict[str, Any]]) -> str:
    """Return the Markdown page of all methods, with a table of each one's arguments. `methods`:
    their entries in `index.json`."""
    return HEAD + "".join(_section(name, entry) for name, entry in methods.items())


def keys(
    group: str,
    title: str,
    arguments: dict[str, Any],
) -> str:
    """Return a Markdown table of the keys of one group of a configuration.

    Args:
        group: name of the group, such as `data`.
        title: the sentence above the table.
        arguments: the keys, as `describe.arguments` returns them.
    """
    rows = []
    for key, argument in arguments.items():
        cells = (
            f"`{group}.{key}`",
            f"`{as_text(argument.get('default'))}`",
            _values(argument),
            argument["doc"],
        )
        rows.append([*map(_markdown, cells)])
    return f"**{group}.** {title}\n\n{table(('key', 'default', 'values', 'meaning'), rows)}\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _section(name: str, entry: dict[str, Any]) -> str:
    rows = []
    for key, argument in entry["arguments"].items():
        search = ""
        if "search" in argument:
            search = f"{_where(argument['search'])}: {_markdown(argument['why'])}"
        default = f"`{as_text(argument['default'])}`"
        doc = _markdown(argument["doc"])
        rows.append([f"`method.{key}`", _values(argument), default, search, doc])
    arguments = "It has no arguments."
    if rows:
        arguments = table(("key", "values", "default", "tune", "meaning"), rows)
    return f"\n## {name}\n\n{_markdown(entry['doc'])}\n\n{arguments}\n"


def _markdown(text: str) -> str:
    """Escape Markdown's special characters outside of code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_<\[\\])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")


def _values(argument: dict[str, Any]) -> str:
    """Return an argument's type and bounds in words: `a number, 0 or more`."""
    if "bounds" not in argument:
        return str(argument["words"])
    return f"{argument['words']}, {bounded(Range(**argument['bounds']))}"


def bounded(values: Range) -> str:
    """Return bounds in words: `0 or more`."""
    return str(values).removeprefix("it must be ").removeprefix("it must lie ")


def _where(space: dict[str, Any]) -> str:
    if "values" in space:
        return ", ".join(map(as_text, space["values"]))
    return f"{space['low']:g} to {space['high']:g}{' (log)' if space['kind'] == 'LogRange' else ''}"


def as_text(value: Any) -> str:
    """Return null, true and false as YAML writes them, anything else as `str` does."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
