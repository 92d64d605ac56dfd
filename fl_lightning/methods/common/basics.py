"""What methods have in common that exchange class means, predictions or the slope of a loss."""

import numpy as np
import torch
from lightning import LightningModule
from torch import Tensor, nn

from fl_lightning.configuration.config import check
from fl_lightning.core import RunContext
from fl_lightning.foundation.errors import BadInput


def check_classes(run: RunContext) -> None:
    """Raise `BadInput` for a regression: it has no classes to exchange anything of."""
    if run.data.task == "regression":
        what = f"{run.method_name} exchanges what it knows of classes, and a regression has none"
        raise BadInput("data.task", run.data.task, what)


def check_batches(run: RunContext, **sizes: int) -> None:
    """Raise `BadInput` where an argument of the method would leave BatchNorm single samples to
    train on."""
    for name, size in sizes.items():
        single = size == 1 and any(group.whole_last for group in run.groups)
        check(
            f"method.{name}",
            size,
            not single,
            "BatchNorm cannot train on single samples: at least 2",
        )


def check_plain_loss(model: nn.Module, why: str) -> None:
    """Raise `BadInput` where the network has a `training_step` of its own, which would not run:
    `why`."""
    if getattr(type(model), "training_step", None) not in (None, LightningModule.training_step):
        raise BadInput("model", type(model).__name__, f"{why}, and would pass its training_step by")


def wide(x: Tensor) -> Tensor:
    """In 32 bits at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


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
