"""Kernels that all executors share: proximal and linear terms, the direction of an SGD step, a
faster max-pooling.

Models are rows, (k, D): the loop has k = 1, `vmap` the number of models that it trains together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

Columns = tuple[int, int, "float | Tensor"]
"""Columns `start` to `stop` of the proximal term and *twice* their coefficient, a number or a
tensor (k, stop - start)."""


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of each row of `a` with that of `b`, (k,)."""
    if len(a) == 1:
        return a[0].dot(b[0]).unsqueeze(0)
    return (a * b).sum(1)


class Terms:
    """The objective's terms sum_j c_j (w_j - a_j)^2 + <l, w> of k models, and their gradient
    2 c (w - a) + l. In each step, call `value` and then `gradient`, which continues from the
    memory that `value` has written.

    Args:
        room: memory (k, D) that both calls overwrite and that holds the gradient at the end:
            allocating it in every step would cost more than the terms.
        anchor: a, (D,) or (k, D); None: no proximal term.
        linear: l, (D,) or (k, D); None: no linear term.
        columns: (start, stop, 2 c) of the columns where c is not 0; with a linear term also those
            of all other parameters, with 0.0.
    """

    def __init__(
        self,
        room: Tensor,
        anchor: Tensor | None,
        linear: Tensor | None,
        columns: Sequence[Columns],
    ) -> None:
        self.room = room
        self.anchor = anchor
        self.columns = columns
        self.linear = None if linear is None else linear.expand_as(room)
        self._parts = [(room[:, start:stop], twice) for start, stop, twice in columns]

    def narrow(self, k: int) -> Terms:
        """Return the terms of the first `k` rows, with the same memory."""
        columns = []
        for start, stop, twice in self.columns:
            if isinstance(twice, Tensor):
                twice = twice[:k]
            columns.append((start, stop, twice))
        anchor = None
        if self.anchor is not None:
            anchor = self.anchor[:k]
        linear = None
        if self.linear is not None:
            linear = self.linear[:k]
        return Terms(self.room[:k], anchor, linear, columns)

    def value(self, rows: Tensor) -> Tensor:
        """Return the terms' value for each model, shape (k,).

        Args:
            rows: the models w, (k, D).
        """
        if self.anchor is not None:
            # columns of the anchor without a coefficient are arbitrary; they are not used below
            torch.sub(rows, self.anchor, out=self.room)
        total = self.room.new_zeros(len(self.room))
        for part, twice in self._parts:
            if isinstance(twice, Tensor):
                total = torch.add(total, row_dots(part * twice, part), alpha=0.5)
            elif twice:
                total = torch.add(total, row_dots(part, part), alpha=0.5 * twice)
        if self.linear is None:
            return total
        return total + row_dots(self.linear, rows)

    def gradient(self) -> Tensor:
        """Return the terms' gradient at the models of the last call of `value`, (k, D). It must be
        called exactly once after that call, as it overwrites the memory which it reads."""
        for part, twice in self._parts:
            if isinstance(twice, Tensor) or twice:
                part.mul_(twice)
            else:
                part.zero_()  # its values may be infinite or NaN
        if self.linear is not None:
            self.room.add_(self.linear)
        return self.room


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Return the factor that clips gradients of this `norm` to `limit`, as `clip_grad_norm_`
    does."""
    return (limit / (norm + 1e-6)).clamp_max(1.0)


def direction(
    parameters: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    decay: float | Tensor,
    momentum: float,
    nesterov: bool,
) -> list[Tensor]:
    """Return the direction of an SGD step, w <- w - lr * direction, as in `torch.optim.SGD` without
    dampening.

    Args:
        parameters: w.
        gradients: gradients of the loss; not written to, as autograd may return one tensor for two
            parameters.
        momenta: momentum buffers of each parameter, 0 before the first step, updated in place;
            empty if `momentum` is 0.
        decay: weight decay, a number, or a tensor that broadcasts to each of `parameters`.
        momentum: the momentum factor.
        nesterov: whether to use Nesterov momentum.
    """
    if isinstance(decay, Tensor):
        pairs = zip(gradients, parameters, strict=True)
        gradients = [torch.addcmul(g, p, decay) for g, p in pairs]
    elif decay:
        gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
    if not momentum:
        return gradients
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, gradients)
    if nesterov:
        return list(torch._foreach_add(gradients, momenta, alpha=momentum))
    return momenta


CHANNELS = 8
"""Least number of channels for which `max_pool` uses `channels_last` (measured on one core: 0.7 to
0.2 of torch's time from 8 on, 1.5 to 2 times as long below)."""


def max_pool(pool: nn.MaxPool2d, x: Tensor) -> Tensor:
    """Run the forward pass of `pool`, faster than torch on the CPU, with the same results and
    gradients bit for bit.

    Torch searches the positions of maxima pixel by pixel. Without gradients these are not needed,
    and maxima of shifted images take a tenth of the time. With gradients, torch's kernel for
    `channels_last` takes a quarter.
    """
    fast = (
        x.ndim == 4
        and x.is_contiguous()
        and x.device.type == "cpu"
        and not (pool.return_indices or pool.ceil_mode)
    )
    window, step = _pair(pool.kernel_size), _pair(pool.stride)
    padding, dilation = _pair(pool.padding), _pair(pool.dilation)
    if fast and torch.is_grad_enabled():
        stacked = torch._C._are_functorch_transforms_active()
        if x.requires_grad and not stacked and x.shape[1] >= CHANNELS:
            maxima: Tensor = MaxPool.apply(x, (window, step, padding, dilation))
            return maxima
    elif fast and padding == (0, 0) and dilation == (1, 1):
        heights = _shifts(x.shape[2], window[0], step[0])
        widths = _shifts(x.shape[3], window[1], step[1])
        # torch reports an image that is smaller than the window
        if x.shape[2] >= window[0] and x.shape[3] >= window[1]:
            shifted = []
            for height in heights:
                shifted += [x[:, :, height, width] for width in widths]
            return reduce(torch.maximum, shifted).contiguous()
    return nn.MaxPool2d.forward(pool, x)  # type: ignore[no-any-return]


def _shifts(
    size: int,
    window: int,
    step: int,
) -> list[slice]:
    """Return, along one dimension, the pixels at each position within the pooling windows."""
    return [slice(k, size - window + k + 1, step) for k in range(window)]


class MaxPool(torch.autograd.Function):
    """Max-pooling of contiguous images whose forward pass runs in `channels_last`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        how: tuple[tuple[int, int], ...],
    ) -> Tensor:
        """Return the maxima of `x` (b, channels, height, width).

        Args:
            how: window, step, padding and dilation.
        """
        last = x.contiguous(memory_format=torch.channels_last)
        maxima, places = torch.ops.aten.max_pool2d_with_indices(last, *how)
        ctx.save_for_backward(x, places.contiguous())
        ctx.how = how
        return maxima.contiguous()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        """Run torch's backward pass with the stored positions of maxima."""
        x, places = ctx.saved_tensors
        backward = torch.ops.aten.max_pool2d_with_indices_backward
        return backward(
            grad_outputs[0],
            x,
            *ctx.how,
            False,
            places,
        ), None
