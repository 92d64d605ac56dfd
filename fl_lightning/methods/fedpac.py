"""FedPAC: Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier
Collaboration. ICLR 2023.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fl_lightning.callbacks.simplex import simplex_minimum
from fl_lightning.core.layout import copy_columns
from fl_lightning.foundation.device import wide
from fl_lightning.methods import (
    Batch,
    Beside,
    Client,
    LogRange,
    Module,
    NonNegativeFloat,
    Payload,
    Payloads,
    Phase,
    Phases,
    PositiveFloat,
    Relation,
    RelationInputs,
    RelationView,
    Rule,
    RunContext,
    SampleCounts,
    Server,
    ShareBelow1,
    Tensors,
    searched,
)
from fl_lightning.methods.classmeans import ClassMeans, class_means, distance_to_means


@dataclass(frozen=True)
class FedPAC(ClassMeans):
    """A shared body whose features are pulled towards global class means, and a mix of classifiers
    for each client.

    A client trains the classifier first, then the body on CE + lam MSE(z, mean of the class). The
    server averages bodies by samples. Client i's classifier is sum_j a_ij times client j's, over
    all clients j that have uploaded. The weights a_i minimise a^T (diag V + D_i) a over the
    simplex, with D_i[j, l] = <H_i - H_j, H_i - H_l>.

    H_j and V_j describe the features of client j's data, before it trains the received body: H_j
    holds the mean of each class times the class's share of the samples, V_j is the variance of this
    estimate. A client that has not uploaded yet keeps its own classifier.

    Args:
        lam: weight of the alignment. 1: paper.
        head_epochs: epochs of the classifier. 1: paper.
        head_lr: learning rate of the classifier; null: the round's (the authors' code: 0.1, beside
            0.01 or 0.02 for the body).
        least: smaller a_ij count as 0. 0: paper (the authors' code: 0.001).
    """

    traits = replace(
        ClassMeans.traits,
        family="partial sharing",
        several=False,
        newcomers=Rule(
            "global body with its own mix of classifiers, then local training", remembers=True
        ),
    )

    lam: NonNegativeFloat = searched(1.0, LogRange(0.1, 10), "a decade around the paper's")
    head_epochs: PositiveFloat = 1
    head_lr: PositiveFloat | None = None
    least: ShareBelow1 = 0.0

    @property
    def uses_means(self) -> bool:
        """Whether `lam` is above 0."""
        return self.lam > 0

    def relation(self) -> Relation:
        """Return the weights by which classifiers are mixed."""
        return Collaboration(self.least)

    def init_server(self, run: RunContext) -> Tensors:
        """Zeros for class means and for the moments of every client's features: H_i,
        `moments.means` (N, C, d), and V_i, `moments.V` (N,)."""
        means = torch.zeros(run.clients, run.data.num_classes, run.feature_width)
        return super().init_server(run) | {MEANS: means, VARIANCE: torch.zeros(run.clients)}

    def broadcast(self, server: Server) -> Payloads:
        """Send each client the mean body with its own mix of classifiers."""
        payloads = super().broadcast(server)
        group = server.only
        body = group.layout.segments(group.layout.mask(lambda b: not b.head))
        for payload in payloads.values():
            copy_columns(payload.vector, group["model"], body)
        if (mixing := group.weighed) is not None:
            rows = mixing.weights.transpose(0, 1).float().numpy()
            head = [group.layout.head]
            server.view = RelationView(rows, mixing.receivers, head, mixing.sources)
        return payloads

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Measure the moments of the received model's features; then train the classifier, then the
        body."""
        client.scratch |= feature_moments(client)
        head = client.mask(lambda b: b.head)
        yield Phase(trains=head, epochs=self.head_epochs, lr=self.head_lr, purpose="head")
        yield Phase(trains=~head, objective=self.objective(client, payload))

    def loss(
        self,
        means: Tensors,
        module: Module,
        batch: Batch,
    ) -> Tensor:
        """Return the task loss plus lam times the mean squared distance to the class's mean, shape
        (). Samples of a class without a mean add 0."""
        task = module.task_loss(batch)
        return task + self.lam * distance_to_means(module.features, batch[1], means, "squared")

    def beside(self) -> dict[str, Beside]:
        meaning = "mean features of each class times the class's share"
        return super().beside() | {
            MEANS: Beside("class_means", meaning, "rows"),
            VARIANCE: Beside("variance", "variance of features", "nonnegative"),
        }

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Also upload the moments: H of the classes whose means are uploaded, and V."""
        upload = super().upload(client, payload)
        upload.extra[MEANS] = client.scratch[MEANS][upload.statistics["classes"].long()]
        upload.statistics[VARIANCE] = client.scratch[VARIANCE]
        return upload

    def aggregate(self, server: Server) -> None:
        """Average the bodies and the class means, and store the moments."""
        super().aggregate(server)
        server["model"] = server.only.mean_by(SampleCounts())
        memory = server.memory
        means = memory[MEANS].clone()
        memory[VARIANCE] = memory[VARIANCE].clone()
        for client, upload in server.statistics.items():
            means[client] = 0
            means[client, upload["classes"].long()] = upload[MEANS].to(means)
            memory[VARIANCE][client] = upload[VARIANCE]
        memory[MEANS] = means


MEANS, VARIANCE = "moments.means", "moments.V"


def feature_moments(client: Client) -> Tensors:
    """Measure H (C, d), where H_k is the mean feature of class k times the class's share p_k, and
    V, shape (), with the client's model and data.

    V = (mean ||z||^2 - ||H||^2) / n, where ||H||^2 sums over all classes.
    """
    device = client.run.device
    squares = torch.zeros((), dtype=wide(device), device=device)

    def add_squares(z: Tensor) -> Tensor:
        squares.add_(z.to(squares.dtype).square().sum())
        return z

    means = class_means(client, transform=add_squares)
    n = means["counts"].sum()
    H = means["features"] * (means["counts"] / n)[:, None]
    variance = (squares.cpu() / n - H.double().square().sum()) / n
    return {MEANS: H, VARIANCE: variance.float()}


def collaborators(H: Tensor, V: Tensor, i: int) -> Tensor:
    """Return client i's weights (n,) of all clients: argmin of a^T (diag V + D) a on the simplex,
    with D_jl = <H_i - H_j, H_i - H_l>.

    Args:
        H: moments of all clients (n, C d), float64.
        V: (n,), float64.
        i: index of the client.
    """
    differences = H[i] - H
    return simplex_minimum(torch.diag(V.clamp_min(0)) + differences @ differences.T)


@dataclass
class Collaboration(Relation):
    """Mixes the classifiers of all clients that have uploaded, with each client's weights from
    `collaborators`.

    Args:
        least: smaller weights count as 0.
    """

    least: float
    sources = "uploaded"

    def weights(self, inputs: RelationInputs) -> Tensor:
        """Return weights (1, m, n); a client that has uploaded no moments gets its own
        classifier."""
        H = inputs.memory[MEANS][inputs.sources].double().flatten(1)
        V = inputs.memory[VARIANCE][inputs.sources].double()
        rows = torch.eye(len(inputs.sources), dtype=torch.float64)[inputs.places]
        for row, place in zip(rows, inputs.places.tolist(), strict=True):
            if H[place].any():
                weights = collaborators(H, V, place)
                # the greatest weight is kept even if it is below `least`
                least = weights.max().clamp_max(self.least)
                weights = torch.where(weights >= least, weights, 0.0)
                row.copy_(weights / weights.sum())
        return rows[None]
