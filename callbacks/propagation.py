"""FEDORA's relation: models propagate over a graph, whose edges are similarities of the clients'
data subspaces.

Theta^ = (1 - kappa)(I - kappa Pi)^-1 Theta with Pi = D^-1 W, kappa = alpha / (1 + alpha) (Wu et
al., KDD 2023, Eq. 6).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fl_lightning.callbacks.graphs import random_graph
from fl_lightning.callbacks.relations import Relation
from fl_lightning.configuration.config import check
from fl_lightning.core import Client, RelationInputs, RunContext, Tensors
from fl_lightning.data.part import Part


def basis(
    part: Part,
    directions: int,
    classes: int,
) -> Tensor:
    """Return a basis of a client's data: the first `directions` left singular vectors of [flattened
    x; one-hot y] of all samples, uncentred.

    The target of a regression is used as it is: one row (the paper does not say).

    Args:
        part: training data.
        directions: p, number of vectors; if there are fewer samples, the rest are zero columns.
        classes: width of the one-hot labels; 0 leaves labels out, and none is read.

    Returns:
        Shape (dim + classes, p), float64, on the CPU.
    """
    columns = []
    for x, y in part.batches(4096):
        flat = x.flatten(1)
        if classes:
            label = y[:, None] if y.is_floating_point() else one_hot(y, classes)
            flat = torch.cat([flat.double(), label.double()], 1)
        columns.append(flat.cpu().double())
    matrix = torch.cat(columns).T
    # eigenvectors of the smaller side: far cheaper than a decomposition of the whole matrix
    if matrix.shape[0] > matrix.shape[1]:
        values, right = torch.linalg.eigh(matrix.T @ matrix)
        candidates = matrix @ right.flip(1)[:, :directions]
    else:
        values, vectors = torch.linalg.eigh(matrix @ matrix.T)
        candidates = vectors.flip(1)[:, :directions]
    vectors = matrix.new_zeros(len(matrix), directions)
    rank = min(candidates.shape[1], int((values > 1e-12 * values.max()).sum()))
    if rank:
        vectors[:, :rank] = torch.linalg.qr(candidates[:, :rank])[0]
        # a direction has no sign: the same on every machine
        vectors *= torch.where(vectors.sum(0) < 0, -1.0, 1.0)
    return vectors


def similarity(U: Tensor, V: Tensor) -> Tensor:
    """Return the sums of the cosines of principal angles between subspaces `U` (n, dim, p) and `V`
    (m, dim, p): (n, m), 0 to p."""
    products = torch.einsum("idp,jdq->ijpq", U, V)
    return torch.linalg.svdvals(products).clamp(0.0, 1.0).sum(-1)


def propagated(
    W: Tensor,
    alpha: float,
    steps: int | None = None,
) -> Tensor:
    """Return the rows A (N, N) with Theta^ = A Theta: non-negative, each summing to 1.

    Args:
        W: similarities (N, N), non-negative; a client with a row of zeros has only itself as
            neighbour.
        alpha: weight of the propagation; kappa = alpha / (1 + alpha).
        steps: number of iterations of Theta^ <- kappa Pi Theta^ + (1 - kappa) Theta from Theta^ =
            Theta (Eq. 7); None: the fixed point.
    """
    eye = torch.eye(len(W), dtype=torch.float64)
    degree = W.sum(1, keepdim=True)
    walk = torch.where(degree > 0, W / degree.clamp_min(1e-300), eye)
    kappa = alpha / (1 + alpha)
    if steps is None:
        A = (1 - kappa) * torch.linalg.solve(eye - kappa * walk, eye)
    else:
        A = eye
        for _ in range(steps):
            A = kappa * walk @ A + (1 - kappa) * eye
    A = A.clamp_min(0.0)
    return A / A.sum(1, keepdim=True)


def neighbourhood(
    S: Tensor,
    sharpness: float,
    neighbours: int,
) -> Tensor:
    """Return exp(sharpness S) for the `neighbours` most similar *others* of each client and 0
    elsewhere, (N, N), as the authors' code does; of equal ones the lower numbers count."""
    W = torch.exp(sharpness * S).fill_diagonal_(0.0)
    order = torch.sort(W, dim=1, descending=True, stable=True).indices
    nearest = order[:, : min(neighbours, len(W) - 1)]
    return torch.zeros_like(W).scatter(1, nearest, W.gather(1, nearest))


