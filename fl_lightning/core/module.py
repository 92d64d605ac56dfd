"""The module that clients are bound into, as methods and losses see it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from fl_lightning.core.layout import Binding, Layout
from fl_lightning.data.part import Part
from fl_lightning.foundation.metric import Metric

Batch = tuple[Tensor, Tensor]
"""x (n, ...) and y (n,)."""


class Module(Protocol):
    """What they use of `training.module.ClientModule`."""

    model: Any
    """The network; it has whatever parts a method's `build` has given it."""
    layout: Layout
    binding: Binding
    metric: Metric
    num_classes: int
    cast: Callable[[], AbstractContextManager[Any]]

    @property
    def head(self) -> Any: ...
    @property
    def features(self) -> Tensor: ...
    def task_loss(self, batch: Batch, batch_idx: int | None = None) -> Tensor: ...
    def mean_loss(self, part: Part, batch_size: int) -> Tensor: ...
    def under(self, vector: Tensor, x: Tensor) -> tuple[Tensor, Tensor]: ...
    def flat_gradient(self, batch: Batch) -> tuple[Tensor, Tensor]: ...
