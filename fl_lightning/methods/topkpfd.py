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
    """FedMD whose teacher is the mean of the k clients with the most similar predictions, the
    client itself among them.

    Arguments are FedMD's (samples 3000, loss kl: KT-pFL), and these:

    Args:
        k: number of clients in the mean. 5: paper (its code keeps about half of all clients).
    """

    k: PositiveInt = searched(
        5, Whole(2, 10), "around the paper's 5; its code: half of all clients, of 20"
    )

    def rows(self, S: Tensor) -> Tensor:
        """Return weights (m, m) from cosines `S` (m, m)."""
        return nearest(S, self.k)


def nearest(S: Tensor, k: int) -> Tensor:
    """Return the weights (m, m) of a plain mean over each client and the k - 1 other clients that
    are most similar to it: 1/k each.

    Args:
        S: similarities (m, m), cosines.
        k: number of clients in the mean. Of equally similar clients, those with lower numbers
            count.
    """
    k = min(k, len(S))
    similarities = S.clone().fill_diagonal_(2.0)  # above any cosine
    order = similarities.round(decimals=12).sort(dim=1, descending=True, stable=True).indices
    return torch.zeros_like(S).scatter(1, order[:, :k], 1.0 / k)