def uploaded_basis(client: Client) -> Tensor:
    """Return the message in which a client tells the server about its data: their basis (see
    `basis`), in at least 32 bits."""
    basis: Tensor = client.run.server.memory["fedora.bases"][client.id]
    return basis.to(torch.promote_types(client.run.dtype, torch.float32))


@dataclass
class Propagation(Relation):
    """FEDORA's fixed relation: rows over the last-known models of all clients, whether or not they
    take part in the round.

    With `sources` `uploaded` the weights of clients that have not uploaded yet go to the others of
    a row, in proportion. Arguments: see `fl_lightning.methods.fedora.FEDORA`.
    """

    alpha: float
    directions: int
    sharpness: float | None
    neighbours: int
    steps: int | None
    validated: bool
    similarity: Literal["subspace", "random"]
    sources: Literal["all", "uploaded"]

    def on_fit_start(self, run: RunContext) -> None:
        """Raise `BadInput` if the proximal weight is chosen on validation data and there are
        none."""
        if self.validated:
            run.check_validation("chooses its pull on validation data")

    def init_server(self, run: RunContext) -> Tensors:
        """Return the rows `fedora.rows` (N, N), every client's `fedora.bases` (N, dim + C, p), and
        `fedora.feature_bases` of features alone.

        If similarity is `random`, there are no bases.
        """
        # the similarity of a client to itself is p, as of subspaces
        oneself = self.directions * torch.eye(run.clients, dtype=torch.float64)
        if self.similarity == "random":
            graph = random_graph(run.clients, run.config.seed)
            return {"fedora.rows": self._matrix(graph + oneself)}
        problem = "the numbers of tokens span no subspace that tells clients apart"
        requirement = f"{problem}; use random"
        check(
            "method.similarity",
            self.similarity,
            not run.data.vocabulary,
            requirement,
        )
        bases_here = {}
        features_here = {}
        for client in run.at_home(range(run.clients)):
            part = run.data.client(client, run.device, run.dtype).train
            bases_here[client] = basis(part, self.directions, run.data.num_classes)
            features_here[client] = basis(part, self.directions, 0)
        bases = _stacked(run, bases_here)
        return {
            "fedora.rows": self._matrix(similarity(bases, bases)),
            "fedora.bases": bases,
            "fedora.feature_bases": _stacked(run, features_here),
        }

    def _matrix(self, S: Tensor) -> Tensor:
        """Return the weights (N, N) by which clients of similarities `S` (N, N) receive each
        other."""
        if self.sharpness is not None:
            S = neighbourhood(S, self.sharpness, self.neighbours)
        return propagated(S, self.alpha, self.steps)

    def weights(self, inputs: RelationInputs) -> Tensor:
        """Return the receivers' rows, (1, m, n)."""
        rows = inputs.memory["fedora.rows"][inputs.receivers]
        if len(inputs.sources) < inputs.clients:
            rows = rows[:, inputs.sources]
            rows = rows / rows.sum(1, keepdim=True)
        return rows[None]

    def newcomer(
        self,
        run: RunContext,
        part: Part,
        labelled: bool,
    ) -> Tensor | None:
        """Return the weights (N,) of all clients' models in the newcomer's mix: the mean of the
        clients' rows, weighted by their similarity to the newcomer.

        This is FEDORA's propagation carried to its fixed point for a client without a model, sum_k
        w_k Theta^_k / sum_k w_k. With random similarity the result is None: the newcomer becomes
        one more client of the federation, and its similarities are drawn then.
        """
        if self.similarity == "random":
            return None
        memory = run.server.memory
        bases = memory["fedora.bases" if labelled else "fedora.feature_bases"]
        classes = run.data.num_classes if labelled else 0
        S = similarity(basis(part, self.directions, classes)[None], bases)[0]
        if self.sharpness is not None:
            S = torch.exp(self.sharpness * S)
            last = S.sort(descending=True).values[min(self.neighbours, len(S)) - 1]
            S = torch.where(last <= S, S, 0.0)
        weights = (S / S.sum()) @ memory["fedora.rows"]
        if self.sources == "all":
            return weights
        counts = torch.tensor([c in run.server.uploaded for c in range(run.clients)])
        weights = torch.where(counts, weights, 0.0)
        if not weights.sum() > 0:  # no similar client has uploaded
            weights = counts.double()
        return weights / weights.sum()


def _stacked(run: RunContext, of_rank: dict[int, Tensor]) -> Tensor:
    """Return the tensors of all ranks' clients, stacked by client number."""
    by_client = run.processes.gather_by_client(of_rank)
    return torch.stack([by_client[c] for c in range(run.clients)])
