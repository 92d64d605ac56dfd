"""Optional packages by extra (pyproject.toml), and the line that tells how to install one that is
missing."""

from __future__ import annotations

import re
import sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, requires

from fl_lightning.foundation.errors import BadInput

MODULES = {
    "wandb": ("wandb",),
    "tensorboard": ("tensorboard",),
    "study": ("pandas", "scipy"),
    "tables": ("openpyxl", "pyarrow", "pandas"),
    "report": ("jinja2", "matplotlib", "pandas"),
    "vision": ("torchvision",),
    "dp": ("dp_accounting",),
    "tune": ("optuna",),
    "dashboard": ("wandb_workspaces",),
    "adapters": ("peft",),
    "watch": ("seglearn",),
    "hf": ("datasets", "pyarrow"),
    "text": ("tokenizers",),
    "onnx": ("onnxscript",),
}
"""Import names of each extra's packages."""


def require(extra: str, key: str, value: object, instead: str = "") -> None:
    """Raise `BadInput`, one line with the command that installs `extra`, where a package of it is
    missing.

    Args:
        extra: a key of `MODULES`.
        key, value: what the user gave that needs it.
        instead: how to do without it, in words.
    """
    absent = [name for name in MODULES[extra] if not _installed(name)]
    if absent:
        raise BadInput(key, value, needs(absent[0]) + (f"; {instead}" if instead else ""))


def needs(module: str | None) -> str:
    """What to tell a user without `module`, or a submodule of it; empty if no extra has it."""
    name = (module or "").partition(".")[0]
    extra = next((extra for extra, names in MODULES.items() if name in names), None)
    return f"it needs {name}, which is not installed: {command(extra)}" if extra else ""


def missing(module: str) -> str:
    """What to tell a user where `module` is not installed; empty where it is."""
    return "" if _installed(module) else needs(module)


def command(extra: str) -> str:
    """The command that installs the packages of `extra`, as this package's own metadata lists
    them."""
    try:
        lines = requires("fl_lightning") or []
    except PackageNotFoundError:  # run from its sources, never installed
        lines = []
    marker = re.compile(rf"extra == ['\"]{extra}['\"]")
    listed = [line.partition(";")[0].strip() for line in lines if marker.search(line)]
    packages = " ".join(f"'{line}'" for line in listed) or f"'fl_lightning[{extra}]'"
    return f"{'pip' if _installed('pip') else 'uv pip'} install {packages}"


def _installed(name: str) -> bool:
    return (
        sys.modules[name] is not None
        if name in sys.modules
        else PathFinder.find_spec(name) is not None
    )
