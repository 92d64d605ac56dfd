"""Sim-pFD, a reference of Zhang, Guo, Ma, Wang, Xu, Wu: Parameterized Knowledge Transfer for Personalized Federated
Learning. NeurIPS 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_lightning.callbacks.distillation import Similar
from fl_lightning.callbacks.knowledge import Knowledge
from fl_lightning.methods.fedmd import FedMD


@dataclass(frozen=True)
class SimPFD(FedMD):
    """FedMD whose teachers weigh clients by the cosine similarity of their predictions; the least alike gets 0.

    Args: as FedMD. samples 3000, loss kl: KT-pFL.
    """

    samples: int = 3000
    loss: Literal["mae", "mse", "kl"] = "kl"

    def knowledge(self) -> Knowledge:
        """Predictions, weighed by similarity."""
        return Similar(**self.arguments())
