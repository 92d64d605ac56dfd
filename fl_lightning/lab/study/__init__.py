"""Studies: many runs over a grid of methods, settings and seeds, run and compared as one thing.

The package shares its name with the function `fl_lightning.lab.study`: called, it is that function
(`api.study`).
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Study(ModuleType):
    def __call__(self, *args: Any, **keys: Any) -> Any:
        return import_module("fl_lightning.api").study(*args, **keys)


sys.modules[__name__].__class__ = _Study
