"""FedAdagrad, FedAdam, FedYogi: Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan:
Adaptive Federated Optimization. ICLR 2021, Algorithm 2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.methods import Server, ShareBelow1
from fl_lightning.methods.adaptive import Adaptive


@dataclass(frozen=True)
class FedAdagrad(Adaptive):
    """Adagrad on the server: v <- v + change^2.

    Args:
        server_lr: the server's step. 0.1: the paper's best value for CIFAR-100 and EMNIST (from
            0.03 to 10 in all).
        beta1: of the first moment. 0: the paper's, for FedAdagrad alone.
        tau: degree of adaptivity. 0.001: paper; v begins as its square.
        update: `paper`, or `code` (the authors', of all their experiments): v begins as 0.
    """

    beta1: ShareBelow1 = 0.0

    def second(self, server: Server, square: Tensor) -> Tensor:
        """v."""
        return self.average(server, "second_moment", 1.0, square, self.first_second)


@dataclass(frozen=True)
class FedAdam(Adaptive):
    """Adam on the server: v <- beta2 v + (1 - beta2) change^2.

    Args:
        server_lr: the server's step. 0.1: our choice, within the range of the paper's best values,
            but not one of them: they go by task from 0.003 (EMNIST) over 0.01 (texts) to 1
            (CIFAR-100).
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
        """`beta2`, or what stands for null."""
        if self.beta2 is not None:
            return self.beta2
        return 0.99 if self.update == "paper" else 0.999

    def correction(self, step: int) -> float:
        """That of both moments."""
        return float((1 - self.decay**step) ** 0.5 / (1 - self.beta1**step))

    def second(self, server: Server, square: Tensor) -> Tensor:
        """v."""
        return self.average(
            server, "second_moment", self.decay, (1 - self.decay) * square, self.first_second
        )


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """Yogi on the server: v <- v - (1 - beta2) change^2 sign(v - change^2). Arguments as of
    `fedadam`."""

    def second(self, server: Server, square: Tensor) -> Tensor:
        """v."""
        v = self.average(server, "second_moment", 1.0, torch.zeros_like(square), self.first_second)
        return self.average(
            server, "second_moment", 1.0, (self.decay - 1) * square * (v - square).sign()
        )
