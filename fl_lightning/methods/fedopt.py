"""FedAdagrad, FedAdam, FedYogi: Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan:
Adaptive Federated Optimization. ICLR 2021, Algorithm 2.
"""

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
"""Name in the server's memory of the number of steps taken, for the bias correction."""


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
    def second_moment(self, server: Server, square: Tensor) -> Tensor:
        """Return the updated second moment v (P,).

        Args:
            server: keeps v.
            square: elementwise square of the mean change, (P,).
        """

    @property
    def initial_second_moment(self) -> float:
        """The initial value of v."""
        return self.tau**2 if self.update == "paper" else 0.0

    def bias_correction(self, step: int) -> float:
        """Return the factor on the learning rate with `update code`, in the server's `step`-th step
        (1, 2, ...)."""
        return 1.0

    def init_server(self, run: RunContext) -> Tensors:
        """`server.steps`, only with `update code`: the number of steps that the server has taken, 0
        at first."""
        memory = super().init_server(run)
        if self.update == "code":
            memory[STEPS] = torch.zeros((), dtype=torch.int64)
        return memory

    def step(self, server: Server, change: Tensor) -> Tensor:
        """Return m / (sqrt(v) + tau), with the bias correction if `update code`."""
        server.flops += 4 * len(change)
        m = self.average(server, "first_moment", self.beta1, (1 - self.beta1) * change)
        v = self.second_moment(server, change.square())
        direction = m / (v.sqrt() + self.tau)
        if self.update == "paper":
            return direction
        step = server.memory[STEPS] + 1
        server.memory[STEPS] = step
        return self.bias_correction(int(step)) * direction


@dataclass(frozen=True)
class FedAdagrad(Adaptive):
    """Adagrad on the server: v <- v + change^2.

    Args:
        server_lr: the server's learning rate. 0.1: the paper's best value for CIFAR-100 and EMNIST
            (from 0.03 to 10 in all).
        beta1: of the first moment. 0: the paper's, for FedAdagrad alone.
        tau: degree of adaptivity. 0.001: paper; v begins as its square.
        update: `paper`, or `code` (the authors', of all their experiments): v begins as 0.
    """

    beta1: ShareBelow1 = 0.0

    def second_moment(self, server: Server, square: Tensor) -> Tensor:
        return self.average(server, "second_moment", 1.0, square, self.initial_second_moment)


@dataclass(frozen=True)
class FedAdam(Adaptive):
    """Adam on the server: v <- beta2 v + (1 - beta2) change^2.

    Args:
        server_lr: the server's learning rate. 0.1: our choice, within the range of the paper's best
            values, but not one of them: they depend on the task, from 0.003 (EMNIST) over 0.01
            (texts) to 1 (CIFAR-100).
        beta1: of the first moment. 0.9: paper.
        beta2: of the second moment; null: 0.99 (paper), or 0.999 with `update code`.
        tau: degree of adaptivity. 0.001: paper; v begins as its square.
        update: `paper`: Algorithm 2, without bias correction; `code` (the authors', of all their
            experiments): v begins as 0, and the step is multiplied by sqrt(1 - beta2^t) / (1 -
            beta1^t) in the server's t-th step.
    """

    beta2: ShareBelow1 | None = None

    @property
    def decay(self) -> float:
        """The value of `beta2`; for null, the default of `update`."""
        if self.beta2 is not None:
            return self.beta2
        return 0.99 if self.update == "paper" else 0.999

    def bias_correction(self, step: int) -> float:
        """Return the bias correction of both moments."""
        return float((1 - self.decay**step) ** 0.5 / (1 - self.beta1**step))

    def second_moment(self, server: Server, square: Tensor) -> Tensor:
        increment = (1 - self.decay) * square
        return self.average(
            server, "second_moment", self.decay, increment, self.initial_second_moment
        )


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """Yogi on the server: v <- v - (1 - beta2) change^2 sign(v - change^2). Arguments as for
    `fedadam`."""

    def second_moment(self, server: Server, square: Tensor) -> Tensor:
        zeros = torch.zeros_like(square)
        v = self.average(server, "second_moment", 1.0, zeros, self.initial_second_moment)
        change = (self.decay - 1) * square * (v - square).sign()
        return self.average(server, "second_moment", 1.0, change)
