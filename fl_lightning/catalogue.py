"""What can be chosen by name: methods, models, callbacks, loggers, data sources, partitions, configs.

Classes are read off the source text, never imported, so that a wrong name is answered at once and a new method is
listed as soon as its file exists.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

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
    found: dict[str, list[Entry]] = {}
    for entry in table(kind).values():
        found.setdefault(entry.family, []).append(entry)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


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


def _modules(package: str) -> Iterator[tuple[str, ast.Module]]:
    """Import path and syntax tree of each file of a subpackage, found but not imported."""
    spec = find_spec(f"fl_lightning.{package}")
    folders = (spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.py")):
            if path.stem != "__init__":
                yield f"fl_lightning.{package}.{path.stem}", ast.parse(path.read_text(encoding="utf-8"))


def _classes(package: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for module, tree in _modules(package):
        yield from ((module, node) for node in tree.body if isinstance(node, ast.ClassDef))


def _entries(classes: Iterable[tuple[str, ast.ClassDef]]) -> dict[str, Entry]:
    """The public classes with a docstring that are no base of others (in `base`, or abstract)."""
    found = {}
    for module, node in classes:
        summary, is_base = ast.get_docstring(node), module.endswith(".base") or "ABC" in _base_names(node)
        if summary and not node.name.startswith("_") and not is_base:
            name = node.name.lower()
            found[name] = Entry(name, f"{module}.{node.name}", summary.splitlines()[0], _text(node, "family"))
    return dict(sorted(found.items()))


def _text(node: ast.ClassDef, variable: str) -> str:
    """The text that a class assigns to `variable`; empty if it does not."""
    for item in node.body:
        if isinstance(item, ast.Assign) and [getattr(t, "id", "") for t in item.targets] == [variable]:
            return str(ast.literal_eval(item.value))
    return ""


def _base_names(node: ast.ClassDef) -> set[str]:
    return {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases}


def _descending(package: str, root: str) -> list[tuple[str, ast.ClassDef]]:
    """The classes of a subpackage that descend from `root`, save relations: a method brings its own."""
    classes = list(_classes(package))
    bases = {node.name: _base_names(node) for _, node in classes}

    def ancestors(name: str) -> set[str]:
        direct = bases.get(name, set())
        return direct.union(*(ancestors(base) for base in direct))

    lines = {node.name: {node.name} | ancestors(node.name) for _, node in classes}
    return [(m, node) for m, node in classes if root in lines[node.name] and "Relation" not in lines[node.name]]


def _callbacks(loggers: bool) -> dict[str, Entry]:
    return _entries((m, node) for m, node in _descending("callbacks", "Callback") if m.endswith(".loggers") == loggers)


def _names(texts: dict[str, str]) -> dict[str, Entry]:
    return {name: Entry(name, "", summary) for name, summary in texts.items()}


def _configs() -> dict[str, Entry]:
    """The shipped configs; the first line of each is a comment that says what it is."""
    files = [file for file in resources.files("fl_lightning.configs").iterdir() if file.name.endswith(".yaml")]
    names = sorted(file.name.removesuffix(".yaml") for file in files)
    return {name: Entry(name, "", (shipped_config(name) or "").partition("\n")[0].lstrip("# ")) for name in names}


def _shipped_studies() -> dict[str, Entry]:
    """The shipped studies by folder and name; the first line of each says what it is."""
    found = {}
    for file in _studies().rglob("*.yaml"):
        name = file.relative_to(_studies()).with_suffix("").as_posix()
        found[name] = Entry(name, "", file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# "))
    return dict(sorted(found.items()))


_TABLES: dict[str, Callable[[], dict[str, Entry]]] = {
    "methods": cache(lambda: _entries(_descending("methods", "Method"))),
    "configs": cache(_configs),
    "sources": cache(lambda: _names(SOURCES)),
    "partitions": cache(lambda: _names(PARTITIONS)),
    "studies": cache(_shipped_studies),
    "models": cache(lambda: _entries(_classes("models"))),
    "callbacks": cache(lambda: _callbacks(loggers=False)),
    "loggers": cache(lambda: _callbacks(loggers=True)),
}

KINDS = tuple(_TABLES)
