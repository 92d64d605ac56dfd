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
    """A shared body whose features are drawn to global class means, and classifiers mixed for each
    client.

    Client: the classifier first, then the body on CE + lam MSE(z, mean of the class). Server:
    bodies by samples; client i's classifier is sum_j a_ij of all that have uploaded, where a_i
    minimises a^T (diag V + D_i) a on the simplex, D_i[j, l] = <H_i - H_j, H_i - H_l>. H_j (class
    means times class shares) and V_j (variance) are of the features of j's data under the body that
    it last received. Who has not uploaded keeps its own.

    Args:
        lam: weight of the alignment. 1: paper.
        head_epochs: of the classifier. 1: paper.
        head_lr: its learning rate; null: the round's (the authors' code: 0.1, beside 0.01 or 0.02
            for the body).
        least: smaller a_ij count as 0. 0: paper (the authors' code: 0.001).
    """

    traits = replace(
        ClassMeans.traits,
        family="partial sharing",
        several=False,
        newcomers=Rule(
            "global body under its own mix of classifiers, then local training", remembers=True
        ),
    )

    lam: NonNegativeFloat = searched(1.0, LogRange(0.1, 10), "a decade around the paper's")
    head_epochs: PositiveFloat = 1
    head_lr: PositiveFloat | None = None
    least: ShareBelow1 = 0.0

    @property
    def adds(self) -> bool:
        """Whether class means pull features."""
        return self.lam > 0

    def relation(self) -> Relation:
        """Whose classifiers are mixed."""
        return Collaboration(self.least)

    def init_server(self, run: RunContext) -> Tensors:
        """Class means, and the moments of every client's features: H_i, `moments.means` (N, C, d),
        and V_i, `moments.V` (N,)."""
        means = torch.zeros(run.clients, run.data.num_classes, run.feature_width)
        return super().init_server(run) | {MEANS: means, VARIANCE: torch.zeros(run.clients)}

    def broadcast(self, server: Server) -> Payloads:
        """The mean body under the client's mix of classifiers."""
        payloads = super().broadcast(server)
        group = server.only
        body = group.layout.segments(group.layout.mask(lambda b: not b.head))
        for payload in payloads.values():
            copy_columns(payload.vector, group["model"], body)
        if (mixed := group.weighed) is not None:
            rows = mixed.weights.transpose(0, 1).float().numpy()
            head = [group.layout.head]
            server.view = RelationView(rows, mixed.receivers, head, mixed.sources)
        return payloads

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Moments of what has been received, then the classifier, then the body."""
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
        """The task loss, and lam times the mean squared distance to the class's mean, shape ();
        classes without a mean add 0."""
        task = module.task_loss(batch)
        return task + self.lam * distance_to_means(module.features, batch[1], means, "squared")

    def beside(self) -> dict[str, Beside]:
        """Declares what `upload` adds to the model."""
        words = "mean features of each class times the class's share"
        return super().beside() | {
            MEANS: Beside("class_means", words, "rows"),
            VARIANCE: Beside("variance", "variance of features", "nonnegative"),
        }

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Also upload the moments, of the classes whose means are uploaded."""
        upload = super().upload(client, payload)
        upload.extra[MEANS] = client.scratch[MEANS][upload.statistics["classes"].long()]
        upload.statistics[VARIANCE] = client.scratch[VARIANCE]
        return upload

    def aggregate(self, server: Server) -> None:
        """The mean body, and the uploads' class means and moments."""
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
    """H (C, d), where H_k is p_k times the mean feature of class k, and V, shape (), of the
    client's model and data.

    V = (mean ||z||^2 - ||H||^2) / n; the squares of all classes' H_k are summed.
    """
    device = client.run.device
    squares = torch.zeros((), dtype=wide(device), device=device)

    def noted(z: Tensor) -> Tensor:
        squares.add_(z.to(squares.dtype).square().sum())
        return z

    means = class_means(client, bounded=noted)
    n = means["counts"].sum()
    H = means["features"] * (means["counts"] / n)[:, None]
    variance = (squares.cpu() / n - H.double().square().sum()) / n
    return {MEANS: H, VARIANCE: variance.float()}


def collaborators(H: Tensor, V: Tensor, i: int) -> Tensor:
    """Client i's weights (n,) on all: argmin of a^T (diag V + D) a on the simplex, D_jl = <H_i -
    H_j, H_i - H_l>.

    `H` (n, C d) and `V` (n,) in float64.
    """
    differences = H[i] - H
    return simplex_minimum(torch.diag(V.clamp_min(0)) + differences @ differences.T)


@dataclass
class Collaboration(Relation):
    """Every client's mix of the classifiers of all that have uploaded, by `collaborators`.

    Args:
        least: smaller weights count as 0.
    """

    least: float = 0.0
    sources = "uploaded"

    def weights(self, inputs: RelationInputs) -> Tensor:
        """Weights (1, m, n); a client that has uploaded none keeps its own."""
        H = inputs.memory[MEANS][inputs.sources].double().flatten(1)
        V = inputs.memory[VARIANCE][inputs.sources].double()
        rows = torch.eye(len(inputs.sources), dtype=torch.float64)[inputs.places]
        for row, place in zip(rows, inputs.places.tolist(), strict=True):
            if H[place].any():
                weights = collaborators(H, V, place)
                # the greatest weight stays, however high `least` is
                least = weights.max().clamp_max(self.least)
                weights = torch.where(weights >= least, weights, 0.0)
                row.copy_(weights / weights.sum())
        return rows[None]
