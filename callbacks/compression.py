"""Compression of messages by fewer bits: quantisation and sparsification.

Both encode the difference from the server's last copy of the client's model, which client and
server share (the client knows what it has sent). So a small change costs a small error, and the
next difference holds what one round left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callbacks.base import Transform
from fl_lightning.configuration.ranges import PositiveShare
from fl_lightning.core import Client, Payload, RunContext
from fl_lightning.foundation.device import to_device
from fl_lightning.foundation.errors import BadInput


def quantised(
    x: Tensor,
    bits: int,
    draws: torch.Generator,
) -> Tensor:
    """Return `x` on a grid of 2^bits - 1 even levels around 0, rounded at random so that the mean
    is `x` (unbiased).

    QSGD's idea (Alistarh et al., NeurIPS 2017) with the largest magnitude as scale. Zeros stay
    zeros.
    """
    scale = x.abs().max() / (2 ** (bits - 1) - 1)
    level = x / scale.clamp_min(torch.finfo(x.dtype).tiny)
    floor = level.floor()
    up = to_device(torch.rand(x.shape, generator=draws).to(x.dtype), x.device) < level - floor
    return (floor + up) * scale


def largest(x: Tensor, count: int) -> Tensor:
    """Return `x` with all but its `count` entries of largest magnitude set to 0."""
    places = x.abs().topk(count).indices
    return torch.zeros_like(x).index_copy_(0, places, x[places])


@dataclass
class Quantize(Transform):
    """Send 8- or 16-bit integers and one scale for each tensor instead of 32-bit floats (unbiased).

    Running statistics are sent unquantised: a step of the grid can be greater than a small
    variance, or bring it below 0.

    Args:
        bits: 8 or 16. 8: a quarter of the bytes.
        direction: which messages are quantised.
    """

    changes_download = changes_upload = True

    bits: Literal[8, 16] = 8
    direction: Literal["both", "upload", "download"] = "both"

    def on_download(
        self,
        client: Client,
        payload: Payload,
    ) -> None:
        """Quantise what the client receives."""
        if self.direction != "upload":
            self._quantise(client, payload, "quantize download")

    def on_upload(
        self,
        client: Client,
        payload: Payload,
    ) -> None:
        """Quantise what the server receives."""
        if self.direction != "download":
            self._quantise(client, payload, "quantize upload")

    def _quantise(
        self,
        client: Client,
        payload: Payload,
        purpose: str,
    ) -> None:
        layout = payload.layout
        size = payload.vector.element_size()
        draws = client.generator(purpose)
        coded = payload.sent & layout.is_parameter
        client.flops += 9 * int(layout.sizes[coded].sum())
        code = partial(quantised, bits=self.bits, draws=draws)
        payload.vector = _with_coded_changes(client, payload, coded, code)
        bits = np.where(layout.is_parameter, self.bits, 8 * size)
        payload.block_bytes = layout.sizes * bits // 8 + size * layout.is_parameter


@dataclass
class TopK(Transform):
    """Upload only the largest differences from the server's copy, each with its position; later
    rounds send the rest.

    What was left out stays in the next difference: error feedback in the sense of Stich,
    Cordonnier, Jaggi (Sparsified SGD with Memory, NeurIPS 2018), on models instead of gradients.

    Args:
        share: share of each tensor's numbers that is sent (at least one number). 0.1: with 4-byte
            positions a fifth of the bytes.
    """

    changes_upload = True

    share: PositiveShare = 0.1

    def on_fit_start(self, run: RunContext) -> None:
        """Raise `BadInput` if the run also has `quantize`: each of the two counts a message's bytes
        as if the other did not change them."""
        super().on_fit_start(run)
        if any(isinstance(c, Quantize) for c in run.callbacks):
            raise BadInput("callbacks.topk", ..., "it cannot run with quantize; keep one of them")

    def on_upload(
        self,
        client: Client,
        payload: Payload,
    ) -> None:
        """Keep the largest changes and set the others to 0."""
        # differences, magnitudes and sums
        client.flops += 3 * int(payload.layout.sizes[payload.sent].sum())
        payload.vector = _with_coded_changes(
            client,
            payload,
            payload.sent,
            self._largest,
        )
        counts = np.array([self._count(b.size) for b in payload.layout.blocks], dtype=np.int64)
        payload.block_bytes = counts * (payload.vector.element_size() + 4)

    def _count(self, size: int) -> int:
        return min(size, max(1, round(self.share * size)))

    def _largest(self, change: Tensor) -> Tensor:
        return largest(change, self._count(len(change)))


def _with_coded_changes(
    client: Client,
    payload: Payload,
    blocks: np.ndarray,
    code: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the payload's vector (D,) in which `blocks` (bool [B]) hold the server's last copy of
    the client plus the coded difference from it."""
    last_copy = client.state.received["model"]
    vector = payload.vector.clone()
    for block, is_coded in zip(payload.layout.blocks, blocks, strict=True):
        if is_coded and block.size:
            columns = block.columns
            reference = last_copy[columns]
            vector[columns] = reference + code(vector[columns] - reference)
    return vector
