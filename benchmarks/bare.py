"""Federated averaging as one would write it by hand for speed: the floor of all comparisons."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_lightning.configuration.config import Config
from fl_lightning.core.run import cohort_of
from fl_lightning.data import FederatedData, ResidentPart
from fl_lightning.data.sampling import batch_sizes
from fl_lightning.foundation.device import to_device
from fl_lightning.foundation.rng import generator


class BareFedAvg:
    """Keeps the data in tensors and one resident model whose tensors are views of a flat vector.

    Cohorts, batches and draws are those of the engine, so that both end with the same weights.
    Steps are `torch.autograd.grad` and `torch._foreach_add_`: torch.optim.SGD takes longer.

    Args:
        config: federation, plain SGD and seed; with precision bf16-mixed it trains under autocast.
        data: the tensors that the engine trains on.
        model: has the common initial weights; it becomes the resident model.
        device: where data and model lie.
    """

    def __init__(
        self, config: Config, data: FederatedData, model: nn.Module, device: torch.device
    ) -> None:
        self.config = config
        self.model = model.to(device)
        self.cast: Any = nullcontext()
        if config.fabric.precision == "bf16-mixed":
            self.cast = torch.autocast(device.type, torch.bfloat16)
        clients = [data.client(client, device) for client in range(data.clients)]
        self.train = [tensors(client.train) for client in clients]
        self.test = [tensors(client.test) for client in clients]
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        buffers = [b for b in model.buffers() if b.is_floating_point()]
        parts = [*self.parameters, *buffers]
        self.row = torch.cat([part.detach().flatten() for part in parts])
        views = self.row.split([part.numel() for part in parts])
        for part, view in zip(parts, views, strict=True):
            part.data = view.view_as(part)
        self.shared = self.row.clone()
        self.whole_last = any(isinstance(module, nn.BatchNorm2d) for module in model.modules())

    def round(self, t: int) -> tuple[list[float], float]:
        """Return the clients' accuracies before they train, and their mean training loss."""
        cohort = cohort_of(self.config, t)
        samples = sum(len(self.train[client][1]) for client in cohort)
        mean = torch.zeros_like(self.shared)
        scores, losses = [], []
        for client in cohort:
            self.row.copy_(self.shared)
            scores.append(self.score(client))
            losses.append(self.epochs(t, client))
            mean.add_(self.row, alpha=len(self.train[client][1]) / samples)
        self.shared = mean
        return torch.stack(scores).tolist(), float(torch.stack(losses).mean())

    def epochs(
        self,
        t: int,
        client: int,
    ) -> Tensor:
        self.model.train()
        x, y = self.train[client]
        federation = self.config.federation
        sizes = batch_sizes(
            len(y),
            federation.batch_size,
            self.whole_last,
        )
        losses = []
        for epoch in range(
            (t - 1) * federation.local_epochs,
            t * federation.local_epochs,
        ):
            draws = generator(
                self.config.seed,
                "train order",
                client,
                epoch,
            )
            order = to_device(
                torch.randperm(len(y), generator=draws),
                y.device,
            )
            for batch_x, batch_y in zip(
                x[order].split(sizes),
                y[order].split(sizes),
                strict=True,
            ):
                with self.cast:
                    loss = cross_entropy(self.model(batch_x), batch_y)
                gradients = torch.autograd.grad(loss, self.parameters)
                with torch.no_grad():
                    rate = self.config.optimizer.lr
                    torch._foreach_add_(self.parameters, gradients, alpha=-rate)
                losses.append(loss.detach())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def score(self, client: int) -> Tensor:
        self.model.eval()
        x, y = self.test[client]
        size = self.config.evaluation.batch_size
        right = []
        for batch_x, batch_y in zip(
            x.split(size),
            y.split(size),
            strict=True,
        ):
            with self.cast:
                right.append((self.model(batch_x).argmax(1) == batch_y).sum())
        return torch.stack(right).sum() / len(y)

    def weights(self) -> dict[str, Tensor]:
        """Return the global model's parameters and running statistics by name."""
        self.row.copy_(self.shared)
        state = self.model.state_dict()
        return {name: t.clone() for name, t in state.items() if t.is_floating_point()}


def tensors(part: object) -> tuple[Tensor, Tensor]:
    assert isinstance(part, ResidentPart)
    return part.x, part.y
