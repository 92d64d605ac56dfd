"""The interface of the rank's module, which holds the bound client's model, for methods and
losses."""

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
    """The attributes of `training.module.ClientModule` that methods and losses use."""

    model: Any
    """The network, with the modules that a method's `build` has added."""
    layout: Layout
    binding: Binding
    metric: Metric
    num_classes: int
    cast: Callable[[], AbstractContextManager[Any]]

    @property
    def head(self) -> Any:
        """The classifier module."""

    @property
    def features(self) -> Tensor:
        """The classifier's input in the last pass, (n, d)."""

    def task_loss(self, batch: Batch, batch_idx: int | None = None) -> Tensor:
        """Return the task loss of the bound model on a batch, shape ().

        Args:
            batch_idx: number of the batch for a user's `training_step`; None: that of the current
                local step.
        """

    def mean_loss(self, part: Part, batch_size: int) -> Tensor:
        """Return the mean task loss of the bound model on `part`, shape ()."""

    def outputs_at(self, vector: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features (n, d) and class scores (n, classes) of `x` by the model `vector` (D,),
        without binding it."""

    def flat_gradient(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the task loss of the bound model on a batch, shape (), and its gradient (D,)."""
