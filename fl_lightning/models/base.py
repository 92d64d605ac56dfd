"""Parts of our own networks, and made-up inputs of the right shape."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.configuration.components import Text
from fl_lightning.configuration.config import check


def inputs(
    n: int,
    shape: Sequence[int],
    text: Text | None,
    draws: torch.Generator | None = None,
) -> Tensor:
    """Return `n` made-up samples: token numbers [n, T] for `text`, else numbers [n, ...]; random
    ones from `draws`, without it zeros."""
    if text is None:
        return torch.zeros(n, *shape) if draws is None else torch.randn(n, *shape, generator=draws)
    if draws is None:
        return torch.zeros(n, *shape, dtype=torch.int64)
    return torch.randint(text.vocabulary, (n, *shape), generator=draws)


def targets(
    n: int,
    shape: Sequence[int],
    classes: int,
    text: Text | None,
    *,
    floats: bool = False,
) -> Tensor:
    """Return made-up class numbers, [n], or [n, T] if each position has one; with `floats`, targets
    of a regression."""
    positions = tuple(shape) if text is not None and text.per_position else ()
    labels = torch.arange(n).reshape(n, *[1] * len(positions))
    labels = labels.expand(n, *positions) % classes
    return labels.float() if floats else labels.contiguous()


def check_sizes(name: str, *sizes: int) -> None:
    """Raise `BadInput` for the argument `name` of a model unless all its `sizes` are above 0. A
    layer of width 0 would pass nothing on, and the model would only learn how frequent classes
    are."""
    are_positive = min(sizes, default=1) >= 1
    check(f"model.init_args.{name}", list(sizes), are_positive, "each must be at least 1")


def check_heads(heads: int, width: int) -> None:
    """Raise `BadInput` unless attention of that `width` can be divided among its `heads`."""
    check_sizes("width", width)
    valid = heads >= 1 and width % heads == 0
    check("model.heads", heads, valid, f"the width {width} must be a multiple of it")


class SelfAttention(nn.Module):
    """Multi-head self-attention, with a linear layer each for queries, keys, values and output.

    torch's own keeps the first three in one matrix, which leaves no place for an adapter of each.
    This class can replace it in torchvision's encoders. Weights begin as in torch's.

    Args:
        width: d of the sequence; a multiple of `heads`.
        causal: positions do not see those behind them.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        # torch draws these three from one matrix (3 width, width), by Xavier's rule
        bound = (6 / (4 * width)) ** 0.5
        for part in (self.query, self.key, self.value):
            nn.init.uniform_(part.weight, -bound, bound)
        for part in (self.query, self.key, self.value, self.out):
            nn.init.zeros_(part.bias)

    def attended(self, x: Tensor) -> Tensor:
        """Return the sequence [b, T, width] after attention, of the same shape."""
        parts = (self.query(x), self.key(x), self.value(x))
        by_head = [part.unflatten(-1, (self.heads, -1)) for part in parts]
        q, k, v = (part.transpose(-2, -3) for part in by_head)
        # without torch's fused kernel, which `vmap` cannot stack on a CPU
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if self.causal:
            place = torch.arange(x.shape[-2], device=x.device)
            scores = scores.masked_fill(place > place[:, None], -torch.inf)
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(-2, -3).flatten(-2))

    def forward(self, x: Tensor, *same: Any, **options: Any) -> tuple[Tensor, None]:
        """Return the sequence after attention, and None in place of attention weights.

        Arguments and result are those of torch's `MultiheadAttention`, whose place this module can
        take.

        Args:
            x: the sequence.
            *same: the same sequence again, as keys and as values; not read.
            **options: further options of `MultiheadAttention`; not read.
        """
        return self.attended(x), None
