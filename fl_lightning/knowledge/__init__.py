"""The former name of `fl_lightning.methods.common`; it works for one version."""

import importlib
import pkgutil
import sys

from fl_lightning import log

log.say("fl_lightning.knowledge is now called fl_lightning.methods.common; version 0.2 is the last with the old name")
_common = importlib.import_module("fl_lightning.methods.common")
for _name in [module.name for module in pkgutil.iter_modules(_common.__path__)]:
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"fl_lightning.methods.common.{_name}")
sys.modules[f"{__name__}.common"] = sys.modules[f"{__name__}.basics"]
