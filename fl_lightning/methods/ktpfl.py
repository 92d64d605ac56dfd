"""KT-pFL: Zhang, Guo, Ma, Wang, Xu, Wu: Parameterized Knowledge Transfer for Personalized Federated
Learning.

NeurIPS 2021.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.callbacks.simplex import to_simplex
from fl_lightning.configuration.ranges import Needs, NonNegativeFloat, PositiveInt
from fl_lightning.configuration.search import Range, searched
from fl_lightning.core import RunContext, Server
from fl_lightning.methods.common.predictions import code_step, paper_step, put_back, sum_to_one
from fl_lightning.methods.fedmd import FedMD


@dataclass(frozen=True)
class KTPFL(FedMD):
    """FedMD whose teachers come from a learned matrix of knowledge coefficients: who learns how
    much from whom.

    Arguments are FedMD's (samples 3000, loss kl: paper), and more.

    Args:
        rho: pull of the coefficients towards 1/N. 0.7: implied for EMNIST and Fashion-MNIST by the
            paper's tables.
        divergence: KL of teachers and students in the coefficients' problem: the `mean` over the
            round's public samples (ours), or their `sum` (paper, Eq. 2), which makes `step` as many
            times as long for it, but not for rho.
        step: of their descent. 0.01: paper; the code's mean step is this at least, and less than 5
            times as long.
        update: `paper` (KL, Eq. 7) or `code` (mean squared error, rescaled steps, softmax).
        projection: of the paper's update: `simplex` (ours: as printed, `none`, rows leave the
            simplex).
    """

    traits = replace(
        FedMD.traits,
        needs=(
            Needs(
                "loss",
                "kl",
                "update",
                ("code",),
                "the paper's update compares probabilities: kl, or update code",
            ),
            Needs(
                "divergence",
                "mean",
                "update",
                ("paper",),
                "the code's update has no KL: mean, or update paper",
            ),
        ),
    )

    samples: PositiveInt = 3000
    loss: Literal["mae", "mse", "kl"] = "kl"
    rho: NonNegativeFloat = searched(0.7, Range(0.1, 0.7), "the paper's grid: 0.1 to 0.7")
    divergence: Literal["mean", "sum"] = "mean"
    step: NonNegativeFloat = 0.01
    update: Literal["paper", "code"] = "paper"
    projection: Literal["simplex", "none"] = "simplex"

    def init_server(self, run: RunContext) -> dict[str, Tensor]:
        """And `coefficients` (N, N), float64: row n weighs whose predictions teach client n. They
        start at 1/N."""
        uniform = torch.full((run.clients, run.clients), 1.0 / run.clients, dtype=torch.float64)
        return super().init_server(run) | {"coefficients": uniform}

    def weigh(self, server: Server, P: Tensor, uploaders: list[int]) -> Tensor:
        """Step rows and columns of those who told; their part of a row keeps the mass it had."""
        c, here, shares = (
            server.memory["coefficients"].clone(),
            torch.tensor(uploaders),
            server.shares(uploaders),
        )
        server.flops += 4 * len(uploaders) * P.numel()
        weight = self.lam * (P.shape[1] if self.divergence == "sum" else 1)
        # as printed: rows may have any sum
        if self.update == "paper" and self.projection == "none":
            part = c[here][:, here]
            c[here[:, None], here] = paper_step(
                part, P, shares, weight, self.rho, self.step, 1.0 / len(c)
            )
            server.memory["coefficients"] = c
            return c[:, here]
        part, mass = sum_to_one(c[here][:, here])
        if self.update == "paper":
            part = to_simplex(
                paper_step(part, P, shares, weight, self.rho, self.step, 1.0 / len(uploaders))
            )
        else:
            part = code_step(part, P, self.rho, self.step)
        server.memory["coefficients"] = c = put_back(c, here, part, mass)
        return sum_to_one(c[:, here])[0]
