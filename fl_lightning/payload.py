"""What travels between a client and the server in one direction. A payload alone knows its bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from fl_lightning.layout import Layout

KINDS = ("parameters", "buffers", "statistics", "other")
"""What bytes are counted as. Papers print parameters alone; buffers are normalisation's running statistics, statistics
are numbers about a client's data or training, other is what a method exchanges beside models (prototypes,
predictions)."""


@dataclass
class Payload:
    """Blocks of a row, and further named tensors.

    A hook that changes numbers puts a new tensor in `row`: the old one may be shared with the server or with others.
    """

    layout: Layout
    row: Tensor
    """Row of shape (D,); only the blocks in `sent` mean anything."""
    sent: np.ndarray
    """Bool [B]: the blocks of the layout that travel."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    """Numbers about the client's data or training: class counts, losses."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Tensors beside the model: prototypes, predictions."""
    block_bytes: np.ndarray = field(init=False)
    """Int64 [B]: bytes of each block as it would travel. A hook that compresses puts a new array here."""

    def __post_init__(self) -> None:
        self.block_bytes = self.layout.block_bytes(self.row.element_size())

    @property
    def by_layer(self) -> np.ndarray:
        """Bytes by layer and kind, int64 (L + 1, 4) in the order of `KINDS`; last row: what is beside the model."""
        table = self.layout.bytes_by_layer(self.sent, self.block_bytes, len(KINDS)).copy()
        table[-1, 2:] = _bytes(self.statistics), _bytes(self.extra)
        return table

    @property
    def layers_sent(self) -> np.ndarray:
        """Bool [L]: layers whose own parameters travel, whatever becomes of the normalisation behind them."""
        return self.layout.layers_in(self.sent)


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())
