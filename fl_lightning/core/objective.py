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
    """A local loss without side effects that depends only on the bound model, a batch and the
    client's `tensors`.

    Executors may evaluate it for several clients in one pass if `torch.func` supports it (no random
    numbers, no branches and no shapes that depend on values); else clients train in the loop.

    Args:
        function: (tensors, client module, batch) -> loss of shape (): a module-level function, or a
            bound method of a dataclass. Clients with equal functions can train together.
        tensors: all values that differ between clients, by name; constant.
        flops: FLOPs for each sample, forward and backward, in addition to passes of the model.

    Raises:
        ValueError: the function is a closure or a `partial`, which is another object for each
            client.
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
                "PureLoss.function must be a module-level function or a method, not a closure or "
                "partial: pass values that differ between clients in `tensors`"
            )

    def __call__(self, module: Module, batch: Batch) -> Tensor:
        """Return the loss of the bound model, shape ()."""
        return self.function(self.tensors, module, batch)


@dataclass(frozen=True, eq=False)
class Objective:
    """The objective of a phase: task loss (or `loss`) + sum over blocks b of c_b ||w_b -
    anchor_b||^2 + <linear, w>, where c is `proximal_weight`.

    Raises:
        ValueError: only one of anchor and proximal weight is given.
    """

    anchor: Tensor | None = None
    """(D,); only blocks with a proximal weight above 0 are used."""
    proximal_weight: np.ndarray | None = None
    """float64 [B]: a coefficient for each block of the layout; 0 for buffers and for blocks that
    were not received."""
    linear: Tensor | None = None
    """(D,); only parameters count. SCAFFOLD: c - c_i (Karimireddy et al., 2020, Eq. 3)."""
    loss: Callable[[Module, Batch], Tensor] | None = None
    """(client module, batch) -> loss of shape (), in place of the task loss. Clients with a
    `PureLoss` may train in stacked passes; with any other function they train in the loop."""

    def __post_init__(self) -> None:
        if (self.anchor is None) != (self.proximal_weight is None):
            raise ValueError("a proximal weight needs an anchor, and an anchor a proximal weight")

    @property
    def has_proximal(self) -> bool:
        """Whether there is a proximal term."""
        return self.proximal_weight is not None and bool(self.proximal_weight.any())

    def proximal_numbers(self, layout: Layout) -> int:
        """Return the number of parameters in the proximal term."""
        weight = self.proximal_weight
        if weight is None:
            return 0
        return int(layout.sizes[weight != 0].sum())

    def columns(self, layout: Layout) -> list[tuple[int, int, float]]:
        """Return the proximal term's columns as (start, stop, twice the coefficient). Neighbouring
        blocks with equal coefficients are joined."""
        weight = self.proximal_weight
        if weight is None:
            return []
        columns = []
        for c in np.unique(weight[weight != 0]).tolist():
            segments = layout.segments(weight == c)
            columns += [(s.start, s.stop, 2 * c) for s in segments]
        return columns
