"""The vote of the nearest samples in feature space (kNN-Per: Marfoq et al., ICML 2022)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fl_lightning.methods.common.basics import wide

Kernel = Literal["gaussian", "exponential"]
"""Of the distance delta of features of width d: exp(-delta^2 / (d s)), or exp(-delta / s)."""


def vote(
    z: Tensor, known: Tensor, labels: Tensor, classes: int, k: int, scale: float, kernel: Kernel
) -> Tensor:
    """Shares of classes among the k known samples nearest to each feature, weighted by the kernel.

    Args:
        z: features (m, d).
        known: features (n, d) of the samples that vote, n at least 1.
        labels: theirs (n,).
        classes: C.
        k: how many vote; all, where there are fewer.
        scale: s of the kernel.
        kernel: which.

    Returns:
        Shape (m, C), rows summing to 1, also where all weights would underflow.
    """
    exact = "donot_use_mm_for_euclid_dist"  # the other way is off by rounding where distances are 0
    near = torch.cdist(wide(z), wide(known), compute_mode=exact).topk(
        min(k, len(known)), largest=False
    )
    energy = (
        near.values.square() / (z.shape[1] * scale) if kernel == "gaussian" else near.values / scale
    )
    shares = energy.new_zeros(len(z), classes)
    return shares.scatter_add_(1, labels[near.indices], (-energy).softmax(1))
