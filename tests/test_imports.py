"""Rooms of the code: imports run downwards only, those in functions and under `TYPE_CHECKING` included.

No code is run: the files are parsed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "fl_lightning"
ORDER = (
    (PACKAGE, "errors", "heap", "metric", "names", "record", "rng", "shared_memory", "signals"),
    ("launcher", "log", "ranges"),
    ("components", "datakeys", "extras", "optimizerkeys", "renames", "search"),
    ("configuration",),
    ("catalogue", "config", "device", "files"),
    ("csvtable", "owncode", "processes"),
    ("data", "models", "parallel", "provenance", "results", "storage"),
    ("core", "drawing"),
    ("privacy",),
    ("callbacks", "exporting"),
    ("methods.common",),
    ("methods",),
    ("knowledge", "report", "training"),
    ("engine",),
    ("run",),
    ("audit", "deploy", "planning"),
    ("study",),
    ("checking", "gains"),
    ("cli",),
    ("__main__", "api"),
)
"""From the ground up. Who stands beside another imports nothing of it. So methods, callbacks and what they are written
with know nothing of training, engine, run, planning and cli."""
FLOORS = {room: floor for floor, rooms in enumerate(ORDER) for room in rooms}


def modules() -> dict[str, Path]:
    """Every file of the package by its import name; `callbacks/` is a part of it."""
    found = {}
    for file in [*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")]:
        path = file.relative_to(ROOT)
        parts = (path if path.parts[0] == PACKAGE else PACKAGE / path).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(text: str, known: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each module of ours that a file imports anywhere; `known` are the names of all modules."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and not node.level, f"line {node.lineno}: imports are written in full"
            names = [name if (name := f"{node.module}.{a.name}") in known else node.module for a in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == PACKAGE)


def room(module: str) -> str:
    """Where a module lives: the first part of its name behind the package's; `methods.common` is a room of its own."""
    parts = module.split(".")
    if parts[1:3] == ["methods", "common"]:
        return "methods.common"
    return parts[1] if len(parts) > 1 else parts[0]


def wrong(module: str, text: str, known: frozenset[str]) -> list[str]:
    """What a module may not import, in words."""
    here = room(module)
    found = []
    for line, name in imports(text, known):
        there = room(name)
        if name not in known:
            found.append(f"{module}, line {line}: there is no {name}")
        elif there != here and FLOORS[there] >= FLOORS[here]:
            found.append(f"{module}, line {line}: {here} stands below {there} or beside it, and imports {name}")
    return found


def test_every_module_has_a_room() -> None:
    assert {room(module) for module in modules()} == FLOORS.keys()


def test_imports_run_downwards_only() -> None:
    found = modules()
    assert [line for module, file in found.items() for line in wrong(module, file.read_text(), frozenset(found))] == []


def test_no_circle_of_imports() -> None:
    """None within a room either."""
    found = modules()
    known = frozenset(found)
    graph = {module: {name for _, name in imports(file.read_text(), known)} for module, file in found.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("fl_lightning.methods.mine", "from fl_lightning.engine.federation import Federation"),
        ("fl_lightning.callbacks.mine", "import fl_lightning.training.local"),
        ("fl_lightning.core.mine", "def f():\n    from fl_lightning.callbacks import relations"),
        ("fl_lightning.files", "if TYPE_CHECKING:\n    from fl_lightning.config import Config"),
        ("fl_lightning.methods.mine", "from fl_lightning.nowhere import anything"),
    ],
)
def test_what_is_wrong_is_seen(module: str, text: str) -> None:
    known = frozenset(modules())
    assert len(wrong(module, text, known)) == 1
    assert wrong(module, "from fl_lightning.errors import BadInput\nimport torch", known) == []
