"""Personalised federated learning on PyTorch Lightning and Lightning Fabric.

The names exported here are for scripts and notebooks and stay the same in later versions
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

_FUNCTIONS = (
    "archive",
    "audit",
    "check_data",
    "check_method",
    "compare",
    "dashboard",
    "deploy",
    "export",
    "fit",
    "join",
    "plan",
    "report",
    "reproduce",
    "resolved",
    "status",
    "study",
    "submit",
    "test",
    "tune",
    "worth",
)
_WHERE = {
    **dict.fromkeys(("BadInput", "RunFailed"), "foundation.errors"),
    **dict.fromkeys(("Run", "Worth", *_FUNCTIONS), "api"),
}
"""Modules of the exported names. They are imported on first use, to keep the command line quick."""

__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
