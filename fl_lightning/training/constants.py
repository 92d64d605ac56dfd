"""The plain attributes with which a model computes, beside its parameters and buffers."""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from operator import itemgetter
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fl_lightning.foundation.device import digest

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Parameters, buffers, modules, hooks and the mode."""


class _Itself:
    """A value that equals nothing but itself. It stays alive, so that no other object takes its
    place in memory."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def constants(model: nn.Module) -> Hashable:
    """A value that is equal for two models whose modules have equal attributes: tensors bit by bit,
    numbers and words by value, other objects as they are pickled; objects that cannot be compared
    equal nothing else.
    """
    parts = [*model.named_modules(), *model.named_parameters()]
    names = {id(part): name for name, part in parts}

    def compared(leaf: Any) -> Hashable:
        leaf = leaf() if isinstance(leaf, ref) else leaf  # an LSTM refers so to its parameters
        return type(leaf), names[id(leaf)] if id(leaf) in names else _comparable(leaf)

    attributes: dict[tuple[str, str], Hashable] = {}
    for path, module in model.named_modules():
        for name in vars(module).keys() - _OF_EVERY_MODULE:
            leaves, shape = tree_flatten(vars(module)[name])
            attributes[path, name] = str(shape), tuple(map(compared, leaves))
    return tuple(sorted(attributes.items(), key=itemgetter(0)))


def _comparable(value: Any) -> Hashable:
    if isinstance(value, int | float | complex | str | None):
        return repr(value)
    try:
        if isinstance(value, Tensor):
            return str(value.dtype), tuple(value.shape), digest([value])
        return pickle.dumps(value)
    except Exception:  # of a lambda, a lock, a tensor without numbers: whatever a user's module has
        return _Itself(value)
