"""A message between a client and the server in one direction, which counts its own bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from fl_lightning.core.layout import Layout


@dataclass
class Payload:
    """Blocks of a model, and further vectors and named tensors.

    A transform that changes numbers puts a new tensor in `vector`: the old one may be shared with
    the server or with other payloads.
    """

    layout: Layout
    vector: Tensor
    """The model, shape (D,); only the blocks in `sent` mean anything."""
    sent: np.ndarray
    """Bool [B]: the blocks of the layout that travel."""
    vectors: dict[str, Tensor] = field(default_factory=dict)
    """Vectors of other slots, (D,) each. All their parameters travel, and count as parameters."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    """Numbers about the client's data or training: class counts, losses."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Tensors beside the model: prototypes, predictions."""
    further: dict[int, Payload] = field(default_factory=dict)
    """Downloads: further models that travel with this one (by client, cluster, ...), each a payload
    of its own."""
    own_weights: np.ndarray | None = None
    """Float32 [L]: where the vector is a mix, the receiver's weight on itself in each layer. It
    does not travel."""
    block_bytes: np.ndarray = field(init=False)
    """Int64 [B]: bytes of each block as it would travel. Transforms that compress put a new array
    here."""

    def __post_init__(self) -> None:
        self.block_bytes = self.layout.numbers * self.vector.element_size()

    def again(self) -> Payload:
        """A copy with which to try a visit again: arrays and dicts of its own, bytes counted anew,
        and the same tensors, which nobody writes to."""
        return replace(
            self,
            sent=self.sent.copy(),
            vectors=dict(self.vectors),
            statistics=dict(self.statistics),
            extra=dict(self.extra),
            further={k: payload.again() for k, payload in self.further.items()},
        )

    @property
    def by_layer(self) -> np.ndarray:
        """Bytes by layer and kind, int64 (L + 1, 4) in the order of `KINDS`; last row: what is
        beside the model."""
        layout = self.layout
        table = layout.traffic(self.sent, self.block_bytes)[0].copy()
        for vector in self.vectors.values():
            block_bytes = layout.numbers * vector.element_size()
            table += layout.traffic(layout.is_parameter, block_bytes)[0]
        table[-1, 2:] = _bytes(self.statistics), _bytes(self.extra)
        for payload in self.further.values():
            table += payload.by_layer
        return table

    @property
    def layers_sent(self) -> np.ndarray:
        """Bool [L]: layers whose own parameters travel, with their normalisation or without."""
        _, layers = self.layout.traffic(self.sent, self.block_bytes)
        for payload in self.further.values():
            layers = layers | payload.layers_sent
        return layers


Payloads = dict[int, Payload]
"""Payloads by client."""


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
