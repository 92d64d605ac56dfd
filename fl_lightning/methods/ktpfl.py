"""KT-pFL: Zhang, Guo, Ma, Wang, Xu, Wu: Parameterized Knowledge Transfer for Personalized Federated Learning.

NeurIPS 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_lightning.callbacks.distillation import Coefficients
from fl_lightning.callbacks.knowledge import Knowledge
from fl_lightning.config import check
from fl_lightning.methods.fedmd import FedMD


@dataclass(frozen=True)
class KTPFL(FedMD):
    """FedMD whose teachers come of a learned matrix of knowledge coefficients: who learns how much from whom.

    Args: as FedMD (samples 3000, loss kl: paper), and
        rho: pull of the coefficients towards 1/N. 0.7: implied for EMNIST and Fashion-MNIST by the paper's tables.
        step: of their descent. 0.01: paper.
        update: `paper` (KL, Eq. 7) or `code` (mean squared error, rescaled steps, softmax).
        projection: of the paper's update: `simplex` (ours: as printed, `none`, rows leave the simplex).
    """

    samples: int = 3000
    loss: Literal["mae", "mse", "kl"] = "kl"
    rho: float = 0.7
    step: float = 0.01
    update: Literal["paper", "code"] = "paper"
    projection: Literal["simplex", "none"] = "simplex"

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("rho", "step"):
            check(f"method.{key}", getattr(self, key), getattr(self, key) >= 0, "it must be 0 or more")
        fine = self.loss == "kl" or self.update == "code"
        check("method.loss", self.loss, fine, "the paper's update compares probabilities: kl, or update code")

    def knowledge(self) -> Knowledge:
        """Predictions, weighed by learned coefficients."""
        return Coefficients(**self.arguments())
