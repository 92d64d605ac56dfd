"""TopK-pFD, a reference of Zhang, Guo, Ma, Wang, Xu, Wu: Parameterized Knowledge Transfer for
Personalized Federated Learning. NeurIPS 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fl_lightning.configuration.ranges import PositiveInt
from fl_lightning.configuration.search import Whole, searched
from fl_lightning.core import Server
from fl_lightning.methods.common.predictions import cosines, nearest
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
