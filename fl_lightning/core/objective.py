"""The objective of a phase of local training: task loss + sum_b c_b ||w_b - anchor_b||^2 + <linear, w>."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from fl_lightning.core.layout import Layout
from fl_lightning.renames import keyword

if TYPE_CHECKING:
    from fl_lightning.core.protocols import Module


@keyword("pull", "proximal_weight")
@dataclass(frozen=True, eq=False)
class Objective:
    """Task loss (or `loss`) + sum over blocks b of c_b ||w_b - anchor_b||^2 + <linear, w>, c the `proximal_weight`.

    Raises:
        ValueError: an anchor without a proximal weight, or the other way round.
    """

    anchor: Tensor | None = None
    """(D,); only its blocks of a proximal weight above 0 count."""
    proximal_weight: np.ndarray | None = None
    """float64 [B]: a coefficient for each block of the layout; 0 where nothing was received, and for buffers."""
    linear: Tensor | None = None
    """(D,); only parameters count. SCAFFOLD: c - c_i (Karimireddy et al., 2020, Eq. 3)."""
    loss: Callable[[Module, tuple[Tensor, Tensor]], Tensor] | None = None
    """(client module, batch) -> loss of shape (), in place of the task loss. The loop executor trains such a client."""

    def __post_init__(self) -> None:
        if (self.anchor is None) != (self.proximal_weight is None):
            raise ValueError("a proximal weight needs an anchor, and an anchor a proximal weight")

    @property
    def pulls(self) -> bool:
        """Whether there is a quadratic term."""
        return self.proximal_weight is not None and bool(self.proximal_weight.any())

    def pulled_numbers(self, layout: Layout) -> int:
        """Numbers of the model in the proximal term."""
        return 0 if self.proximal_weight is None else int(layout.numbers[self.proximal_weight != 0].sum())

    def columns(self, layout: Layout) -> list[tuple[int, int, float]]:
        """Columns of the proximal term, neighbours of one coefficient joined, with twice their coefficient."""
        if self.proximal_weight is None:
            return []
        terms = []
        for c in np.unique(self.proximal_weight[self.proximal_weight != 0]).tolist():
            terms += [(s.start, s.stop, 2 * c) for s in layout.segments(self.proximal_weight == c)]
        return terms
