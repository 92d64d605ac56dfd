"""Relations that are graphs of clients: HeurFedAMP's and pFedGraph's by cosines of models, FedU's
given in advance."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.callbacks.relations import Relation, check_finite
from fl_lightning.callbacks.simplex import simplex_rows
from fl_lightning.core import RelationInputs, RunContext, Tensors
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.rng import numpy_rng

TINY = 1e-3
"""A vector shorter than this share of the longest counts as without direction, since 32-bit inner
products round at some 1e-7 of the squared lengths. The change of a client that has not uploaded yet
is 0 up to such rounding."""
WEAKEST = 1e-9
"""The proximal weight that stands for 0: it only decides between cosines that differ by less than
it, and 64 bits suffice for its inverse."""


def cosines(G: Tensor) -> Tensor:
    """Return the cosines (n, n) of the vectors with inner products `G` (n, n); 0 for a vector that
    is 0, or shorter than `TINY` times the longest.

    Raises:
        RunFailed: a product is not finite.
    """
    check_finite(G)
    norm = G.diagonal().clamp_min(0).sqrt()
    has_direction = norm > TINY * norm.max()
    positive = norm.clamp_min(1e-300)
    cosine = G / positive / positive[:, None]
    return torch.where(has_direction & has_direction[:, None], cosine, 0.0)


@dataclass
class CosineAttention(Relation):
    """HeurFedAMP's relation: a client's weight on itself is fixed, and the other clients share the
    rest by softmax(sigma cos).

    Args:
        own: the receiver's weight on itself, xi_ii.
        sigma: sharpness of the softmax.
        sources: the clients whose last uploads are mixed, see `Relation.sources`.
    """

    several = True
    pair_flops = 9

    own: float
    sigma: float
    sources: Literal["cohort", "known", "uploaded"] = "known"

    def weights(self, inputs: RelationInputs) -> Tensor:
        """Return the receivers' rows, (1, m, n)."""
        identity = torch.eye(len(inputs.sources), dtype=torch.float64)
        if len(identity) == 1:
            return identity[inputs.places][None]
        scores = self.sigma * cosines(inputs.gram().total().full[0])
        others = torch.softmax(scores.fill_diagonal_(-torch.inf), 1)
        rows = (1 - self.own) * others + self.own * identity
        return rows[inputs.places][None]


@dataclass
class CollaborationGraph(Relation):
    """pFedGraph's rows, which minimise alpha ||r - p||^2 - sum_j r_j cos(i, j) over the simplex.

    They are the projection of p + cos_i / (2 alpha): p are the shares of the training samples, and
    cos_i the cosines between the changes of the clients' parameters since the initial model.

    Args:
        alpha: weight of the distance from p. 0 counts as `WEAKEST`: the most similar clients get
            all of the weight; clients equally similar share it in proportion to p.
        near: threshold: greater cosines count as 1.
        sources: the clients whose last uploads are mixed, see `Relation.sources`.
    """

    several = True
    pair_flops = 10

    alpha: float
    near: float
    sources: Literal["cohort", "known", "uploaded"] = "uploaded"

    def weights(self, inputs: RelationInputs) -> Tensor:
        """Return the receivers' rows, (1, m, n)."""
        similarity = cosines(inputs.gram("initial").total().full[0])
        similarity = torch.where(similarity > self.near, 1.0, similarity)
        shares = inputs.samples / inputs.samples.sum()
        weight = 2 * max(self.alpha, WEAKEST)
        return simplex_rows(weight, weight * shares + similarity)[inputs.places][None]


def random_graph(clients: int, seed: int) -> Tensor:
    """Return FedU's graph of clients on MNIST, which is also FEDORA's random similarity: symmetric
    (N, N), float64.

    Each number is the mean of two draws of U(0, 1), or 0 if that is below 0.25 (the authors' code
    of FedU); the diagonal is 0.
    """
    drawn = torch.from_numpy(numpy_rng(seed, "fedu graph").random((clients, clients)))
    a = (drawn + drawn.T) / 2
    return torch.where(a < 0.25, 0.0, a).fill_diagonal_(0)


@dataclass
class Laplacian(Relation):
    """FedU's relation, a step on the graph's Laplacian: w_k - gamma sum_l a_kl (w_k - w_l), l in
    the cohort.

    Args:
        gamma: size of the step.
        graph: a_kl: `random` (`random_graph`), or `complete`: all 1.
    """

    several = True
    pair_flops = 2

    gamma: float
    graph: Literal["random", "complete"]

    def init_server(self, run: RunContext) -> Tensors:
        """Return `graph` (N, N): a, symmetric, 0 on the diagonal."""
        if self.graph == "random":
            return {"graph": random_graph(run.clients, run.config.seed)}
        complete = torch.ones(run.clients, run.clients, dtype=torch.float64)
        return {"graph": complete.fill_diagonal_(0)}

    def on_fit_start(self, run: RunContext) -> None:
        """Raise `BadInput` if own weights could turn negative in a cohort."""
        neighbours = run.server.memory["graph"].topk(run.cohort_size - 1).values
        most = float(neighbours.sum(1).max())
        if self.gamma * most > 1:
            requirement = f"above {1 / most:.4g} own weights turn negative on this graph; lower it"
            raise BadInput("method.gamma", self.gamma, requirement)

    def weights(self, inputs: RelationInputs) -> Tensor:
        """Return the receivers' rows of I - gamma (D - a), (1, m, n)."""
        rows = self.gamma * inputs.memory["graph"][inputs.sources][:, inputs.sources]
        return (rows + torch.diag(1 - rows.sum(1)))[inputs.places][None]
