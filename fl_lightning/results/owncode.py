"""Source code of the user's own classes: the files that a run executes, their changes, and copies
in the run folder.

Own code is every class that a configuration names by an import path outside of this package and of
installed packages, the classes that it descends from, and every file that these files import from
the folder of their import path. Imports are found in the text, so imports by a computed name are
missed.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from itertools import accumulate, chain, count
from pathlib import Path
from typing import Any

from fl_lightning.configuration.config import Config, check
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.files import write_whole

COMPUTES = ("method", "model", "data", "callbacks")
"""Parts of a configuration whose code determines a run's numbers. A logger's code does not: it may
change, and is not stored."""
SHARED = ("model", "data")
"""Parts that all methods of a comparison have in common."""
ROUNDS = "source/rounds.json"
_INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib"))
# packages of another environment, which this one may use too
_SITES = {"site-packages", "dist-packages"}
_text_of_loaded: dict[int, tuple[Any, bytes]] = {}
"""Spec and source text of each loaded module, by the spec's id, since a spec may not be
hashable."""


def paths(config: Config, parts: Collection[str] = COMPUTES) -> tuple[str, ...]:
    """Return the import paths of classes and functions outside of this package that the
    configuration names.

    `parts`: parts of the configuration to search, some of `COMPUTES`.
    """
    paths_by_part = {
        "method": [config.method.class_path],
        "model": [model.component.class_path for model in config.models],
        "data": [config.data.source, config.data.partition, config.data.scale or ""],
        "callbacks": [component.class_path for component in config.callbacks.values()],
    }
    import_paths = dict.fromkeys(path for part in parts for path in paths_by_part[part])
    return tuple(
        path for path in import_paths if "." in path and not path.startswith("fl_lightning.")
    )


def files(import_paths: Collection[str]) -> dict[str, tuple[str, Path]]:
    """Find the files of own code behind import paths.

    Returns (module name, file) by the file's path below its import folder, such as
    `mine/models.py`.
    """
    waiting: dict[str, Path] = {}
    for module in chain.from_iterable(map(_modules, import_paths)):
        if file := _own_file(module):
            waiting[module] = file
    modules: dict[str, tuple[str, Path]] = {}
    while waiting:
        module, file = waiting.popitem()
        name = _relative(module, file)
        if name in modules:
            continue
        modules[name] = module, file
        root = file.parents[name.count("/")]
        imports = map(_with_packages, _imports(module, file))
        for imported in set(chain.from_iterable(imports)):
            if imported_file := _below(root, imported):
                waiting[imported] = imported_file
    return dict(sorted(modules.items()))


def read(import_paths: Collection[str]) -> dict[str, bytes]:
    """Return the source text of each of `files`, as this process executes it: later edits of a
    loaded file do not count."""
    modules = files(import_paths)
    return {name: _text(module, file) for name, (module, file) in modules.items()}


def digests(code: Mapping[str, bytes]) -> dict[str, str]:
    """Return the SHA-256 of each file."""
    return {name: hashlib.sha256(text).hexdigest() for name, text in code.items()}


def current_digests(config: Config, parts: Collection[str] = COMPUTES) -> dict[str, str]:
    """Return the SHA-256 of each file of own code that `config` would execute now."""
    return digests(read(paths(config, parts)))


# ---------------------------------------------------------------- in the run folder


def versions(folder: Path) -> list[dict[str, Any]]:
    """Return the versions of own code with which a run was trained, from `source/rounds.json`.

    Each has the keys `first_round`, `folder`, `code` (SHA-256 by file) and `changed` (files), in
    the order of rounds; it trained until the first round of the next.

    Raises:
        BadInput: the file cannot be read.
    """
    file = folder / ROUNDS
    if not file.is_file():  # the run has no code of its own
        return []
    try:
        return [dict(version) for version in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(
            "run", str(folder), f"its {ROUNDS} cannot be read ({error}): restore it"
        ) from None


def recorded_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of the code that trained the last rounds of the run in
    `folder`."""
    every_version = versions(folder)
    return dict(every_version[-1]["code"]) if every_version else {}


def changed_files(
    before: Mapping[str, str],
    after: Mapping[str, str],
) -> list[str]:
    """Return the files that both versions have with different digests; added and removed files are
    left out. `before`, `after`: digests by file."""
    return [name for name, digest in after.items() if before.get(name, digest) != digest]


def check_same(
    config: Config,
    folder: Path,
    accept: bool,
) -> None:
    """Raise `BadInput` if own code differs from the code that trained the run in `folder`, unless
    `accept`."""
    names = changed_files(recorded_digests(folder), current_digests(config))
    requirement = (
        f"it has changed since {folder} was begun ({folder / 'source'} holds the old code): "
        "restore it, start another run, or accept it with --accept_changed_code; the folder then "
        "tells which rounds each version has trained"
    )
    check("code", ", ".join(names), accept or not names, requirement)


