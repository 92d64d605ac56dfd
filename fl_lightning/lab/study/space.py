"""What is searched for a method: its own arguments that say where, and what all methods have in
common."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Collection
from typing import Any

from fl_lightning.configuration.config import Config, check
from fl_lightning.configuration.search import LogRange, Space, space_problem, widened

RATES: dict[str, Space] = {
    "sgd": LogRange(1e-3, 0.3),
    "adam": LogRange(1e-4, 1e-2),
    "adamw": LogRange(1e-4, 1e-2),
}
"""Where the learning rate is searched, for all methods; an optimiser of the model's own has its
own. SGD: around what the methods' papers take, 0.005 to 0.1. Adam: a decade around 0.001, its
default and FedHKD's."""


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One argument that is searched."""

    key: str
    """`method.lam`, `optimizer.lr`."""
    space: Space
    start: Any
    """The first trial's value: the base's, or the method's default."""


def space(
    config: Config,
    fixed: Collection[str] = (),
) -> list[Dimension]:
    """The dimensions of the method of `config`, each widened to hold the value that is there.

    Args:
        fixed: keys that the study file sets, which are not searched; nor are those whose space
            cannot hold their value.

    Raises:
        BadInput: the method declares a space that nothing can be drawn from.
    """
    module, _, name = config.method.class_path.rpartition(".")
    dimensions = []
    for argument in dataclasses.fields(getattr(importlib.import_module(module), name)):
        if "search" in argument.metadata:
            values = argument.metadata["search"]
            requirement = space_problem(values)
            check(
                f"{name}.{argument.name}",
                values,
                requirement is None,
                str(requirement),
            )
            start = config.method.init_args.get(argument.name, argument.default)
            dimensions.append(Dimension(f"method.{argument.name}", values, start))
    if config.optimizer.name in RATES:
        rates = RATES[config.optimizer.name]
        dimensions.append(Dimension("optimizer.lr", rates, config.optimizer.lr))
    wider = []
    for dimension in dimensions:
        values = widened(dimension.space, dimension.start)
        if dimension.key not in fixed and values is not None:
            wider.append(dataclasses.replace(dimension, space=values))
    return wider
