"""Sim-pFD, a reference of Zhang, Guo, Ma, Wang, Xu, Wu: Parameterized Knowledge Transfer for
Personalized Federated Learning. NeurIPS 2021.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.methods import PositiveInt, Server
from fl_lightning.methods.common.predictions import cosines, sum_to_one
from fl_lightning.methods.fedmd import FedMD


@dataclass(frozen=True)
class SimPFD(FedMD):
    """FedMD whose teachers weigh clients by the cosine similarity of their predictions; the least
    similar client has weight 0.

    Arguments are FedMD's (samples 3000, loss kl: KT-pFL).
    """

    samples: PositiveInt = 3000
    loss: Literal["mae", "mse", "kl"] = "kl"

    def weigh(
        self,
        server: Server,
        P: Tensor,
        uploaders: list[int],
    ) -> Tensor:
        """Return weights (N, m): the `rows` of the uploaders' similarities; equal weights for
        clients that have uploaded nothing."""
        weights = super().weigh(server, P, uploaders)
        weights[uploaders] = self.rows(cosines(P))
        server.flops += 2 * len(uploaders) * P.numel()
        return weights

    def rows(self, S: Tensor) -> Tensor:
        """Return weights (m, m) from cosines `S` (m, m). Clients with equal predictions get equal
        weights."""
        return shifted_shares(S)


def shifted_shares(S: Tensor) -> Tensor:
    """Subtract the least entry from each row of `S` (m, m), and divide the row by its sum; a row
    with equal entries (up to rounding) becomes uniform."""
    R = S - S.min(1, keepdim=True).values
    R = torch.where(R < 1e-12, 0.0, R)
    return sum_to_one(R)[0]
