"""What is searched for a method: its own arguments that say where, and what all methods have in
common."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Collection
from typing import Any

import numpy as np

from fl_lightning.configuration.config import Config, check
from fl_lightning.configuration.search import Choice, LogRange, Space, Whole, refusal, widened
from fl_lightning.foundation.rng import key

RATES: dict[str, Space] = {
    "sgd": LogRange(1e-3, 0.3),
    "adam": LogRange(1e-4, 1e-2),
    "adamw": LogRange(1e-4, 1e-2),
}
"""Where the learning rate is searched, for all methods; an optimiser of the model's own has its
own. SGD: around what the methods' papers take, 0.005 to 0.1. Adam: a decade around 0.001, its
default and FedHKD's."""


NEAR = 0.15
"""Standard deviation of draws near the best trial, as a share of the space. Ours: of 0.1, 0.15 and
0.2 the best on quadratic functions of one to three arguments with noise."""


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
            requirement = refusal(values)
            check(
                f"{name}.{argument.name}",
                values,
                requirement is None,
                str(requirement),
            )
            start = config.method.init_args.get(argument.name, argument.default)
            dimensions.append(
                Dimension(
                    f"method.{argument.name}",
                    values,
                    start,
                )
            )
    if config.optimizer.name in RATES:
        rates = RATES[config.optimizer.name]
        dimensions.append(
            Dimension(
                "optimizer.lr",
                rates,
                config.optimizer.lr,
            )
        )
    wider = []
    for dimension in dimensions:
        values = widened(dimension.space, dimension.start)
        if dimension.key not in fixed and values is not None:
            wider.append(dataclasses.replace(dimension, space=values))
    return wider


def drawn(dimension: Dimension, label: str, number: int, seed: int) -> list[Any]:
    """The values of the first `number` trials: the start, then one from each of as many equal parts
    of the space, in random order (a Latin hypercube).

    For a key that all methods have (the learning rate) all methods draw the same values: else with
    few trials the luck of the draw is taken for a difference of methods.
    """
    whose = label if dimension.key.startswith("method.") else ""
    rng = np.random.default_rng(key(seed, f"{whose} {dimension.key}"))
    shares = (rng.permutation(number - 1) + rng.random(number - 1)) / (number - 1)
    return [dimension.start, *(_at(dimension.space, float(share)) for share in shares)]


def nearby(dimension: Dimension, label: str, number: int, seed: int, best: Any) -> Any:
    """The value of a later trial, near that of the best trial so far."""
    rng = np.random.default_rng(key(seed, f"{label} {dimension.key}", number))
    share = _share(dimension.space, best) + NEAR * rng.standard_normal()
    return _at(dimension.space, min(max(share, 0.0), 1.0 - 1e-9))


def _share(space: Space, value: Any) -> float:
    """Where a value lies in a space: the inverse of `_at`."""
    if isinstance(space, Choice | Whole):
        values = space.values if isinstance(space, Choice) else range(space.low, space.high + 1)
        return (values.index(value) + 0.5) / len(values)
    scale = math.log if isinstance(space, LogRange) else float
    return float(np.interp(scale(value), [scale(space.low), scale(space.high)], [0.0, 1.0]))


def _at(space: Space, share: float) -> Any:
    """The value at a share, from 0 to below 1, of a space; with three digits, which is more than a
    search can tell."""
    if isinstance(space, Choice):
        return space.values[int(share * len(space.values))]
    if isinstance(space, Whole):
        return space.low + int(share * (space.high - space.low + 1))
    if isinstance(space, LogRange):
        value = space.low * (space.high / space.low) ** share
    else:
        value = space.low + share * (space.high - space.low)
    return float(f"{value:.3g}")
