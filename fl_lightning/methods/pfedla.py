"""pFedLA: Ma, Zhang, Guo, Xu: Layer-wised Model Aggregation for Personalized Federated Learning.
CVPR 2022."""

from __future__ import annotations

from dataclasses import dataclass

from fl_lightning.configuration.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt
from fl_lightning.configuration.search import LogRange, searched
from fl_lightning.core import Payload, Rule, Server, Traits
from fl_lightning.core.vectors import last_received, products
from fl_lightning.methods.base import OwnStatistics
from fl_lightning.methods.common.layer_rows import LayerRows


@dataclass(frozen=True)
class PFedLA(OwnStatistics):
    """Every client begins each layer from its own mix, whose weights a network on the server makes
    for it.

    The mix is sum_j alpha_ij^l theta_j^l over the models last uploaded. When a client has trained
    it, its network and embedding descend J^T (mix - trained model), the sign by which the mix comes
    nearer (popular code has the opposite one). Layers that are a client's own alone are not sent.
    Scored: the mix.

    Args:
        embedding: numbers of a client's embedding. 100: a public reimplementation (the authors'
            code was not found).
        hidden: width of the network's hidden layers. 100: the same.
        hyper_lr: its learning rate (SGD). 0.005: the same. Rows hardly move with it, since a
            network's outputs are divided by their sum (docs/methods.md).
        local_layers: layers that stay a client's own, those in which its own weight is greatest
            (HeurpFedLA's K). 0: pFedLA.
    """

    traits = Traits(
        family="hypernetwork",
        judge="before",
        several=False,
        changes_download=True,
        newcomers=Rule(
            "own mix by layer, of a network of its own; then local training", remembers=True
        ),
    )

    embedding: PositiveInt = 100
    hidden: PositiveInt = 100
    hyper_lr: NonNegativeFloat = searched(
        0.005, LogRange(0.005, 20), "from the default to where rows move"
    )
    local_layers: NonNegativeInt = 0

    def relation(self) -> LayerRows:
        """Rows that the networks make."""
        return LayerRows(self.embedding, self.hidden, self.local_layers)

    def broadcast(self, server: Server) -> dict[int, Payload]:
        """The mix; what is mixed is kept until the networks have learned of it."""
        sent, group = super().broadcast(server), server.only
        server.scratch |= {
            c: model.clone() for c, model in last_received(group, group.here).items()
        }
        for payload in sent.values():
            assert payload.own_weights is not None
            payload.sent &= payload.own_weights[group.layout.layer_of] < 1
        return sent

    def aggregate(self, server: Server) -> None:
        """A step of the networks of those who have answered."""
        group, relation = server.only, server.run.relation
        assert group.weighed is not None and isinstance(relation, LayerRows)
        sources = group.weighed.sources
        nearer = products(group, server.answered, sources, server.scratch)
        relation.descend(server, sources, -nearer, self.hyper_lr)
