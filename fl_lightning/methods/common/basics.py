"""What methods have in common that exchange class means, predictions or the slope of a loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from fl_lightning.configuration.config import check
from fl_lightning.core import Client, RunContext
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


def fisher(client: Client, *, whole: bool) -> Tensor:
    """Sum over the batches of the client's training data of ||grad||^2 of the mean loss, shape (),
    float64 (FedAS).

    `whole`: without an incomplete last batch, whose mean over few samples counts like any other's;
    it stays where there is no other.
    """
    total, size = torch.zeros((), dtype=torch.float64), client.run.config.federation.batch_size
    for batch in client.data.train.batches(size):
        if not whole or len(batch[1]) >= min(size, len(client.data.train)):
            total += (
                client.gradient(client["model"], batch, training=False)[1]
                .square()
                .sum()
                .cpu()
                .double()
            )
    return total


def contrast(z: Tensor, near: Tensor, far: Tensor, tau: float) -> Tensor:
    """Mean -log(e^(cos(z, near) / tau) / (e^(cos(z, near) / tau) + e^(cos(z, far) / tau))) of
    features (n, d), shape () (MOON).
    """
    # at once: equal ones leave no trace in z's gradient
    cosines = cosine_similarity(z, torch.stack([near, far]), 2).T
    return cross_entropy(cosines / tau, torch.zeros(len(z), dtype=torch.int64, device=z.device))


def mmd(x: Tensor, y: Tensor, widths: Sequence[float] = (10, 15, 20, 50)) -> Tensor:
    """Squared maximum mean discrepancy of samples `x` (n, d) and `y` (m, d), shape (), of a sum of
    Gaussian kernels exp(-||a - b||^2 / (2 width)); the mean over all pairs, a sample with itself
    included (the authors' code of FedCP).
    """

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        squares = (a[:, None] - b).square().sum(2)
        return sum(
            (torch.exp(-squares / (2 * width)) for width in widths), torch.zeros_like(squares)
        ).mean()

    return kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)
