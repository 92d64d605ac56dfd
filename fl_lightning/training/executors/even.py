"""Widths of stacked passes on a CPU, and whether a model's numbers are the same in all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

MOST_AT_ONCE = 128
"""Models of one pass on a CPU. On an EPYC a client and step of the digits' MLP takes 44 us in a
pass of 10, 23 in one of 32, 16 in one of 128 and 23 in one of 256."""
WIDTHS = (4, 8, 12, 16, 32, 48, 64, 80, 96, 112, MOST_AT_ONCE)
"""Shapes of a pass on a CPU: as clients run out of batches, passes become narrower. An empty slot
costs as much as one that trains: without 48, 80, 96 and 112, ten seeds of ten clients step through
136,400 slots, and so through 107,600."""


def widened(count: int) -> int:
    """The width of a CPU's pass for so many models, or of the widest pass."""
    return next((width for width in WIDTHS if width >= count), WIDTHS[-1])


def unlike_each_other(
    rows: Tensor,
    size: float,
    draws: torch.Generator,
) -> Tensor:
    """A copy of `rows` (width, ...) with noise of this size on all but the first."""
    rows = rows.clone()
    noise = torch.randn(rows[1:].shape, generator=draws)
    rows[1:] += noise.mul_(size).to(rows.dtype)
    return rows


def even(
    rows: Tensor,
    x: Tensor,
    y: Tensor,
    run: Callable[[int, Tensor, Tensor], Sequence[Tensor]],
) -> bool:
    """Whether a model's results have the same bits at all `WIDTHS`, and in all slots: tried on
    several unlike models in random order.

    Args:
        rows: of a stack, (width, D), each a model; written over by copies of them with noise.
        x, y: a batch; each model gets one like it with noise.
        run: (so many of the first rows, x (so many, ...), y (so many, ...)) -> results
            (so many, ...).
    """
    draws = torch.Generator().manual_seed(0)
    models = len(rows)
    first: Tensor | None = None  # each model's first results
    unlike = unlike_each_other(rows, 0.1, draws)
    labels = y.expand(models, *y.shape)
    images = x.expand(models, *x.shape)
    if images.is_floating_point():
        images = unlike_each_other(images, 1.0, draws)
    for size in WIDTHS:
        if size > models:
            break
        for order in torch.randperm(models, generator=draws).split(size):
            if len(order) < size:
                continue
            rows[:size] = unlike[order]
            parts = run(size, images[order], labels[order])
            results = torch.cat([part.reshape(size, -1) for part in parts], 1)
            if first is None:
                first = results.new_full((models, results.shape[1]), torch.nan)
            before = first[order]
            if not bool((before.isnan() | (before == results)).all()):
                return False
            first[order] = results
    return True
