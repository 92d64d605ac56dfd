"""What travels between a client and the server in one direction. A payload alone knows its
bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from fl_lightning.core.layout import Layout
from fl_lightning.results.record import KINDS


@dataclass
class Payload:
    """Blocks of a model, and further vectors and named tensors.

    What changes numbers puts a new tensor in `vector`: the old one may be shared with the server or
    with others.
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
    """Int64 [B]: bytes of each block as it would travel. What compresses puts a new array here."""

    def __post_init__(self) -> None:
        self.block_bytes = self.layout.numbers * self.vector.element_size()

    def again(self) -> Payload:
        """A pristine copy, for retrying a visit."""
        beside: dict[str, Any] = {
            name: dict(getattr(self, name)) for name in ("vectors", "statistics", "extra")
        }
        further = {k: payload.again() for k, payload in self.further.items()}
        return replace(self, sent=self.sent.copy(), further=further, **beside)

    @property
    def by_layer(self) -> np.ndarray:
        """Bytes by layer and kind, int64 (L + 1, 4) in the order of `KINDS`; last row: what is
        beside the model."""
        table = self.layout.bytes_by_layer(self.sent, self.block_bytes, len(KINDS)).copy()
        for vector in self.vectors.values():
            item = self.layout.numbers * vector.element_size()
            table += self.layout.bytes_by_layer(self.layout.is_parameter, item, len(KINDS))
        if self.statistics or self.extra:
            table[-1, 2:] = _bytes(self.statistics), _bytes(self.extra)
        for payload in self.further.values():
            table += payload.by_layer
        return table

    @property
    def layers_sent(self) -> np.ndarray:
        """Bool [L]: layers whose own parameters travel, whatever becomes of the normalisation
        behind them."""
        layers = self.layout.layers_in(self.sent)
        for payload in self.further.values():
            layers = layers | payload.layers_sent
        return layers


Payloads = dict[int, Payload]
"""Payloads by client."""


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())
