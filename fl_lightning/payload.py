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

    def _bytes(self, mask: np.ndarray) -> int:
        return int(self.layout.numbers[mask].sum()) * self.row.element_size()
