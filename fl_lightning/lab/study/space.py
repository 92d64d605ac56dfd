"""The hyperparameters that `fl-train tune` searches: those that a method declares, and the learning
rate."""

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
"""Range of the learning rate by optimiser, for all methods. SGD: around the 0.005 to 0.1 of the
methods' papers. Adam: a decade on either side of 0.001, its default and FedHKD's. A model that
configures its optimiser keeps its learning rate."""


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One hyperparameter that is searched."""

    key: str
    """Config key: `method.lam`, `optimizer.lr`."""
    space: Space
    """Values that are tried."""
    start: Any
    """Value of the first trial: the base's, or the method's default."""


def space(
    config: Config,
    fixed: Collection[str] = (),
) -> list[Dimension]:
    """The hyperparameters to search for the method of `config`.

    Each space is widened to contain the present value. A hyperparameter is not searched if that is
    impossible, as for a range of numbers if the present value is null, a word or a list.

    Args:
        config: the run's config.
        fixed: config keys that the study file sets, which are not searched.

    Raises:
        BadInput: the method declares a space from which nothing can be drawn.
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
