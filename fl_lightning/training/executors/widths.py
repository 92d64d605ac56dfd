"""Widths of stacked passes on a CPU, and a test whether results are the same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

MOST_AT_ONCE = 128
"""Largest number of models in a pass on a CPU. On an EPYC a client and step of the digits' MLP
takes 44 us in a pass of 10, 23 in one of 32, 16 in one of 128 and 23 in one of 256."""
WIDTHS = (4, 8, 12, 16, 32, 48, 64, 80, 96, 112, MOST_AT_ONCE)
"""Possible numbers of slots in a pass on a CPU: as clients run out of batches, passes become
narrower. An empty slot costs as much as one that trains: ten seeds of ten clients use 107,600
slots, and without the widths 48, 80, 96 and 112 they would use 136,400."""


def pass_width(count: int) -> int:
    """Return the smallest width of a CPU's pass for `count` models; for too many, the largest."""
    return next((width for width in WIDTHS if width >= count), WIDTHS[-1])


def add_noise(
    rows: Tensor,
    size: float,
    draws: torch.Generator,
) -> Tensor:
    """Return a copy of `rows` (width, ...) with normal noise of standard deviation `size` on all
    but the first row."""
    rows = rows.clone()
    noise = torch.randn(rows[1:].shape, generator=draws)
    rows[1:] += noise.mul_(size).to(rows.dtype)
    return rows


def same_bits_at_all_widths(
    rows: Tensor,
    x: Tensor,
    y: Tensor,
    run: Callable[[int, Tensor, Tensor], Sequence[Tensor]],
) -> bool:
    """Test whether a model's results are bit-identical at each of the `WIDTHS` and in each slot, on
    different models in random order.

    Args:
        rows: the stack's memory (width, D) with a model in each row; overwritten by noisy copies.
        x, y: a batch without noise.
        run: called as run(k, x, y), runs a step of the first k rows on their batches x (k, ...) and
            y (k, ...), and returns its results (k, ...).
    """
    draws = torch.Generator().manual_seed(0)
    models = len(rows)
    first: Tensor | None = None  # each model's first results
    noisy_rows = add_noise(rows, 0.1, draws)
    labels = y.expand(models, *y.shape)
    images = x.expand(models, *x.shape)
    if images.is_floating_point():
        images = add_noise(images, 1.0, draws)
    for size in WIDTHS:
        if size > models:
            break
        for order in torch.randperm(models, generator=draws).split(size):
            if len(order) < size:
                continue
            rows[:size] = noisy_rows[order]
            parts = run(size, images[order], labels[order])
            results = torch.cat([part.reshape(size, -1) for part in parts], 1)
            if first is None:
                first = results.new_full((models, results.shape[1]), torch.nan)
            before = first[order]
            if not bool((before.isnan() | (before == results)).all()):
                return False
            first[order] = results
    return True
