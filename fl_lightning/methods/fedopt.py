"""FedAdagrad, FedAdam, FedYogi: Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated
Optimization. ICLR 2021, Algorithm 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.core import Server
from fl_lightning.methods.serveroptimizer import ServerOptimizer
from fl_lightning.ranges import PositiveAdamRate, PositiveFloat, ShareBelow1
from fl_lightning.search import LogRange, searched


@dataclass(frozen=True)
class Adaptive(ServerOptimizer, ABC):
    """Base of Algorithm 2: m <- beta1 m + (1 - beta1) change, w <- w + server_lr m / (sqrt(v) + tau)."""

    server_lr: PositiveFloat = searched(0.1, LogRange(0.001, 1), "the decades in which the paper's best values lie")
    beta1: ShareBelow1 = 0.9
    tau: PositiveAdamRate = searched(1e-3, LogRange(1e-5, 1e-1), "the paper's grid")

    @abstractmethod
    def second(self, server: Server, square: Tensor) -> Tensor:
        """v (P,), for the `square` of the mean change (P,)."""

    def step(self, server: Server, change: Tensor) -> Tensor:
        """m / (sqrt(v) + tau)."""
        server.flops += 4 * len(change)
        m = self.average(server, "first_moment", self.beta1, (1 - self.beta1) * change)
        return m / (self.second(server, change.square()).sqrt() + self.tau)


@dataclass(frozen=True)
class FedAdagrad(Adaptive):
    """Adagrad on the server: v <- v + change^2.

    Args:
        server_lr: the server's step. 0.1: lies among the paper's best values, which differ by task (Table 8).
        beta1: of the first moment. 0: the paper's, for FedAdagrad alone.
        tau: degree of adaptivity. 0.001: paper; v begins as its square.
    """

    beta1: ShareBelow1 = 0.0

    def second(self, server: Server, square: Tensor) -> Tensor:
        """v."""
        return self.average(server, "second_moment", 1.0, square, self.tau**2)


@dataclass(frozen=True)
class FedAdam(Adaptive):
    """Adam on the server, without bias correction: v <- beta2 v + (1 - beta2) change^2.

    Args:
        server_lr: the server's step. 0.1: lies among the paper's best values, which differ by task (Table 8).
        beta1: of the first moment. 0.9: paper.
        beta2: of the second moment. 0.99: paper.
        tau: degree of adaptivity. 0.001: paper; v begins as its square.
    """

    beta2: ShareBelow1 = 0.99

    def second(self, server: Server, square: Tensor) -> Tensor:
        """v."""
        return self.average(server, "second_moment", self.beta2, (1 - self.beta2) * square, self.tau**2)


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """Yogi on the server: v <- v - (1 - beta2) change^2 sign(v - change^2). Arguments as of `fedadam`."""

    def second(self, server: Server, square: Tensor) -> Tensor:
        """v."""
        v = self.average(server, "second_moment", 1.0, torch.zeros_like(square), self.tau**2)
        return self.average(server, "second_moment", 1.0, (self.beta2 - 1) * square * (v - square).sign())
