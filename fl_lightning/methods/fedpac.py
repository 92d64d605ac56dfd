"""FedPAC: Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier
Collaboration. ICLR 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from fl_lightning.callbacks.relations import Relation, SampleCounts
from fl_lightning.configuration.ranges import NonNegativeFloat, PositiveFloat, ShareBelow1
from fl_lightning.configuration.search import LogRange, searched
from fl_lightning.core import (
    Batch,
    Beside,
    Client,
    Module,
    Payload,
    Phase,
    Rule,
    RunContext,
    Server,
    Tensors,
)
from fl_lightning.methods.classmeans import ClassMeans
from fl_lightning.methods.common import collaboration
from fl_lightning.methods.common.class_means import distance_to_means


@dataclass(frozen=True)
class FedPAC(ClassMeans):
    """A shared body whose features are drawn to global class means, and classifiers mixed for each
    client.

    Client: the classifier first, then the body on CE + lam MSE(z, mean of the class). Server:
        bodies by samples; client
    i's classifier is sum_j a_ij of all that have uploaded, where a_i minimises a^T (diag V + D_i) a
    on the simplex, D_i[j, l] = <H_i - H_j, H_i - H_l>. H_j (class means times class shares) and V_j
    (variance) are of the features of j's data under the body that it last received. Who has not
    uploaded keeps its own.

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
        """The alignment."""
        return self.lam > 0

    def relation(self) -> Relation:
        """Whose classifiers are mixed."""
        return collaboration.Collaboration(self.least)

    def init_server(self, run: RunContext) -> dict[str, Tensor]:
        """With it the moments of every client's features."""
        return super().init_server(run) | collaboration.no_moments(run)

    def broadcast(self, server: Server) -> dict[int, Payload]:
        """The mean body under the client's mix of classifiers."""
        sent = super().broadcast(server)
        collaboration.under_mean_body(server, sent)
        return sent

    def phases(self, client: Client, payload: Payload) -> Iterator[Phase]:
        """Moments of what has been received, then the classifier, then the body."""
        client.scratch |= collaboration.feature_moments(client)
        head = client.mask(lambda b: b.head)
        yield Phase(trains=head, epochs=self.head_epochs, lr=self.head_lr, purpose="head")
        yield Phase(trains=~head, objective=self.objective(client, payload))

    def loss(self, means: Tensors, module: Module, batch: Batch) -> Tensor:
        """And lam times the mean squared distance to the class's mean; classes that nobody told add
        0."""
        task: Tensor = module.task_loss(batch)
        return task + self.lam * distance_to_means(module.features, batch[1], means, "squared")

    def beside(self) -> dict[str, Beside]:
        """Declares what `upload` adds to the model."""
        moments = {
            "moments.means": Beside(
                "class_means", "mean features of each class times the class's share", "rows"
            ),
            "moments.V": Beside("variance", "variance of features", "nonnegative"),
        }
        return super().beside() | moments

    def upload(self, client: Client, payload: Payload) -> Payload:
        """With it the moments, of the classes that are told."""
        sent = super().upload(client, payload)
        sent.extra["moments.means"] = client.scratch["moments.means"][
            sent.statistics["classes"].long()
        ]
        sent.statistics["moments.V"] = client.scratch["moments.V"]
        return sent

    def aggregate(self, server: Server) -> None:
        """The mean body, and what is known of classes and clients."""
        super().aggregate(server)
        server["model"] = server.only.mean_by(SampleCounts())
        server.memory.update(collaboration.lay_out(server.memory, server.statistics))
