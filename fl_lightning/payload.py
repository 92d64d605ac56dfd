"""What travels between a client and the server in one direction. A payload alone knows its bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fl_lightning.layout import Layout


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
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Tensors beside the model: prototypes, predictions, counts."""
    block_bytes: np.ndarray = field(init=False)
    """Int64 [B]: bytes of each block as it would travel. A hook that compresses puts a new array here."""

    def __post_init__(self) -> None:
        self.block_bytes = self.layout.numbers * self.row.element_size()

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters that travel: the figure that papers print."""
        return self._bytes(self.sent & self.layout.is_parameter)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that travel (BatchNorm's running statistics)."""
        return self._bytes(self.sent & ~self.layout.is_parameter)

    @property
    def extra_bytes(self) -> int:
        """Bytes of what travels beside the model."""
        return sum(t.numel() * t.element_size() for t in self.extra.values())

    @property
    def total_bytes(self) -> int:
        """All that travels."""
        return self.parameter_bytes + self.buffer_bytes + self.extra_bytes

    @property
    def by_layer(self) -> np.ndarray:
        """Bytes by layer and kind (parameters, buffers, other), int64 (L + 1, 3); last: what is beside the model."""
        table = np.zeros((len(self.layout.layers) + 1, 3), dtype=np.int64)
        np.add.at(table, (self.layout.layer_of, self.layout.kind_of), np.where(self.sent, self.block_bytes, 0))
        table[-1, 2] = self.extra_bytes
        return table

    def _bytes(self, mask: np.ndarray) -> int:
        return int(self.block_bytes[mask].sum())
