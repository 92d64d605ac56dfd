"""TopK-pFD, a reference of Zhang, Guo, Ma, Wang, Xu, Wu: Parameterized Knowledge Transfer for Personalized Federated
Learning. NeurIPS 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_lightning.callbacks.distillation import Nearest
from fl_lightning.callbacks.knowledge import Knowledge
from fl_lightning.config import check
from fl_lightning.methods.fedmd import FedMD


@dataclass(frozen=True)
class TopKPFD(FedMD):
    """FedMD whose teachers are the mean of the k clients with the most alike predictions, oneself among them.

    Args: as FedMD (samples 3000, loss kl: KT-pFL), and
        k: how many. 5: paper (its code keeps about half of all clients).
    """

    samples: int = 3000
    loss: Literal["mae", "mse", "kl"] = "kl"
    k: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check("method.k", self.k, self.k >= 1, "it must be at least 1")

    def knowledge(self) -> Knowledge:
        """Predictions of those most alike."""
        return Nearest(**self.arguments())
