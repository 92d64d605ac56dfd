"""FedAvgM: Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification. arXiv:1909.06335, 2019.
"""

from dataclasses import dataclass

from torch import Tensor

from fl_lightning.methods import Range, Server, ShareBelow1, searched
from fl_lightning.methods.serveroptimizer import ServerOptimizer


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """FedAvg with momentum on the server: v <- beta v + mean change, w <- w + server_lr v.

    Args:
        server_lr: the server's learning rate. 1: paper (Section 4.2), where momentum alone differs
            from FedAvg.
        momentum: beta. 0.9: the paper's best of {0, 0.7, 0.9, 0.97, 0.99, 0.997} for most settings;
            0 is FedAvg.
    """

    momentum: ShareBelow1 = searched(
        0.9, Range(0.0, 0.99), "the paper's grid reaches from 0 to 0.997"
    )

    def step(self, server: Server, change: Tensor) -> Tensor:
        """Return the updated momentum vector v."""
        return self.average(server, "velocity", self.momentum, change)
