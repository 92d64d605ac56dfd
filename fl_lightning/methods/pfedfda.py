"""pFedFDA: McLaughlin, Su: Personalized Federated Learning via Feature Distribution Adaptation.
NeurIPS 2024."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fl_lightning.foundation.rng import generator
from fl_lightning.methods import (
    Beside,
    Client,
    LogRange,
    NonNegativeFloat,
    OwnClassifier,
    Payload,
    Payloads,
    Phase,
    Phases,
    Rule,
    RunContext,
    Server,
    Tensors,
    Traits,
    UnitInterval,
    check,
    searched,
)

NAMES = ("means", "covariance")
"""Names of the uploaded tensors."""


@dataclass(frozen=True)
class PFedFDA(OwnClassifier):
    """A shared body, and Gaussians of its features (class means mu and one covariance S) in place
    of a shared classifier.

    The classifier is the Gaussians' linear discriminant: W = mu S^-1 and b = -diag(W mu^T) / 2 +
    log pi, with the client's class shares pi. It is fixed while the body trains. Then the client
    estimates mu and S of its own features, and uploads beta times these plus (1 - beta) times the
    received ones. beta has one number for mu and one for S, both in [0, 1]. The client chooses them
    by the cross entropy in a twofold cross-validation. The server averages by samples. Scored: the
    classifier of Gaussians that are estimated and mixed anew for the scored body; a class with one
    or two samples keeps the server's mean (the authors' code).

    Args:
        ridge: ridge I is added to an estimated S. 1: the authors' code (which also adds 1e-4 to
            every entry: left out here). With 1e-4, which that code may mean, the classifier's
            weights blow up; 0.1 does better on the digits (docs/methods.md).
        beta: both numbers of beta; null: chosen, as in the paper. 1 is the authors' `local_beta`, 0
            uses the server's Gaussians alone.
    """

    traits = Traits(
        family="prototypes and distillation",
        judge="before",
        features=True,
        adapts=True,
        classes=True,
        statistics=True,
        several=False,
        newcomers=Rule(
            "global body, and the classifier of Gaussians adapted to its data", "nothing"
        ),
        receives_beside="Gaussians of all",
        sample_use="estimates Gaussians of samples' features",
    )

    ridge: NonNegativeFloat = searched(
        1.0, LogRange(0.1, 10), "around the authors'; far below, it blows up"
    )
    beta: UnitInterval | None = None

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` unless the classifier is one linear layer with a bias and a row for each
        class."""
        group = run.groups[0]
        shape = (run.data.num_classes, run.feature_width)
        is_linear = [tuple(p.shape) for p in group.head.parameters()] == [shape, shape[:1]]
        check(
            "model",
            group.name,
            is_linear,
            "pfedfda needs a classifier with a bias and a row per class; use another model",
        )

    def init_server(self, run: RunContext) -> Tensors:
        """`gaussian.means` (C, d), drawn uniformly from [0, 1), and `gaussian.covariance` (d, d),
        I: the authors' code."""
        width = run.feature_width
        draws = generator(run.config.seed, "class means")
        means = torch.rand(run.data.num_classes, width, generator=draws)
        return {"gaussian.means": means, "gaussian.covariance": torch.eye(width)}

    def broadcast(self, server: Server) -> Payloads:
        """Also send the Gaussians, except the initial ones, which follow from the seed."""
        payloads = super().broadcast(server)
        if server.run.server.uploaded:
            for payload in payloads.values():
                payload.extra |= {name: server.memory[f"gaussian.{name}"] for name in NAMES}
        return payloads

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return one phase that trains the body, with the classifier of the received Gaussians."""
        write_classifier(client, client["model"], Gaussians.of(client.run.server.memory))
        return [Phase(trains=client.mask(lambda b: not b.head))]

    def beside(self) -> dict[str, Beside]:
        return {
            "means": Beside("gaussians", "mean feature of each class"),
            "covariance": Beside("gaussians", "covariance of features", "covariance"),
        }

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Upload the body and the mixed Gaussians of its features."""
        upload = super().upload(client, payload)
        gaussians = self.adapted(client, client["model"])
        upload.extra["means"] = gaussians.means.float()
        upload.extra["covariance"] = gaussians.covariance.float()
        return upload

    def aggregate(self, server: Server) -> None:
        """Average the bodies and the Gaussians by samples."""
        super().aggregate(server)
        shares = server.shares(server.answered)
        for name in NAMES:
            uploads = torch.stack([server.statistics[c][name] for c in server.answered]).double()
            server.memory[f"gaussian.{name}"] = torch.tensordot(shares, uploads, 1).float()

    def personal(self, client: Client) -> Tensor:
        """Return a copy of the model with the classifier of Gaussians mixed for its body."""
        vector = client["model"].clone()
        return write_classifier(client, vector, self.adapted(client, vector, LEAST))

    def adapted(
        self,
        client: Client,
        vector: Tensor,
        least: int = 1,
    ) -> Gaussians:
        """Return the server's Gaussians, moved by beta towards those of the client's training
        features under `vector` (D,); the server's own if the client has no training data.

        Args:
            client: whose data are used.
            vector: the model that gives the features.
            least: a class with fewer samples keeps the server's mean; its samples still count for
                the covariance.
        """
        received = Gaussians.of(client.run.server.memory)
        if not len(client.data.train):
            return received
        features, _, labels = zip(*client.passes(client.data.train, vector), strict=True)
        z = torch.cat(features).cpu().double()
        y = torch.cat(labels).cpu()
        if self.beta is None:
            beta = fitted_beta(z, y, received, prior_of(client), self.ridge)
        else:
            beta = torch.full((2,), self.beta, dtype=torch.float64)
        estimate = estimate_gaussians(z, y, received, self.ridge)
        counts = y.bincount(minlength=len(received.means))
        means = torch.where(counts[:, None] >= least, estimate.means, received.means)
        return received.towards(Gaussians(means, estimate.covariance), beta)


