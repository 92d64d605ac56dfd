"""What methods have in common that exchange class means, predictions or the slope of a loss."""

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.configuration.config import check
from fl_lightning.core import RunContext
from fl_lightning.models import has_own_step


def check_batches(run: RunContext, **sizes: int) -> None:
    """Raise `BadInput` where an argument of the method would leave BatchNorm single samples to
    train on."""
    requirement = "BatchNorm cannot train on single samples: at least 2"
    normalised = any(group.whole_last for group in run.groups)
    for name, size in sizes.items():
        check(f"method.{name}", size, size > 1 or not normalised, requirement)


def check_plain_loss(model: nn.Module, why: str) -> None:
    """Raise `BadInput` where the network has a `training_step` of its own, which would not run:
    `why`."""
    requirement = f"{why}, and would pass its training_step by"
    check("model", type(model).__name__, not has_own_step(model), requirement)


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or float32 where that has more bits."""
    return torch.promote_types(dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """`x` in 32 bits at least."""
    return x.to(wide_type(x.dtype))


def norms(rows: Tensor) -> Tensor:
    """Euclidean norms (k,) of rows (k, d); the gradient at 0 is 0, not infinite."""
    squares = rows.square().sum(1)
    return torch.where(squares > 0, squares.clamp_min(1e-30).sqrt(), squares)


def packed(mask: Tensor) -> Tensor:
    """`mask` (D,) with eight numbers to a byte: uint8 (ceil(D / 8),), on the CPU."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy()))


def unpacked(bits: Tensor, size: int) -> Tensor:
    """The mask (size,) that was `packed`."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=size)).bool()
