"""Lists the packages of each extra (pyproject.toml), and tells the user how to install a missing
one."""

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
    """Raise `BadInput` with the command that installs `extra` if a package of it is missing.

    Args:
        extra: a key of `MODULES`.
        key, value: the setting that needs it.
        instead: what the user can do without it, in words.
    """
    for module in MODULES[extra]:
        if not _installed(module):
            hint = install_hint(module)
            raise BadInput(key, value, f"{hint}; {instead}" if instead else hint)


def install_hint(module: str | None) -> str:
    """Return how to install the package of `module`, in words; empty if it belongs to no extra."""
    name = (module or "").partition(".")[0]
    for extra, modules in MODULES.items():
        if name in modules:
            return f"it needs {name}, which is not installed: {command(extra)}"
    return ""


def hint_if_missing(module: str) -> str:
    """Return how to install `module`, in words; empty if it is installed."""
    return "" if _installed(module) else install_hint(module)


def command(extra: str) -> str:
    """Return the command that installs the packages of `extra`, as this package's metadata lists
    them."""
    try:
        requirements = requires("fl_lightning") or []
    except PackageNotFoundError:  # run from its sources, never installed
        requirements = []
    marker = re.compile(rf"extra == ['\"]{extra}['\"]")
    packages = [line.partition(";")[0].strip() for line in requirements if marker.search(line)]
    words = " ".join(f"'{package}'" for package in packages or [f"fl_lightning[{extra}]"])
    return f"{'pip' if _installed('pip') else 'uv pip'} install {words}"


def _installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return PathFinder.find_spec(name) is not None
