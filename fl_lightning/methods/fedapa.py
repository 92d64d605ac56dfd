"""FedAPA: Sun, Sun, Pan, Fu, Guo: FedAPA: Server-side Gradient-Based Adaptive Personalized
Aggregation for Federated Learning on Heterogeneous Data. IJCAI 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_lightning.callbacks.relations import Relation
from fl_lightning.configuration.ranges import NonNegativeFloat, ShareBelow1
from fl_lightning.configuration.search import LogRange, searched
from fl_lightning.core import Block, Payload, Rule, Server, Traits
from fl_lightning.core.vectors import last_received, products
from fl_lightning.methods.base import Method, Scope
from fl_lightning.methods.common.stepped_rows import SteppedRows


@dataclass(frozen=True)
class FedAPA(Method):
    """Every client begins from its own mix m_i = sum_j a_ij w_j; the server learns a_i by how
    training moved the mix.

    When client i has trained m_i to w_i, a_ij steps down <w_j, m_i - w_i>, the gradient of ||m_i -
    w_i||^2 / 2 with w_i constant; it stays within [0, 1]. Before the next mix a_ii is set to 1 and
    the row divided by its sum.

    Args:
        eta: step on the weights. 0.01: the authors' config.
        momentum: of that step. 0: the paper's update; 0.9: the authors' code.
        classifier: each client's `own` (the authors' code), or `mixed` with the body.
    """

    traits = Traits(
        family="mixing",
        judge="after",
        several=False,
        newcomers=Rule(
            "the mean of all, then its own mix by weights that it has moved; local training",
            remembers=True,
        ),
    )

    eta: NonNegativeFloat = searched(0.01, LogRange(0.001, 0.1), "a decade around the authors'")
    momentum: ShareBelow1 = 0.0
    classifier: Literal["own", "mixed"] = "own"

    def relation(self) -> Relation:
        """Rows that step."""
        return SteppedRows(self.eta, self.momentum)

    def scope(self, block: Block) -> Scope:
        """Parameters travel, the classifier's if it is mixed; running statistics stay: mixes of
        them fit no model."""
        return (
            "personal"
            if block.kind == "buffer" or (block.head and self.classifier == "own")
            else "shared"
        )

    def broadcast(self, server: Server) -> dict[int, Payload]:
        """The mix; the models of the cohort that are mixed are kept until the weights have learned
        of it."""
        sent, group = super().broadcast(server), server.only
        server.scratch |= {
            c: model.clone() for c, model in last_received(group, group.here).items()
        }
        return sent

    def aggregate(self, server: Server) -> None:
        """A step of the rows of those who have answered."""
        group, relation = server.only, server.run.relation
        if server.answered:
            assert group.weighed is not None and isinstance(relation, SteppedRows)
            sources = group.weighed.sources
            relation.descend(
                server, sources, -products(group, server.answered, sources, server.scratch).sum(0)
            )
