"""What every executor computes alike: the terms beside the loss, the direction of an SGD step, and a faster pooling.

Rows lie side by side, (k, D): the loop has k = 1, `vmap` as many as it trains at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

Columns = tuple[int, int, "float | Tensor"]
"""Columns `start` to `stop`, and *twice* their coefficient: one number, or a tensor (k, stop - start)."""


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of the rows of `a` and `b`, (k,)."""
    return a[0].dot(b[0]).unsqueeze(0) if len(a) == 1 else (a * b).sum(1)


class Terms:
    """sum_j c_j (w_j - a_j)^2 + <l, w> for rows w (k, D): its value, and then its gradient 2 c (w - a) + l.

    Args:
        room: (k, D), written over by each call: to get so much memory anew in every step costs more than the term.
        anchor: a, (D,) or (k, D); None: no quadratic term.
        linear: l, (D,) or (k, D); None: no linear term.
        columns: where c is not 0; with a linear term, all columns that are looked at (the others with 0.0).
    """

    def __init__(self, room: Tensor, anchor: Tensor | None, linear: Tensor | None, columns: Sequence[Columns]) -> None:
        self.room, self.anchor = room, anchor
        self.linear = None if linear is None else linear.expand_as(room)
        self._parts = [(room[:, start:stop], twice) for start, stop, twice in columns]

    def value(self, rows: Tensor) -> Tensor:
        """Of each of the `rows` (k, D), shape (k,)."""
        if self.anchor is not None:
            torch.sub(rows, self.anchor, out=self.room)  # beyond the columns it means nothing, and is not used
        total = self.room.new_zeros(len(self.room))
        for part, twice in self._parts:
            if isinstance(twice, Tensor):
                total = torch.add(total, row_dots(part * twice, part), alpha=0.5)
            elif twice:
                total = torch.add(total, row_dots(part, part), alpha=0.5 * twice)
        return total if self.linear is None else total + row_dots(self.linear, rows)

    def gradient(self, factor: Tensor | None = None) -> Tensor:
        """`factor` (shape (); None: 1) times the gradient where `value` was taken last, (k, D): once for each value."""
        for part, twice in self._parts:
            if isinstance(twice, Tensor) or twice:
                part.mul_(twice if factor is None else twice * factor)
            else:
                part.zero_()  # what it held need not be finite
        if self.linear is not None:
            self.room.add_(self.linear if factor is None else self.linear * factor)
        return self.room


class TermsLoss(torch.autograd.Function):
    """`terms` of `row` as one number, whose gradient reaches the parameters as views of one flat tensor.

    The parameters lie in `row`, so neither the value nor the gradient needs a loop over them. `places`: the columns of
    each parameter, of no width where nothing reaches it.
    """

    @staticmethod
    def forward(ctx: Any, row: Tensor, terms: Terms, places: list[tuple[int, int]], *parameters: Tensor) -> Tensor:
        """The value, shape ()."""
        ctx.terms, ctx.places = terms, places
        ctx.shapes = [p.shape for p in parameters]
        return terms.value(row[None, : terms.room.shape[1]]).squeeze(0)

    @staticmethod
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """In place: a term has one backward pass."""
        gradient = ctx.terms.gradient(grad_outputs[0])[0]  # type: ignore[attr-defined]
        parts = [
            gradient[a:b].view(shape) if b > a else None
            for (a, b), shape in zip(ctx.places, ctx.shapes, strict=True)  # type: ignore[attr-defined]
        ]
        return (None, None, None, *parts)


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What gradients of this `norm` are multiplied by, so that it is at most `limit` (as `clip_grad_norm_`)."""
    return (limit / (norm + 1e-6)).clamp_max(1.0)


def direction(
    parameters: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    decay: float | Tensor,
    momentum: float,
    nesterov: bool,
) -> list[Tensor]:
    """What a step of SGD goes down: w <- w - lr * direction (`torch.optim.SGD` without dampening).

    Args:
        parameters: w.
        gradients: of the loss; not written to (autograd may give one tensor to two parameters).
        momenta: one for each parameter, 0 before the first step, written to; empty with `momentum` 0.
        decay: weight decay, one number, or a tensor that goes with each of `parameters`.
        momentum: its factor.
        nesterov: Nesterov's form of momentum.
    """
    if isinstance(decay, Tensor):
        gradients = [torch.addcmul(g, p, decay) for g, p in zip(gradients, parameters, strict=True)]
    elif decay:
        gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
    if not momentum:
        return gradients
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, gradients)
    return list(torch._foreach_add(gradients, momenta, alpha=momentum)) if nesterov else momenta


def max_pool(pool: nn.MaxPool2d, x: Tensor) -> Tensor:
    """The forward pass of `pool`: without gradients on the CPU as maxima of shifted images.

    The numbers are torch's. Torch also looks for the places of the maxima, and takes ten times as long.
    """
    if torch.is_grad_enabled() or x.ndim != 4 or not (x.is_contiguous() and x.device.type == "cpu"):
        return nn.MaxPool2d.forward(pool, x)  # type: ignore[no-any-return]
    (rows, columns), (down, right) = (_pair(size) for size in (pool.kernel_size, pool.stride))
    plain = _pair(pool.padding) == (0, 0) and _pair(pool.dilation) == (1, 1)
    fits = x.shape[2] >= rows and x.shape[3] >= columns
    if pool.return_indices or pool.ceil_mode or not (plain and fits):
        return nn.MaxPool2d.forward(pool, x)  # type: ignore[no-any-return]
    heights, widths = (
        [slice(k, size - window + k + 1, step) for k in range(window)]
        for size, window, step in ((x.shape[2], rows, down), (x.shape[3], columns, right))
    )
    first, *others = (x[:, :, height, width] for height in heights for width in widths)
    return reduce(torch.maximum, others, first).contiguous()


def _pair(size: int | tuple[int, ...]) -> tuple[int, ...]:
    return size if isinstance(size, tuple) else (size, size)
