"""TopK-pFD, a reference of Zhang, Guo, Ma, Wang, Xu, Wu: Parameterized Knowledge Transfer for
Personalized Federated Learning. NeurIPS 2021.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.methods import PositiveInt, Whole, searched
from fl_lightning.methods.simpfd import SimPFD


@dataclass(frozen=True)
class TopKPFD(SimPFD):
    """FedMD whose teachers are the mean of the k clients with the most alike predictions, oneself
    among them.

    Arguments are FedMD's (samples 3000, loss kl: KT-pFL), and more.

    Args:
        k: how many. 5: paper (its code keeps about half of all clients).
    """

    k: PositiveInt = searched(
        5, Whole(2, 10), "around the paper's 5; its code: half of all clients, of 20"
    )

    def rows(self, S: Tensor) -> Tensor:
        """Weights (m, m) from cosines `S` (m, m); equally alike clients go by number."""
        return nearest(S, self.k)


def nearest(S: Tensor, k: int) -> Tensor:
    """Rows with 1/k at the `k` greatest entries of `S` (m, m), oneself first; ties to the lower
    number."""
    k = min(k, len(S))
    similarities = S.clone().fill_diagonal_(2.0)  # above any cosine
    order = similarities.round(decimals=12).sort(dim=1, descending=True, stable=True).indices
    return torch.zeros_like(S).scatter(1, order[:, :k], 1.0 / k)
