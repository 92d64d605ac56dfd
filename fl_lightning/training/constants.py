"""What a model computes with beside its parameters and buffers: plain attributes of its modules."""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fl_lightning.foundation.device import digest

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Parameters, buffers, modules, hooks and the mode."""


class _Itself:
    """Something that is equal to nothing but itself; it stays alive, so that nothing else takes its
    place in memory."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def constants(model: nn.Module) -> Hashable:
    """Equal for two models whose modules have equal attributes: tensors bit by bit, numbers and
    words by value, other things as they are pickled. What cannot be compared is equal to nothing
    else.
    """
    parts = [*model.named_modules(), *model.named_parameters()]
    names = {id(part): name for name, part in parts}

    def compared(leaf: Any) -> Hashable:
        leaf = leaf() if isinstance(leaf, ref) else leaf  # an LSTM refers so to its parameters
        return type(leaf), names[id(leaf)] if id(leaf) in names else _comparable(leaf)

    attributes = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE:
                leaves, shape = tree_flatten(value)
                attributes.append((path, name, str(shape), tuple(map(compared, leaves))))
    return tuple(sorted(attributes, key=lambda attribute: attribute[:2]))


def _comparable(value: Any) -> Hashable:
    if isinstance(value, int | float | complex | str | None):
        return repr(value)
    try:
        if isinstance(value, Tensor):
            return str(value.dtype), tuple(value.shape), digest([value])
        return pickle.dumps(value)
    except Exception:  # a lambda, a lock, a tensor without numbers: whatever a user's module has
        return _Itself(value)
