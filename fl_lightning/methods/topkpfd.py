"""TopK-pFD, a reference of Zhang, Guo, Ma, Wang, Xu, Wu: Parameterized Knowledge Transfer for
Personalized Federated Learning. NeurIPS 2021.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.methods import PositiveInt, Server, Whole, searched
from fl_lightning.methods.common.predictions import cosines
from fl_lightning.methods.fedmd import FedMD


@dataclass(frozen=True)
class TopKPFD(FedMD):
    """FedMD whose teachers are the mean of the k clients with the most alike predictions, oneself
    among them.

    Arguments are FedMD's (samples 3000, loss kl: KT-pFL), and more.

    Args:
        k: how many. 5: paper (its code keeps about half of all clients).
    """

    samples: PositiveInt = 3000
    loss: Literal["mae", "mse", "kl"] = "kl"
    k: PositiveInt = searched(
        5, Whole(2, 10), "around the paper's 5; its code: half of all clients, of 20"
    )

    def weigh(self, server: Server, P: Tensor, uploaders: list[int]) -> Tensor:
        """Who did not tell has the mean of all as its teacher; equally alike clients go by
        number."""
        rows = super().weigh(server, P, uploaders)
        rows[uploaders] = nearest(cosines(P), self.k)
        server.flops += 2 * len(uploaders) * P.numel()
        return rows


def nearest(S: Tensor, k: int) -> Tensor:
    """Rows with 1/k at the `k` greatest entries of `S` (m, m), oneself first; ties to the lower
    number."""
    k = min(k, len(S))
    others = S.clone().fill_diagonal_(2.0)  # above any cosine
    order = torch.sort(others.round(decimals=12), dim=1, descending=True, stable=True).indices[
        :, :k
    ]
    return torch.zeros_like(S).scatter(1, order, 1.0 / k)