def store_version(
    folder: Path,
    code: Mapping[str, bytes],
    round: int,
) -> list[str]:
    """Copy `code`, which trains from `round` on, into the run folder, and record its first round.

    The first version goes to `source/`, later ones to `source/from-round-0006/`. No copy is
    overwritten.

    Returns:
        The files that differ from the version before.
    """
    before = versions(folder)
    # a resumed run restarts at an earlier checkpoint: nothing is left of later versions' rounds
    rounds = [version for version in before if version["first_round"] < round]
    last = rounds[-1]["code"] if rounds else {}
    current = digests(code)
    names = changed_files(last, current)
    if current != last:
        copies = (place for place in _places(folder / "source") if _texts(place) == code)
        place = next(copies, None)
        if place is None:
            place = _free(folder / "source", round)
            for name, text in code.items():
                write_whole(place / name, text, durable=False)
        path = place.relative_to(folder).as_posix()
        version = {
            "first_round": round,
            "folder": path,
            "code": current,
            "changed": names,
        }
        rounds.append(version)
    if rounds != before:
        write_whole(folder / ROUNDS, json.dumps(rounds, indent=1) + "\n", durable=False)
    return names


def store_planned(config: Config, folder: Path) -> None:
    """Copy the user's code into the folder of a run that a study will start later.

    Replaces an earlier copy; does nothing if the run has begun. If the code has changed by the time
    the run starts, the run is refused.
    """
    if not (folder / "metrics.csv").exists():
        shutil.rmtree(folder / "source", ignore_errors=True)
        store_version(folder, read(paths(config)), 1)


def _places(source: Path) -> list[Path]:
    return [source, *sorted(source.glob("from-round-*"))] if source.is_dir() else []


def _texts(version: Path) -> dict[str, bytes]:
    """Return the text of each file of one version, without the folders of other versions in it."""
    texts = {}
    for file in version.rglob("*.py"):
        name = file.relative_to(version)
        if not name.parts[0].startswith("from-round-"):
            texts[name.as_posix()] = file.read_bytes()
    return texts


def _free(source: Path, round: int) -> Path:
    if not any(source.glob("**/*.py")):
        return source
    first = source / f"from-round-{round:04d}"
    numbered = (first.with_name(f"{first.name}-{k}") for k in count(2))
    return next(place for place in chain([first], numbered) if not place.exists())


# ---------------------------------------------------------------- files and imports


def _modules(path: str) -> Iterator[str]:
    """Yield the module of an import path, its packages, and the modules of all base classes of the
    class."""
    module, _, name = path.rpartition(".")
    yield from _with_packages(module)
    cls = getattr(sys.modules.get(module), name, None)
    for base in getattr(cls, "__mro__", (cls,)):
        home = getattr(base, "__module__", None)
        if isinstance(home, str):
            yield home


def _own_file(module: str) -> Path | None:
    """Return the file of a module, if it is the user's own; None for others, or without source."""
    if module.partition(".")[0] in {"fl_lightning", *sys.builtin_module_names}:
        return None
    loaded = sys.modules.get(module)
    try:
        spec = find_spec(module) if loaded is None else None
    except (ImportError, AttributeError, ValueError):
        return None
    origin = spec.origin if spec else getattr(loaded, "__file__", None)
    file = Path(origin or "")
    if file.suffix != ".py" or not file.is_file():
        return None
    place = file.resolve()
    is_installed = any(place.is_relative_to(folder) for folder in _INSTALLED)
    return None if is_installed or _SITES.intersection(place.parts) else file


def _package(module: str, file: Path) -> list[str]:
    """Return the names of the packages that contain a module; for a package, its own name too."""
    names = module.split(".")
    return names if file.name == "__init__.py" else names[:-1]


def _relative(module: str, file: Path) -> str:
    return "/".join([*_package(module, file), file.name])


def _with_packages(module: str) -> Iterator[str]:
    yield from accumulate(module.split("."), "{}.{}".format)


def _imports(module: str, file: Path) -> Iterator[str]:
    """Yield the names that a file imports anywhere; for `from a import b` both `a` and `a.b`."""
    try:
        tree = ast.parse(_text(module, file))
    except (SyntaxError, ValueError):
        return
    package = _package(module, file)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = [*above, node.module] if node.module else above
            yield from (".".join([*base, alias.name]) for alias in node.names)
            if base:
                yield ".".join(base)


def _below(root: Path, module: str) -> Path | None:
    """Return the file of a module in the folder `root`; None if a standard module has the name, or
    there is none."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == "fl_lightning":
        return None
    path = root.joinpath(*module.split("."))
    files = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in files if file.is_file()), None)


def _text(module: str, file: Path) -> bytes:
    """Return the text that a loaded module executes: its file when this process first read it,
    since later edits have no effect."""
    loaded = sys.modules.get(module)
    spec = getattr(loaded, "__spec__", None) or loaded  # a reload makes a new spec
    if spec is None:
        return file.read_bytes()
    known_spec, text = _text_of_loaded.get(id(spec), (None, b""))
    if known_spec is not spec:
        text = file.read_bytes()
        _text_of_loaded[id(spec)] = spec, text
    return text
