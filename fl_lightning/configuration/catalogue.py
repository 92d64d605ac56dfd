"""Looks up the names that a configuration may contain: methods, models, callbacks, loggers, data
sources, partitions, configs and studies.

Classes are looked up in `configuration/index.json` and not imported, so that a wrong name is
refused at once.
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
    """A name that a configuration may contain.

    `class_path` is the import path of a method, model, callback or logger. It is empty for a data
    source, partition, config or study.
    """

    name: str
    class_path: str
    summary: str
    family: str = ""
    """The idea that a method belongs to (`Traits.family`)."""


def table(kind: str) -> dict[str, Entry]:
    """Return the entries of one of `KINDS` by name, in the order in which they are listed."""
    return _TABLES[kind]()


def families(kind: str) -> dict[str, list[Entry]]:
    """Return the entries of one of `KINDS` by family, the largest family first; entries without a
    family are under ""."""
    groups: dict[str, list[Entry]] = {}
    for entry in table(kind).values():
        groups.setdefault(entry.family, []).append(entry)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def find(kind: str, key: str, name: str) -> Entry:
    """Return the entry of one of `KINDS` called `name`; case, `_` and `-` make no difference.

    A name with a dot is taken for the import path of a user's class and not checked here.

    Raises:
        BadInput: there is no such name; the error names the key `key`.
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
    """Return the entry called `name`, or with this class path; None: there is none."""
    for entry in table(kind).values():
        if _folded(entry.name) == _folded(name) or entry.class_path == name:
            return entry
    return None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return ` (did you mean X?)` for the most similar of `names`, or "" if none is similar.

    A word with a dot is first compared with the whole names. If the word has no dot, or no whole
    name is similar, only the part behind the last dot is compared, of the word and of each name.
    """
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
    """Return `names` in one line, the most similar to `word` first. Names beyond the first `most`
    are only counted (20: more fill the screen)."""

    def likeness(name: str) -> float:
        return difflib.SequenceMatcher(None, word.casefold(), name.casefold()).ratio()

    ordered = sorted(names, key=likeness, reverse=True)
    more = f", and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more


def shipped(kind: str, name: str) -> Path | None:
    """Return the file of the shipped config or study `name` (with or without `.yaml`); None: there
    is none. `kind`: `configs` or `studies`."""
    file = _shipped_in(kind) / f"{name.removesuffix('.yaml')}.yaml"
    return file if file.is_file() else None


def _shipped_in(kind: str) -> Path:
    return Path(str(resources.files("fl_lightning.configs"))) / ("" if kind == "configs" else kind)


def _folded(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _classes(kind: str) -> dict[str, Entry]:
    """Return the entries of the classes in `index.json`."""
    entries = {}
    for name, content in index.read()[kind].items():
        family = content.get("family", "")
        entries[name] = Entry(name, content["class"], content["doc"], family)
    return entries


def _names(texts: dict[str, str]) -> dict[str, Entry]:
    return {name: Entry(name, "", summary) for name, summary in texts.items()}


def _shipped(kind: str) -> dict[str, Entry]:
    """Return the entries of the shipped configs or studies by path below their folder. The comment
    in a file's first line is its summary."""
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
