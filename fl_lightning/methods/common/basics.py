"""Small helpers of several methods: checks of the model, wide floats, norms, packed masks."""

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.configuration.config import check
from fl_lightning.core import RunContext
from fl_lightning.models import has_own_step


def check_batches(run: RunContext, **sizes: int) -> None:
    """Raise `BadInput` if a batch size of 1 would make a network with BatchNorm train on single
    samples.

    Args:
        run: whose networks are checked.
        sizes: the method's arguments, by name, that limit the number of samples in a batch.
    """
    normalised = any(group.whole_last for group in run.groups)
    for name, size in sizes.items():
        check(
            f"method.{name}",
            size,
            size > 1 or not normalised,
            "BatchNorm cannot train on single samples; set it to 2 or more",
        )


def check_plain_loss(model: nn.Module, why: str) -> None:
    """Raise `BadInput` if the network defines `training_step`, which the method would bypass.

    Args:
        model: the user's network.
        why: the reason, which begins the message.
    """
    check(
        "model",
        type(model).__name__,
        not has_own_step(model),
        f"{why} and would bypass the model's training_step; use a model without one",
    )


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return `dtype`, or float32 if `dtype` has fewer bits."""
    return torch.promote_types(dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """Return `x` in float32 or wider."""
    return x.to(wide_type(x.dtype))


def norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norms (k,) of rows (k, d). The gradient at 0 is 0, not infinite."""
    squares = rows.square().sum(1)
    return torch.where(squares > 0, squares.clamp_min(1e-30).sqrt(), squares)


def packed(mask: Tensor) -> Tensor:
    """Pack a mask (D,) into bits, eight to a byte: uint8 (ceil(D / 8),), on the CPU."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy()))


def unpacked(bits: Tensor, size: int) -> Tensor:
    """Return the mask (size,) that `packed` has packed into `bits`."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=size)).bool()
