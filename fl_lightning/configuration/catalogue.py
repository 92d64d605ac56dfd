"""What can be chosen by name: methods, models, callbacks, loggers, data sources, partitions,
configs.

Classes are those of `configuration/index.json`, never imported, so that a wrong name is answered at
once.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from pathlib import Path

from fl_lightning.configuration import index
from fl_lightning.configuration.names import PARTITIONS, SOURCES
from fl_lightning.foundation.errors import BadInput


@dataclass(frozen=True)
class Entry:
    """One thing that can be named: a class of ours (`class_path`), or a mere name with an empty
    `class_path`."""

    name: str
    class_path: str
    summary: str
    family: str = ""
    """The idea that a method belongs to (`Traits.family`)."""


def table(kind: str) -> dict[str, Entry]:
    """Entries of one of `KINDS` by name, in the order of names."""
    return _TABLES[kind]()


def families(kind: str) -> dict[str, list[Entry]]:
    """Entries of one of `KINDS` by family, the largest first; those without one under ""."""
    groups: dict[str, list[Entry]] = {}
    for entry in table(kind).values():
        groups.setdefault(entry.family, []).append(entry)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def find(kind: str, key: str, name: str) -> Entry:
    """The entry called `name`, whatever its case, `_` and `-`; `BadInput` for `key` otherwise.

    A name with a dot is the import path of the user's own class: it is believed here and imported
    later.
    """
    if entry := lookup(kind, name):
        return entry
    if "." in name:
        return Entry(name, name, "")
    names = list(table(kind))
    listed = ", ".join(names) if len(names) <= 20 else f"see fl-train list {kind}"
    near = did_you_mean(name, names)
    raise BadInput(key, name, f"no such name{near}; {kind}: {listed}, or an import path")


def lookup(kind: str, name: str) -> Entry | None:
    """The entry called `name` (or with this class path); None: there is none."""
    for entry in table(kind).values():
        if _folded(entry.name) == _folded(name) or entry.class_path == name:
            return entry
    return None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Returns ` (did you mean X?)` for the nearest of `names`, or nothing. Dotted words are
    compared whole first; then, as words without dots, last parts."""
    names = list(names)
    near = difflib.get_close_matches(word, names, n=1) if "." in word else []
    if not near:
        last_part = {name: name.rpartition(".")[2] for name in names}
        word = word.rpartition(".")[2]
        nearest = difflib.get_close_matches(word, last_part.values(), n=1)
        near = [name for name in names if last_part[name] in nearest]
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def nearest_first(
    word: str,
    names: Iterable[str],
    most: int = 20,
) -> str:
    """Lists names, most similar to `word` first, at most `most` (20: more fill the screen)."""

    def likeness(name: str) -> float:
        return difflib.SequenceMatcher(None, word.casefold(), name.casefold()).ratio()

    ordered = sorted(names, key=likeness, reverse=True)
    more = f", and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more


def shipped(kind: str, name: str) -> Path | None:
    """The file of the config or study that ships with the package as `name`, with or without
    `.yaml`."""
    file = _shipped_in(kind) / f"{name.removesuffix('.yaml')}.yaml"
    return file if file.is_file() else None


def _shipped_in(kind: str) -> Path:
    return Path(str(resources.files("fl_lightning.configs"))) / ("" if kind == "configs" else kind)


def _folded(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _classes(kind: str) -> dict[str, Entry]:
    """The classes of `index.json`."""
    entries = {}
    for name, content in index.read()[kind].items():
        family = content.get("family", "")
        entries[name] = Entry(name, content["class"], content["doc"], family)
    return entries


def _names(texts: dict[str, str]) -> dict[str, Entry]:
    return {name: Entry(name, "", summary) for name, summary in texts.items()}


def _shipped(kind: str) -> dict[str, Entry]:
    """The shipped configs or studies by folder and name; the first line of each file is a comment
    that summarises it."""
    folder = _shipped_in(kind)
    entries = {}
    for file in sorted(folder.glob("*.yaml" if kind == "configs" else "**/*.yaml")):
        name = file.relative_to(folder).with_suffix("").as_posix()
        first_line = file.read_text(encoding="utf-8").partition("\n")[0]
        entries[name] = Entry(name, "", first_line.lstrip("# "))
    return entries


_TABLES: dict[str, Callable[[], dict[str, Entry]]] = {
    "methods": cache(partial(_classes, "methods")),
    "configs": cache(partial(_shipped, "configs")),
    "sources": cache(lambda: _names(SOURCES)),
    "partitions": cache(lambda: _names(PARTITIONS)),
    "studies": cache(partial(_shipped, "studies")),
    "models": cache(partial(_classes, "models")),
    "callbacks": cache(partial(_classes, "callbacks")),
    "loggers": cache(partial(_classes, "loggers")),
}

KINDS = tuple(_TABLES)
