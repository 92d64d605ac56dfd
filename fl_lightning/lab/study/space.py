"""What is searched for a method: its own arguments that say where, and what all methods have in
common."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Collection
from typing import Any

from fl_lightning.configuration.config import Config
from fl_lightning.configuration.search import LogRange, Space, refusal, widened
from fl_lightning.foundation.errors import BadInput

RATES: dict[str, tuple[Space, str]] = {
    "sgd": (LogRange(1e-3, 0.3), "around what the methods' papers take: 0.005 to 0.1"),
    "adam": (LogRange(1e-4, 1e-2), "a decade around 0.001, Adam's default and FedHKD's"),
    "adamw": (LogRange(1e-4, 1e-2), "as for adam"),
}
"""Where the learning rate is searched, for all methods. An optimiser of the model's own has its
own."""


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One argument that is searched."""

    key: str
    """`method.lam`, `optimizer.lr`."""
    space: Space
    start: Any
    """What the base has, or the method's default: the first trial's."""
    why: str


def space(config: Config, fixed: Collection[str] = ()) -> list[Dimension]:
    """The dimensions of the method of `config`, each widened to hold the value that is there.

    Args:
        fixed: keys that the study file sets, which are not searched; nor are those whose space
            cannot hold their value.

    Raises:
        BadInput: the method declares a space that nothing can be drawn from.
    """
    module, _, name = config.method.class_path.rpartition(".")
    own = dataclasses.fields(getattr(importlib.import_module(module), name))
    for f in own:
        if "search" in f.metadata and (allowed := refusal(f.metadata["search"])) is not None:
            raise BadInput(f"{name}.{f.name}", f.metadata["search"], allowed)
    searched = [
        (
            f"method.{f.name}",
            f.metadata["search"],
            config.method.init_args.get(f.name, f.default),
            f.metadata["why"],
        )
        for f in own
        if "search" in f.metadata
    ]
    if config.optimizer.name in RATES:
        where, why = RATES[config.optimizer.name]
        searched.append(("optimizer.lr", where, config.optimizer.lr, why))
    wide = [
        (key, widened(where, start), start, why)
        for key, where, start, why in searched
        if key not in fixed
    ]
    return [
        Dimension(key, where, start, why) for key, where, start, why in wide if where is not None
    ]
