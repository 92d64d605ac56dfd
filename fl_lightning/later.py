"""torchmetrics, of which Lightning wants two classes at once, and we a few functions late, if at all.

To import it is to import all of it, and with it scipy.signal and torchvision: a quarter of the time that a run takes to
begin. So it stands among the imported modules as one whose parts come when they are asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

NAME = "torchmetrics"
PARTS = {
    "Metric": ("utilities", "metric"),
    "MetricCollection": ("utilities", "collections"),
    "__version__": ("__about__",),
}
"""What is asked of the package while Lightning is imported, and the last of the modules to be imported for it, which
has it. (`utilities` and `metric` import each other: that is the end to begin at.)"""


class Later(ModuleType):
    """A package that is carried out where something is asked of it that is not in `PARTS`."""

    def __getattr__(self, name: str) -> Any:
        if name in PARTS:
            modules = [importlib.import_module(f"{NAME}.{part}") for part in PARTS[name]]
            return getattr(modules[-1], name)
        if name == "_logger":  # its parts log by it
            return logging.getLogger(NAME)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None and self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def put_off() -> None:
    """From now on torchmetrics is imported by and by, unless it has been, or is not there."""
    spec = importlib.util.find_spec(NAME) if NAME not in sys.modules else None
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        module.__class__ = Later
        sys.modules[NAME] = module
