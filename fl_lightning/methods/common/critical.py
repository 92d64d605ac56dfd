"""Masks of a model's critical numbers, a bit each, and how far they overlap (FedCAC: Wu et al.,
ICCV 2023)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core import Layout

ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.uint8)
"""Of each byte, how many of its bits are 1."""


def critical(layout: Layout, importance: Tensor, share: float) -> Tensor:
    """The numbers of greatest `importance` (D,), int(share n) of the n in each parameter: a mask
    (D,)."""
    mask = torch.zeros(layout.size, dtype=torch.bool, device=importance.device)
    for block in layout.blocks:
        if block.kind == "parameter":
            top = importance[block.start : block.stop].topk(int(share * block.size)).indices
            mask[block.start + top] = True
    return mask


def packed(mask: Tensor) -> Tensor:
    """`mask` (D,) with eight numbers to a byte: uint8 (ceil(D / 8),), on the CPU."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy()))


def unpacked(bits: Tensor, size: int) -> Tensor:
    """The mask (size,) that was `packed`."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=size)).bool()


def overlaps(masks: Tensor) -> Tensor:
    """O_ij = 1 - |M_i - M_j| / (2 |M_i|), float64 (m, m), of packed masks (m, bytes); an empty mask
    overlaps none."""
    bits = masks.numpy()
    apart = torch.from_numpy(np.stack([ONES[row ^ bits].sum(1, dtype=np.int64) for row in bits]))
    own = torch.from_numpy(ONES[bits].sum(1, dtype=np.int64))[:, None]
    return torch.where(own > 0, 1 - apart / (2 * own.clamp_min(1)), 0.0).double()


def alike(overlap: Tensor, progress: float) -> Tensor:
    """Rows (m, m), sums 1: the plain mean of oneself and of those j with O_ij >= mean + progress
    (max - mean).

    Mean and maximum are over all pairs of different clients. Where all overlaps are equal, all are
    alike.
    """
    others = ~torch.eye(len(overlap), dtype=torch.bool)
    if len(overlap) == 1:
        return torch.ones_like(overlap)
    most = overlap[others].max()
    # rounding may lift the mean of equal numbers above them
    mean = overlap[others].mean().clamp_max(most)
    friends = ((overlap >= mean + progress * (most - mean)) | ~others).double()
    return friends / friends.sum(1, keepdim=True)
