"""What FedAdagrad, FedAdam and FedYogi have in common (Reddi et al., ICLR 2021): see fedopt.py."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.methods import (
    LogRange,
    PositiveAdamRate,
    PositiveFloat,
    RunContext,
    Server,
    ShareBelow1,
    Tensors,
    searched,
)
from fl_lightning.methods.serveroptimizer import ServerOptimizer

STEPS = "server.steps"
"""In the server's memory: how many steps the server has taken, of which the bias correction
depends."""


@dataclass(frozen=True)
class Adaptive(ServerOptimizer, ABC):
    """Base of Algorithm 2: m <- beta1 m + (1 - beta1) change, w <- w + server_lr m / (sqrt(v) +
    tau)."""

    server_lr: PositiveFloat = searched(
        0.1, LogRange(0.001, 1), "the decades in which the paper's best values lie"
    )
    beta1: ShareBelow1 = 0.9
    tau: PositiveAdamRate = searched(1e-3, LogRange(1e-5, 1e-1), "the paper's grid")
    update: Literal["paper", "code"] = "paper"

    @abstractmethod
    def second(self, server: Server, square: Tensor) -> Tensor:
        """v (P,), for the `square` of the mean change (P,)."""

    @property
    def first_second(self) -> float:
        """What v begins as."""
        return self.tau**2 if self.update == "paper" else 0.0

    def correction(self, step: int) -> float:
        """The factor of the server's rate in its `step`-th step (1, 2, ...), with `update code`."""
        return 1.0

    def init_server(self, run: RunContext) -> Tensors:
        """With `update code` a count of steps."""
        memory = super().init_server(run)
        if self.update == "code":
            memory[STEPS] = torch.zeros((), dtype=torch.int64)
        return memory

    def step(self, server: Server, change: Tensor) -> Tensor:
        """m / (sqrt(v) + tau)."""
        server.flops += 4 * len(change)
        m = self.average(server, "first_moment", self.beta1, (1 - self.beta1) * change)
        direction = m / (self.second(server, change.square()).sqrt() + self.tau)
        if self.update == "paper":
            return direction
        server.memory[STEPS] = server.memory[STEPS] + 1
        return self.correction(int(server.memory[STEPS])) * direction
