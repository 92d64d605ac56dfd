"""Compares models by the attributes with which they compute, other than parameters and buffers."""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from io import BytesIO
from typing import Any
from weakref import ref

from torch import Tensor, nn

from fl_lightning.foundation.device import digest

_OF_EVERY_MODULE = vars(nn.Module()).keys()
"""Attributes that every module has: parameters, buffers, modules, hooks and the mode."""


class _Pickler(pickle.Pickler):
    """Pickles a model's modules and parameters as their names, and other tensors as digests."""

    names: dict[int, str]

    def persistent_id(self, value: Any) -> Hashable:
        """Return the name or the digest in place of `value`; None: pickle the value itself."""
        if isinstance(value, ref):  # an LSTM has weak references to its parameters
            value = value()
        if id(value) in self.names:
            return self.names[id(value)]
        if isinstance(value, Tensor):
            return str(value.dtype), tuple(value.shape), digest([value])
        return None


def constants(model: nn.Module) -> Hashable:
    """Return a value that is equal for two models if all attributes of their modules are equal:
    tensors bit for bit, others as pickled bytes. If an attribute cannot be pickled, the value is
    unequal to any other."""
    content = BytesIO()
    pickler = _Pickler(content)
    parts = [*model.named_modules(), *model.named_parameters()]
    pickler.names = {id(part): name for name, part in parts}
    for module in model.modules():
        attributes = {k: v for k, v in vars(module).items() if k not in _OF_EVERY_MODULE}
        try:
            pickler.dump(attributes)
        except Exception:  # a user's module may hold a lambda or a lock
            return object()
    return content.getvalue()
