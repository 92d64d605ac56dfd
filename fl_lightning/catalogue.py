"""What can be chosen by name: methods, models, callbacks, loggers, data sources, partitions, configs.

Classes are those of `configuration/index.json`, never imported, so that a wrong name is answered at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from fl_lightning.configuration import index
from fl_lightning.errors import BadInput
from fl_lightning.names import PARTITIONS, SOURCES


@dataclass(frozen=True)
class Entry:
    """One thing that can be named: a class of ours (`class_path`), or a mere name with an empty `class_path`."""

    name: str
    class_path: str
    summary: str
    family: str = ""
    """The idea that a method belongs to (`Method.family`)."""


def table(kind: str) -> dict[str, Entry]:
    """Entries of one of `KINDS` by name, in the order of names."""
    return _TABLES[kind]()


def families(kind: str) -> dict[str, list[Entry]]:
    """Entries of one of `KINDS` by the idea that they belong to, the largest group first; what has none: under ""."""
    groups: dict[str, list[Entry]] = {}
    for entry in table(kind).values():
        groups.setdefault(entry.family, []).append(entry)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def find(kind: str, key: str, name: str) -> Entry:
    """The entry called `name`, whatever its case, `_` and `-`; `BadInput` for `key` otherwise.

    A name with a dot is the import path of the user's own class: it is believed here and imported later.
    """
    if entry := lookup(kind, name):
        return entry
    if "." in name:
        return Entry(name, name, "")
    names = list(table(kind))
    allowed = ", ".join(names) if len(names) <= 20 else f"see fl-train list {kind}"
    raise BadInput(key, name, f"no such name{did_you_mean(name, names)}; {kind}: {allowed}, or an import path")


def lookup(kind: str, name: str) -> Entry | None:
    """The entry called `name` (or with this class path), if there is one."""
    return next((e for e in table(kind).values() if _plain(e.name) == _plain(name) or e.class_path == name), None)


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """` (did you mean X?)` for the nearest of `names`, or nothing. A word without dots is compared with last parts."""
    names = list(names)
    near = difflib.get_close_matches(word, names, n=1) if "." in word else []
    if not near:
        last = difflib.get_close_matches(word.rpartition(".")[2], [_last(name) for name in names], n=1)
        near = [name for name in names if _last(name) in last]
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def shipped_config(name: str) -> str | None:
    """Text of the config that ships with the package as `name`, with or without `.yaml`; None if there is none."""
    file = resources.files("fl_lightning.configs").joinpath(f"{name.removesuffix('.yaml')}.yaml")
    return file.read_text(encoding="utf-8") if file.is_file() else None


def shipped_study(name: str) -> Path | None:
    """The file of the study that ships with the package as `name` (`kapc/table1`); None if there is none."""
    file = _studies() / f"{name.removesuffix('.yaml')}.yaml"
    return file if file.is_file() else None


def _studies() -> Path:
    return Path(str(resources.files("fl_lightning.configs"))) / "studies"


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _classes(kind: str) -> dict[str, Entry]:
    """The classes of `index.json`."""
    entries = index.read()[kind]
    return {name: Entry(name, e["class"], e["doc"], e.get("family", "")) for name, e in entries.items()}


def _names(texts: dict[str, str]) -> dict[str, Entry]:
    return {name: Entry(name, "", summary) for name, summary in texts.items()}


def _configs() -> dict[str, Entry]:
    """The shipped configs; the first line of each is a comment that says what it is."""
    files = [file for file in resources.files("fl_lightning.configs").iterdir() if file.name.endswith(".yaml")]
    names = sorted(file.name.removesuffix(".yaml") for file in files)
    return {name: Entry(name, "", (shipped_config(name) or "").partition("\n")[0].lstrip("# ")) for name in names}


def _shipped_studies() -> dict[str, Entry]:
    """The shipped studies by folder and name; the first line of each says what it is."""
    studies = {}
    for file in _studies().rglob("*.yaml"):
        name = file.relative_to(_studies()).with_suffix("").as_posix()
        studies[name] = Entry(name, "", file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# "))
    return dict(sorted(studies.items()))


_TABLES: dict[str, Callable[[], dict[str, Entry]]] = {
    "methods": cache(lambda: _classes("methods")),
    "configs": cache(_configs),
    "sources": cache(lambda: _names(SOURCES)),
    "partitions": cache(lambda: _names(PARTITIONS)),
    "studies": cache(_shipped_studies),
    "models": cache(lambda: _classes("models")),
    "callbacks": cache(lambda: _classes("callbacks")),
    "loggers": cache(lambda: _classes("loggers")),
}

KINDS = tuple(_TABLES)
