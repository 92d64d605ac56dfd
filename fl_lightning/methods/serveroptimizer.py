"""Server optimisers: the server treats a round's mean change as a gradient, and takes a step by
it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.methods import (
    LogRange,
    Method,
    PositiveFloat,
    Server,
    Traits,
    searched,
    sees_only_the_mean,
)


@dataclass(frozen=True)
class ServerOptimizer(Method, ABC):
    """Base: FedAvg whose server moves the global model by server_lr times `step`. Running
    statistics are averaged as in FedAvg."""

    traits = Traits(family="one global model", several=False)

    server_lr: PositiveFloat = searched(1.0, LogRange(0.01, 10), "decades around FedAvg's 1")

    @abstractmethod
    def step(self, server: Server, change: Tensor) -> Tensor:
        """Return the step of the parameters, (P,), for the cohort's mean `change` of them, (P,)."""

    @sees_only_the_mean
    def aggregate(self, server: Server) -> None:
        """Set w <- w + server_lr * step."""
        columns = server.only.layout.parameters
        old = server["model"]
        super().aggregate(server)
        change = server["model"][columns] - old[columns]
        # adds exactly 0 if the step is the change, as in FedAvg
        server["model"][columns] += self.server_lr * self.step(server, change) - change
        server.flops += 4 * len(change)

    def average(
        self,
        server: Server,
        name: str,
        share: float,
        value: Tensor,
        first: float = 0.0,
    ) -> Tensor:
        """Update a vector v that the server keeps, v <- share v + value; return its parameters
        (P,).

        Args:
            server: keeps the vector.
            name: name of v.
            share: factor on the last v: below 1 a decay, 1 for a sum.
            value: to add, (P,).
            first: initial value of all entries.
        """
        group = server.only
        columns = group.layout.parameters
        vector = group[name].clone() if name in group else torch.full_like(group.initial, first)
        vector[columns] = share * vector[columns] + value
        group[name] = vector
        server.flops += 3 * len(value)
        return vector[columns]
