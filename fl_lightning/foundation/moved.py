"""Keeps old import paths working for modules that have moved: files that this package has written,
and users' code, still name them."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "components": "configuration.components",  # exported loaders
    "config": "configuration.config",
    "deploy": "sites",  # Flower apps
    "errors": "foundation.errors",
    "metric": "foundation.metric",
    "ranges": "configuration.ranges",  # methods of users
    "record": "results.record",
    "rng": "foundation.rng",
    "search": "configuration.search",
}
"""New module by old name, both below `fl_lightning`, of modules that other files import."""


class _Finder(MetaPathFinder, Loader):
    """Loads a moved module under its old name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if _new_name(fullname) else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(_new_name(module.__name__))


def find_moved_modules() -> None:
    """Install the import hook that loads the modules of `MOVED` when their old names are
    imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _new_name(old: str) -> str:
    """Return the full name of the module that was called `old`; empty: it has not moved."""
    package, _, rest = old.partition(".")
    first, dot, further = rest.partition(".")
    if package != "fl_lightning" or first not in MOVED:
        return ""
    return f"{package}.{MOVED[first]}{dot}{further}"
