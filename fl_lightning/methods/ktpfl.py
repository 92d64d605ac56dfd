"""KT-pFL: Zhang, Guo, Ma, Wang, Xu, Wu: Parameterized Knowledge Transfer for Personalized Federated
Learning.

NeurIPS 2021.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.callbacks.simplex import to_simplex
from fl_lightning.methods import (
    Needs,
    NonNegativeFloat,
    PositiveInt,
    Range,
    RunContext,
    Server,
    Tensors,
    searched,
)
from fl_lightning.methods.common.predictions import sum_to_one
from fl_lightning.methods.fedmd import FedMD


@dataclass(frozen=True)
class KTPFL(FedMD):
    """FedMD whose teachers come from a learned matrix of knowledge coefficients: how much each
    client learns from every other client.

    Arguments are FedMD's (samples 3000, loss kl: paper), and these:

    Args:
        rho: weight of the pull of the coefficients towards 1/N. 0.7: implied for EMNIST and
            Fashion-MNIST by the paper's tables.
        divergence: KL of teachers and students in the problem that the coefficients solve: its
            `mean` over the round's public samples (ours), or its `sum` over them (paper, Eq. 2).
            With `sum` the gradient of the KL is larger by the number of samples, and that of the
            pull is as before.
        step: step size of the coefficients. 0.01: paper. With `update code`: the mean absolute step
            of a row is between this and 5 times this.
        update: update of the coefficients: `paper` (KL, Eq. 7) or `code` (mean squared error,
            rescaled steps, softmax).
        projection: projection of rows after the paper's update: onto the `simplex` (ours), or
            `none` (as printed; rows leave the simplex).
    """

    traits = replace(
        FedMD.traits,
        needs=(
            Needs(
                "loss",
                free="kl",
                other="update",
                values=("code",),
                says="the paper's update compares probabilities; use kl, or method.update code",
            ),
            Needs(
                "divergence",
                free="mean",
                other="update",
                values=("paper",),
                says="the code's update has no KL; use mean, or method.update paper",
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

    def init_server(self, run: RunContext) -> Tensors:
        """FedMD's tensors, and `coefficients` (N, N), float64: row n holds the weights of all
        clients in client n's teacher, 1/N at first."""
        uniform = torch.full((run.clients, run.clients), 1.0 / run.clients, dtype=torch.float64)
        return super().init_server(run) | {"coefficients": uniform}

    def weigh(
        self,
        server: Server,
        P: Tensor,
        uploaders: list[int],
    ) -> Tensor:
        """Update the coefficients between the clients that uploaded, and return each client's
        weights of their predictions, (N, uploaders).

        The sum of the updated part of a row stays as it was.
        """
        c = server.memory["coefficients"].clone()
        places = torch.tensor(uploaders)
        shares = server.shares(uploaders)
        rows = c[places][:, places]
        server.flops += 4 * len(uploaders) * P.numel()
        weight = self.lam * (P.shape[1] if self.divergence == "sum" else 1)
        # the update as printed: rows need not sum to 1
        if self.update == "paper" and self.projection == "none":
            prior = 1.0 / len(c)
            rows = paper_step(rows, P, shares, weight, self.rho, self.step, prior)
            c[places[:, None], places] = rows
            server.memory["coefficients"] = c
            return c[:, places]
        rows, mass = sum_to_one(rows)
        if self.update == "paper":
            prior = 1.0 / len(uploaders)
            rows = to_simplex(paper_step(rows, P, shares, weight, self.rho, self.step, prior))
        else:
            rows = code_step(rows, P, self.rho, self.step)
        c = restored_rows(c, places, rows, mass)
        server.memory["coefficients"] = c
        return sum_to_one(c[:, places])[0]


def kl_gradient(c: Tensor, P: Tensor) -> Tensor:
    """Return the gradient by c (m, m) of sum_n KL(sum_j c_nj P_j || P_n), as a mean over the
    samples of the predictions P (m, samples, C); (m, m)."""
    floor = torch.finfo(P.dtype).tiny
    teachers = torch.einsum("nj,jdk->ndk", c, P)
    ratio = teachers.clamp_min(floor).log() - P.clamp_min(floor).log()
    return (ratio + 1).flatten(1) @ P.flatten(1).T / P.shape[1]


def paper_step(
    c: Tensor, P: Tensor, shares: Tensor, lam: float, rho: float, step: float, prior: float
) -> Tensor:
    """Return c - step lam (D_n / D) grad_n KL - 2 step rho (c - prior), (m, m): KT-pFL's Eq. 7.

    Args:
        c: coefficients (m, m).
        P: predictions (m, samples, C).
        shares: D_n / D, (m,).
        lam: weight of the KL.
        rho: weight of the pull towards `prior`.
        step: step size.
        prior: 1 over the number of clients.
    """
    pull = 2 * rho * (c - prior)
    return c - step * (lam * shares[:, None] * kl_gradient(c, P) + pull)


def code_step(
    c: Tensor,
    P: Tensor,
    rho: float,
    size: float,
) -> Tensor:
    """Take a rescaled step down MSE(P_n, sum_j c_nj P_j) + rho MSE(c_n, 1/m), then softmax(5 row),
    as the authors' code; return (m, m).

    A row's gradient is multiplied by 5^k, with k from -5 to 5, so that its mean absolute value is
    in [size, 5 size).

    Args:
        c: coefficients (m, m).
        P: predictions (m, samples, C).
        rho: weight of the pull towards 1/m.
        size: least mean absolute step of a row.
    """
    flat = P.flatten(1)
    G = flat @ flat.T
    gradient = 2 * (c @ G - G) / flat.shape[1]
    gradient = gradient + 2 * rho * (c - 1.0 / len(c)) / len(c)
    mean = gradient.abs().mean(1, keepdim=True)
    power = torch.log(size / mean.clamp_min(1e-300)) / math.log(5.0)
    factor = 5.0 ** torch.ceil(power).clamp(-5, 5)
    scale = torch.where(mean > 1e-15, factor, 0.0) * (size > 0)
    return torch.softmax(5 * (c - scale * gradient), dim=1)


def restored_rows(
    c: Tensor,
    places: Tensor,
    rows: Tensor,
    mass: Tensor,
) -> Tensor:
    """Write the updated coefficients between m clients back into `c` (N, N), scaled to the sums
    that they had before; return `c`.

    If the m clients had no weight in a row, they get the share m / N of the row's weight, and the
    other clients' weights are multiplied by 1 - m / N: scaled to a sum of 0, the m weights would
    stay 0 forever.

    Args:
        c: all coefficients, changed in place.
        places: numbers of the m clients.
        rows: updated rows (m, m), each with sum 1.
        mass: sums (m, 1) before the update.
    """
    share = len(places) / len(c)
    has_mass = mass > 1e-12
    c[places] = torch.where(has_mass, c[places], c[places] * (1 - share))
    c[places[:, None], places] = rows * torch.where(has_mass, mass, share)
    return c
