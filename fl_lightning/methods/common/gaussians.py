"""Class-conditional Gaussians of features with one covariance for all classes, and the classifier
that they give (pFedFDA: McLaughlin, Su, NeurIPS 2024). All in float64; C classes, features of width
d.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fl_lightning.configuration.config import check
from fl_lightning.core import Client, RunContext
from fl_lightning.foundation.rng import generator
from fl_lightning.methods.common.basics import check_classes

SHRINK = 1e-4
"""Of covariances towards their mean variance before they are inverted, and added to class shares:
the authors' code."""
LEAST = 3
"""Samples from which on a class is scored by its own mean: the authors' code."""
STEPS = 10
"""Of L-BFGS at most: the authors' code."""


@dataclass(frozen=True)
class Gaussians:
    """Means (C, d) and covariance (d, d)."""

    means: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, memory: Mapping[str, Tensor]) -> Gaussians:
        """Those that the server keeps."""
        return cls(memory["gaussian.means"].double(), memory["gaussian.covariance"].double())

    def towards(self, own: Gaussians, beta: Tensor) -> Gaussians:
        """beta own + (1 - beta) self, with `beta` (2,): of the means, and of the covariance."""
        means = beta[0] * own.means + (1 - beta[0]) * self.means
        return Gaussians(means, beta[1] * own.covariance + (1 - beta[1]) * self.covariance)

    def classifier(self, prior: Tensor) -> tuple[Tensor, Tensor]:
        """Linear discriminant analysis with class shares `prior` (C,): weight (C, d) and bias (C,).

        W = means S^-1 and b = -diag(W means^T) / 2 + log prior, where S is the covariance, shrunk
        by `SHRINK`.
        """
        S, eye = self.covariance, torch.eye(len(self.covariance), dtype=torch.float64)
        S = (1 - SHRINK) * S + SHRINK * S.trace() / len(S) * eye
        weight = torch.linalg.solve(S, self.means.T).T
        return weight, -0.5 * (weight * self.means).sum(1) + prior.log()


def first_gaussians(run: RunContext) -> dict[str, Tensor]:
    """`gaussian.means` (C, d), drawn evenly from [0, 1), and `gaussian.covariance` (d, d), I: the
    authors' code."""
    width, draws = run.feature_width, generator(run.config.seed, "class means")
    means = torch.rand(run.data.num_classes, width, generator=draws)
    return {"gaussian.means": means, "gaussian.covariance": torch.eye(width)}


def check_classifier(run: RunContext) -> None:
    """Raise `BadInput` without classes, or unless the classifier is linear, with a bias and a row
    for each class."""
    check_classes(run)
    group, shape = run.groups[0], (run.data.num_classes, run.feature_width)
    fine = [tuple(p.shape) for p in group.head.parameters()] == [shape, shape[:1]]
    check(
        "model",
        group.name,
        fine,
        f"{run.method_name} needs a classifier with a bias, and one row for each class",
    )


def prior_of(client: Client) -> Tensor:
    """Class shares of the client's training samples, (C,), with `SHRINK` added to each."""
    counts = client.class_counts.double()
    shares = counts / counts.sum().clamp_min(1) + SHRINK
    return shares / shares.sum()


def headed(client: Client, vector: Tensor, gaussians: Gaussians) -> Tensor:
    """`vector` (D,), with the classifier of `gaussians` and the client's class shares written into
    its head."""
    weight, bias = gaussians.classifier(prior_of(client))
    for block in client.layout.blocks:
        if block.head:
            vector[block.start : block.stop] = (
                (weight if len(block.shape) == 2 else bias).reshape(-1).to(vector)
            )
    return vector


def adapted(
    client: Client, vector: Tensor, ridge: float, beta: float | None, *, least: int = 1
) -> Gaussians:
    """The server's Gaussians, moved towards those of the client's features under `vector` (D,).

    Args:
        client: whose training data are looked at; without any the server's stay as they are.
        vector: the model.
        ridge: as in `estimated`.
        beta: how far, of both parts; None: as far as `trusted`.
        least: a class with fewer samples keeps the server's mean; its samples still count for the
            covariance.
    """
    known, seen = (
        Gaussians.of(client.run.server.memory),
        list(client.passes(client.data.train, vector)),
    )
    if not seen:
        return known
    z, y = (
        torch.cat([z for z, _, _ in seen]).cpu().double(),
        torch.cat([y for _, _, y in seen]).cpu(),
    )
    fixed = None if beta is None else torch.full((2,), beta, dtype=torch.float64)
    weights = trusted(z, y, known, prior_of(client), ridge) if fixed is None else fixed
    own, counts = estimated(z, y, known, ridge), y.bincount(minlength=len(known.means))
    means = torch.where(counts[:, None] >= least, own.means, known.means)
    return known.towards(Gaussians(means, own.covariance), weights)


def estimated(z: Tensor, y: Tensor, known: Gaussians, ridge: float) -> Gaussians:
    """Of features z (n, d) with labels y (n,): class means and pooled covariance, scatter / (n - 1)
    + ridge I.

    A class without samples has the mean that is `known`.
    """
    counts = y.bincount(minlength=len(known.means))
    sums = torch.zeros_like(known.means).index_add_(0, y, z)
    means = torch.where(counts[:, None] > 0, sums / counts.clamp_min(1)[:, None], known.means)
    away, eye = z - means[y], torch.eye(z.shape[1], dtype=torch.float64)
    return Gaussians(means, away.T @ away / max(len(z) - 1, 1) + ridge * eye)


def trusted(z: Tensor, y: Tensor, known: Gaussians, prior: Tensor, ridge: float) -> Tensor:
    """How far own estimates are trusted, beta (2,) in [0, 1]: by L-BFGS from 1/2 on the cross
    entropy of two folds.

    Each fold is scored by Gaussians between `known` and the other fold's. Without a class of two
    samples it is 0.
    """
    from scipy.optimize import minimize

    folds = [(estimated(z[fit], y[fit], known, ridge), z[test], y[test]) for fit, test in halves(y)]
    if not folds:
        return torch.zeros(2, dtype=torch.float64)

    def value(beta: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.tensor(beta, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            losses = []
            for own, x, labels in folds:
                weight, bias = known.towards(own, leaf).classifier(prior)
                losses.append(cross_entropy(x @ weight.T + bias, labels))
            total = torch.stack(losses).sum()
        [slope] = torch.autograd.grad(total, leaf)
        return float(total.detach()), slope.numpy()

    options = {"maxiter": STEPS}
    minimum = minimize(
        value, [0.5, 0.5], jac=True, method="L-BFGS-B", bounds=[(0, 1), (0, 1)], options=options
    )
    return torch.from_numpy(np.asarray(minimum.x, dtype=np.float64))


def halves(y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Two folds of samples with labels y (n,), (index to fit, index to try): every second sample of
    each class that has two at least; no folds where none has.
    """
    order = y.argsort(stable=True)
    order = order[y.bincount()[y[order]] >= 2]
    return [(order[k::2], order[1 - k :: 2]) for k in (0, 1)] if len(order) else []
