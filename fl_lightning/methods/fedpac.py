"""FedPAC: Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier Collaboration.
ICLR 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fl_lightning.callbacks.relations import Relation, SampleCounts
from fl_lightning.config import check
from fl_lightning.core import Client, Payload, Phase, RelationView, Rule, Run, Server
from fl_lightning.core.layout import copy_columns
from fl_lightning.knowledge.class_means import distance_to_means
from fl_lightning.knowledge.collaboration import Collaboration, feature_moments, lay_out, no_moments
from fl_lightning.methods.base import check_above_0, check_least
from fl_lightning.methods.classmeans import Batch, ClassMeans


@dataclass(frozen=True)
class FedPAC(ClassMeans):
    """A shared body whose features are drawn to global class means, and classifiers mixed for each client.

    Client: the classifier first, then the body on CE + lam MSE(z, mean of the class). Server: bodies by samples; client
    i's classifier is sum_j a_ij of all that have uploaded, where a_i minimises a^T (diag V + D_i) a on the simplex,
    D_i[j, l] = <H_i - H_j, H_i - H_l>. H_j (class means times class shares) and V_j (variance) are of the features of
    j's data under the body that it last received. Who has not uploaded keeps its own.

    Args:
        lam: weight of the alignment. 1: paper.
        head_epochs: of the classifier. 1: paper.
        head_lr: its learning rate; null: the round's. 0.1: the authors' code.
        least: smaller a_ij count as 0. 0: paper (the authors' code: 0.001).
    """

    family = "partial sharing"
    several = False
    newcomers = Rule("global body under its own mix of classifiers, then local training", remembers=True)
    client_memory = True
    server_models = 1

    lam: float = 1.0
    head_epochs: float = 1
    head_lr: float | None = 0.1
    least: float = 0.0

    def __post_init__(self) -> None:
        check_least(self, lam=0)
        check_above_0(self, "head_epochs", "head_lr")
        check("method.least", self.least, 0 <= self.least < 1, "it must lie in [0, 1)")

    @property
    def adds(self) -> bool:
        """The alignment."""
        return self.lam > 0

    def relation(self) -> Relation:
        """Whose classifiers are mixed."""
        return Collaboration(self.least)

    def init_server(self, run: Run) -> dict[str, Tensor]:
        """With it the moments of every client's features."""
        return super().init_server(run) | no_moments(run)

    def broadcast(self, server: Server) -> dict[int, Payload]:
        """The mean body under the client's mix of classifiers."""
        sent, layout = super().broadcast(server), server.only.layout
        for payload in sent.values():
            copy_columns(payload.vector, server["model"], layout.segments(layout.mask(lambda b: not b.head)))
        if (mixed := server.only.weighed) is not None:
            rows = mixed.weights.transpose(0, 1).float().numpy()
            server.view = RelationView(rows, mixed.receivers, [layout.head], mixed.sources)
        return sent

    def phases(self, client: Client, payload: Payload) -> Iterator[Phase]:
        """Moments of what has been received, then the classifier, then the body."""
        client.memory.update(feature_moments(client))
        head = client.mask(lambda b: b.head)
        yield Phase(trains=head, epochs=self.head_epochs, lr=self.head_lr, purpose="head")
        yield Phase(trains=~head, objective=self.objective(client, payload))

    def loss(self, means: dict[str, Tensor], module: Any, batch: Batch) -> Tensor:
        """And lam times the mean squared distance to the class's mean; classes that nobody told add 0."""
        task: Tensor = module.task_loss(batch)
        return task + self.lam * distance_to_means(module.features, batch[1], means, "squared")

    def upload(self, client: Client, payload: Payload) -> Payload:
        """With it the moments, of the classes that are told."""
        sent = super().upload(client, payload)
        sent.extra["moments.means"] = client.memory["moments.means"][sent.statistics["classes"].long()]
        sent.statistics["moments.V"] = client.memory["moments.V"]
        return sent

    def aggregate(self, server: Server) -> None:
        """The mean body, and what is known of classes and clients."""
        super().aggregate(server)
        server["model"] = server.only.mean_by(SampleCounts())
        server.memory.update(lay_out(server.memory, server.statistics))
