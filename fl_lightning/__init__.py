"""Personalised federated learning on PyTorch Lightning and Lightning Fabric.

These names are for scripts and notebooks; they stay the same from version to version
(docs/python.md).
"""

import sys
from importlib import import_module
from typing import Any

from fl_lightning.foundation.moved import find_moved_modules

if sys.platform == "win32":
    raise ImportError(
        "fl_lightning runs on Linux and macOS: it uses fcntl and resource, which Windows does not "
        "have (WSL 2 has)"
    )

find_moved_modules()

__version__ = "0.1.0"

__all__ = [
    "BadInput",
    "Run",
    "RunFailed",
    "Worth",
    "__version__",
    "compare",
    "fit",
    "study",
    "tune",
    "worth",
]

_WHERE = {
    "BadInput": "foundation.errors",
    "RunFailed": "foundation.errors",
    **dict.fromkeys(("Run", "Worth", "compare", "fit", "study", "tune", "worth"), "api"),
}
"""Modules of the names above. They are imported on first use, since the command line begins here,
too."""


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
