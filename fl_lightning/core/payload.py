"""The message between a client and the server in one direction, which counts its bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from fl_lightning.core.layout import Layout


@dataclass
class Payload:
    """A download or an upload: blocks of a model, further vectors and named tensors.

    A transform that changes numbers assigns a new tensor to `vector`, as the server or other
    payloads may share the old one.
    """

    layout: Layout
    vector: Tensor
    """The model, shape (D,); only the blocks in `sent` are part of the message."""
    sent: np.ndarray
    """Bool [B]: mask of the blocks that are sent."""
    vectors: dict[str, Tensor] = field(default_factory=dict)
    """Vectors of other slots, (D,) each. All their parameters are sent, and count as parameters."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    """Numbers about the client's data or training: class counts, losses."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Further tensors, such as prototypes or predictions."""
    further: dict[int, Payload] = field(default_factory=dict)
    """Further models of a download, each with its own payload, by client, cluster or the like."""
    own_weights: np.ndarray | None = None
    """Float32 [L]: if the vector is a mix, the receiver's weight on itself in each layer; not
    sent."""
    block_bytes: np.ndarray = field(init=False)
    """Int64 [B]: bytes of each block in the message. Transforms that compress assign a new
    array."""

    def __post_init__(self) -> None:
        self.block_bytes = self.layout.sizes * self.vector.element_size()

    def duplicate(self) -> Payload:
        """Return a copy for a second attempt of a visit, with new arrays and dicts and bytes
        counted anew. It shares the tensors, to which nothing writes."""
        return replace(
            self,
            sent=self.sent.copy(),
            vectors=dict(self.vectors),
            statistics=dict(self.statistics),
            extra=dict(self.extra),
            further={k: payload.duplicate() for k, payload in self.further.items()},
        )

    @property
    def by_layer(self) -> np.ndarray:
        """Bytes by layer and kind, int64 (L + 1, 4), columns in the order of `KINDS`; the last row
        is of tensors outside of the model."""
        layout = self.layout
        table = layout.traffic(self.sent, self.block_bytes)[0].copy()
        for vector in self.vectors.values():
            block_bytes = layout.sizes * vector.element_size()
            table += layout.traffic(layout.is_parameter, block_bytes)[0]
        table[-1, 2:] = _bytes(self.statistics), _bytes(self.extra)
        for payload in self.further.values():
            table += payload.by_layer
        return table

    @property
    def layers_sent(self) -> np.ndarray:
        """Bool [L]: mask of the layers whose weights (`Layout.is_layer_weight`) are sent."""
        _, layers = self.layout.traffic(self.sent, self.block_bytes)
        for payload in self.further.values():
            layers = layers | payload.layers_sent
        return layers


Payloads = dict[int, Payload]
"""Payloads by client."""


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
