"""The objective of a phase of local training: task loss + sum_b c_b ||w_b - anchor_b||^2 + <linear,
w>."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fl_lightning.core.layout import Layout
from fl_lightning.core.module import Batch, Module

Tensors = dict[str, Tensor]
"""Tensors by name."""


@dataclass(frozen=True, eq=False)
class PureLoss:
    """A local loss that depends only on the bound model, a batch and a client's `tensors`, without
    side effects.

    Executors may then run it for many clients at once, if `torch.func` can (no random numbers, no
    branch on numbers, no tensor whose shape depends on numbers); else it runs in the loop. Values
    that differ by client must be in `tensors`.

    Args:
        function: (tensors, client module, batch) -> loss of shape (): a module-level function, or a
            bound method of a dataclass. Clients whose functions are equal train together.
        tensors: of the client, by name; constant.
        flops: operations for each sample, forward and backward, beside passes of the model.

    Raises:
        ValueError: the function is made anew for each client.
    """

    function: Callable[[Tensors, Module, Batch], Tensor]
    tensors: Tensors = field(default_factory=dict)
    flops: float = 0.0

    def __post_init__(self) -> None:
        function = self.function
        if inspect.ismethod(function):
            return
        if not inspect.isfunction(function) or function.__closure__ is not None:
            raise ValueError(
                "PureLoss.function must be a module-level function or a method, and no closure or "
                "partial: pass what differs by client in `tensors`"
            )

    def __call__(self, module: Module, batch: Batch) -> Tensor:
        """The loss of the bound model, shape ()."""
        return self.function(self.tensors, module, batch)


@dataclass(frozen=True, eq=False)
class Objective:
    """Task loss (or `loss`) + sum over blocks b of c_b ||w_b - anchor_b||^2 + <linear, w>, c the
    `proximal_weight`.

    Raises:
        ValueError: an anchor without a proximal weight, or the other way round.
    """

    anchor: Tensor | None = None
    """(D,); only blocks with a proximal weight above 0 are used."""
    proximal_weight: np.ndarray | None = None
    """float64 [B]: a coefficient for each block of the layout; 0 where nothing was received, and
    for buffers."""
    linear: Tensor | None = None
    """(D,); only parameters count. SCAFFOLD: c - c_i (Karimireddy et al., 2020, Eq. 3)."""
    loss: Callable[[Module, Batch], Tensor] | None = None
    """(client module, batch) -> loss of shape (), in place of the task loss. A `PureLoss` may be
    stacked; a client with any other trains in the loop."""

    def __post_init__(self) -> None:
        if (self.anchor is None) != (self.proximal_weight is None):
            raise ValueError("a proximal weight needs an anchor, and an anchor a proximal weight")

    @property
    def pulls(self) -> bool:
        """Whether there is a quadratic term."""
        return self.proximal_weight is not None and bool(self.proximal_weight.any())

    def proximal_numbers(self, layout: Layout) -> int:
        """Numbers of the model in the proximal term."""
        if self.proximal_weight is None:
            return 0
        return int(layout.numbers[self.proximal_weight != 0].sum())

    def columns(self, layout: Layout) -> list[tuple[int, int, float]]:
        """(start, stop, twice the coefficient) of the proximal term's columns, neighbours of one
        coefficient joined."""
        weight = self.proximal_weight
        if weight is None:
            return []
        columns = []
        for c in np.unique(weight[weight != 0]).tolist():
            segments = layout.segments(weight == c)
            columns += [(s.start, s.stop, 2 * c) for s in segments]
        return columns
