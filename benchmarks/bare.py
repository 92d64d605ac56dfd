"""The floor: federated averaging as one would write it by hand for speed, with nothing else in
it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_lightning.configuration.config import Config
from fl_lightning.core.run import cohort_of
from fl_lightning.data import FederatedData, ResidentPart
from fl_lightning.data.sampling import batch_sizes
from fl_lightning.foundation.device import sent
from fl_lightning.foundation.rng import generator

Stepper = Literal["torch.optim.SGD", "autograd.grad + foreach"]
STEPPERS: tuple[Stepper, ...] = ("torch.optim.SGD", "autograd.grad + foreach")


class BareFedAvg:
    """Data in tensors, one resident model whose tensors are views of a flat row, one flat copy to
    start a client.

    Cohorts, batches and draws are those of the engine, so that both end with the same weights.

    Args:
        config: federation, optimiser (plain SGD) and seed are read.
        data: the same tensors that the engine trains on.
        model: with the common initial weights; it becomes the resident model.
        stepper: how a step is taken.
        device: where data and model lie. With `fabric.precision bf16-mixed` forward passes run
            under autocast.
    """

    def __init__(
        self,
        config: Config,
        data: FederatedData,
        model: nn.Module,
        stepper: Stepper,
        device: torch.device,
    ) -> None:
        self.config, self.model = config, model.to(device)
        mixed = config.fabric.precision == "bf16-mixed"
        self.cast: Any = torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext()
        clients = [data.client(c, device) for c in range(data.clients)]
        self.train = [_tensors(c.train) for c in clients]
        self.test = [_tensors(c.test) for c in clients]
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        tensors = [*self.parameters, *(b for b in model.buffers() if b.is_floating_point())]
        self.row = torch.cat([t.detach().flatten() for t in tensors])
        parts = self.row.split([t.numel() for t in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.data = part.view_as(tensor)
        self.shared = self.row.clone()
        self.whole_last = any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
        self.sgd = None
        if stepper == "torch.optim.SGD":
            self.sgd = torch.optim.SGD(self.parameters, lr=config.optimizer.lr, foreach=True)

    def round(self, t: int) -> tuple[list[float], float]:
        """Round `t`; the accuracies of the global model on its clients before they train, and their
        mean loss."""
        cohort = cohort_of(self.config, t)
        samples = sum(len(self.train[c][1]) for c in cohort)
        mean = torch.zeros_like(self.shared)
        scores, losses = [], []
        for c in cohort:
            self.row.copy_(self.shared)
            scores.append(self.score(c))
            losses.append(self.epochs(t, c))
            mean.add_(self.row, alpha=len(self.train[c][1]) / samples)
        self.shared = mean
        return torch.stack(scores).tolist(), float(torch.stack(losses).mean())

    def epochs(self, t: int, client: int) -> Tensor:
        self.model.train()
        (x, y), federation = self.train[client], self.config.federation
        sizes = batch_sizes(len(y), federation.batch_size, self.whole_last)
        losses = []
        for epoch in range((t - 1) * federation.local_epochs, t * federation.local_epochs):
            draws = generator(self.config.seed, "train order", client, epoch)
            order = sent(torch.randperm(len(y), generator=draws), y.device)
            for xb, yb in zip(x[order].split(sizes), y[order].split(sizes), strict=True):
                with self.cast:
                    loss = cross_entropy(self.model(xb), yb)
                self.step(loss)
                losses.append(loss.detach())
        return torch.stack(losses).mean()

    def step(self, loss: Tensor) -> None:
        if self.sgd is not None:
            self.sgd.zero_grad()
            loss.backward()
            self.sgd.step()
        else:
            gradients = torch.autograd.grad(loss, self.parameters)
            with torch.no_grad():
                torch._foreach_add_(self.parameters, gradients, alpha=-self.config.optimizer.lr)

    @torch.no_grad()
    def score(self, client: int) -> Tensor:
        self.model.eval()
        x, y = self.test[client]
        size = self.config.evaluation.batch_size
        with self.cast:
            right = [
                (self.model(a).argmax(1) == b).sum()
                for a, b in zip(x.split(size), y.split(size), strict=True)
            ]
        return torch.stack(right).sum() / len(y)

    def weights(self) -> dict[str, Tensor]:
        """The global model's parameters and running statistics by name."""
        self.row.copy_(self.shared)
        return {k: v.clone() for k, v in self.model.state_dict().items() if v.is_floating_point()}


def _tensors(part: object) -> tuple[Tensor, Tensor]:
    assert isinstance(part, ResidentPart)
    return part.x, part.y