SHRINK = 1e-4
"""Weight of the mean variance in a covariance before its inversion, and a number added to class
shares: the authors' code."""


LEAST = 3
"""Smallest number of samples with which a class is scored by its own mean: the authors' code."""


STEPS = 10
"""Greatest number of L-BFGS steps: the authors' code."""


@dataclass(frozen=True)
class Gaussians:
    """Class means (C, d) and one covariance (d, d)."""

    means: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, memory: Tensors) -> Gaussians:
        """Read the Gaussians from the server's memory."""
        return cls(memory["gaussian.means"].double(), memory["gaussian.covariance"].double())

    def towards(self, estimate: Gaussians, beta: Tensor) -> Gaussians:
        """Return beta estimate + (1 - beta) self; `beta` (2,) has one number for the means and one
        for the covariance."""
        of_means, of_covariance = beta
        means = of_means * estimate.means + (1 - of_means) * self.means
        scaled = of_covariance * estimate.covariance
        return Gaussians(means, scaled + (1 - of_covariance) * self.covariance)

    def classifier(self, prior: Tensor) -> tuple[Tensor, Tensor]:
        """Return weight (C, d) and bias (C,) of the linear discriminant for class shares `prior`
        (C,).

        W = means S^-1 and b = -diag(W means^T) / 2 + log prior, where S is the covariance, shrunk
        by `SHRINK`.
        """
        S = self.covariance
        eye = torch.eye(len(S), dtype=torch.float64)
        S = (1 - SHRINK) * S + SHRINK * S.trace() / len(S) * eye
        weight = torch.linalg.solve(S, self.means.T).T
        return weight, -0.5 * (weight * self.means).sum(1) + prior.log()


def prior_of(client: Client) -> Tensor:
    """Return class shares of the client's training samples, (C,), with `SHRINK` added to each."""
    counts = client.class_counts.double()
    shares = counts / counts.sum().clamp_min(1) + SHRINK
    return shares / shares.sum()


def write_classifier(client: Client, vector: Tensor, gaussians: Gaussians) -> Tensor:
    """Write the classifier of `gaussians`, with the client's class shares, into the head of
    `vector` (D,), in place; return `vector`."""
    weight, bias = gaussians.classifier(prior_of(client))
    for block in client.layout.blocks:
        if block.head:
            part = weight if len(block.shape) == 2 else bias
            vector[block.columns] = part.reshape(-1).to(vector)
    return vector


def estimate_gaussians(
    z: Tensor,
    y: Tensor,
    received: Gaussians,
    ridge: float,
) -> Gaussians:
    """Estimate class means, and the pooled covariance scatter / (n - 1) + ridge I.

    Args:
        z: features (n, d).
        y: labels (n,).
        received: gives the mean of a class without samples.
        ridge: see `PFedFDA`.
    """
    counts = y.bincount(minlength=len(received.means))[:, None]
    sums = torch.zeros_like(received.means).index_add_(0, y, z)
    means = torch.where(counts > 0, sums / counts.clamp_min(1), received.means)
    deviations = z - means[y]
    scatter = deviations.T @ deviations
    eye = torch.eye(len(scatter), dtype=torch.float64)
    return Gaussians(means, scatter / max(len(z) - 1, 1) + ridge * eye)


def fitted_beta(
    z: Tensor,
    y: Tensor,
    received: Gaussians,
    prior: Tensor,
    ridge: float,
) -> Tensor:
    """Return beta (2,) in [0, 1], the weights of a client's own estimates, by L-BFGS from 1/2 on
    the cross entropy of two folds.

    Each fold is scored by Gaussians between `received` and those of the other fold. Without a class
    of two samples, beta is 0.

    Args:
        z: features (n, d).
        y: labels (n,).
        received: the server's Gaussians.
        prior: class shares, (C,).
        ridge: see `PFedFDA`.
    """
    from scipy.optimize import minimize

    folds = []
    for fit, test in halves(y):
        folds.append((estimate_gaussians(z[fit], y[fit], received, ridge), z[test], y[test]))
    if not folds:
        return torch.zeros(2, dtype=torch.float64)

    def value(beta: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.tensor(beta, requires_grad=True)
        total = torch.zeros((), dtype=torch.float64)
        with torch.enable_grad():
            for estimate, x, labels in folds:
                weight, bias = received.towards(estimate, leaf).classifier(prior)
                total = total + cross_entropy(x @ weight.T + bias, labels)
        [slope] = torch.autograd.grad(total, leaf)
        return total.item(), slope.numpy()

    options = {"maxiter": STEPS}
    bounds = [(0, 1), (0, 1)]
    best = minimize(value, [0.5, 0.5], jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return torch.tensor(best.x)


def halves(y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Divide samples with labels y (n,) into two folds; return for each (indices to estimate on,
    indices to score).

    The folds take every second sample of the classes with at least two samples; the list is empty
    if there is no such class.
    """
    order = y.argsort(stable=True)
    order = order[y.bincount()[y[order]] >= 2]
    if not len(order):
        return []
    even = order[::2]
    odd = order[1::2]
    return [(even, odd), (odd, even)]
