"""The plain attributes with which a model computes, beside its parameters and buffers."""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from io import BytesIO
from typing import Any
from weakref import ref

from torch import Tensor, nn

from fl_lightning.foundation.device import digest

_OF_EVERY_MODULE = vars(nn.Module()).keys()
"""Parameters, buffers, modules, hooks and the mode."""


class _Pickler(pickle.Pickler):
    """Pickles a model's parts by their names, and tensors by their digests."""

    names: dict[int, str]

    def persistent_id(self, value: Any) -> Hashable:
        """What stands for a part or a tensor; None: the value is pickled."""
        if isinstance(value, ref):  # an LSTM refers so to its parameters
            value = value()
        if id(value) in self.names:
            return self.names[id(value)]
        if isinstance(value, Tensor):
            return str(value.dtype), tuple(value.shape), digest([value])
        return None


def constants(model: nn.Module) -> Hashable:
    """A value that is equal for two models whose modules have equal attributes: tensors bit by bit,
    others as they are pickled; where one cannot be pickled, it equals nothing else.
    """
    content = BytesIO()
    pickler = _Pickler(content)
    parts = [*model.named_modules(), *model.named_parameters()]
    pickler.names = {id(part): name for name, part in parts}
    for module in model.modules():
        attributes = {k: v for k, v in vars(module).items() if k not in _OF_EVERY_MODULE}
        try:
            pickler.dump(attributes)
        except Exception:  # of a lambda, a lock: whatever a user's module has
            return object()
    return content.getvalue()
