"""FedAPA: Sun, Sun, Pan, Fu, Guo: FedAPA: Server-side Gradient-Based Adaptive Personalized
Aggregation for Federated Learning on Heterogeneous Data. IJCAI 2025.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.core.vectors import last_received, products
from fl_lightning.methods import (
    Block,
    LogRange,
    Method,
    NonNegativeFloat,
    Payloads,
    Relation,
    RelationInputs,
    Rule,
    RunContext,
    Scope,
    Server,
    ShareBelow1,
    Tensors,
    Traits,
    searched,
)


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
        if block.kind == "buffer" or (block.head and self.classifier == "own"):
            return "personal"
        return "shared"

    def broadcast(self, server: Server) -> Payloads:
        """The mix; the models of the cohort that are mixed are kept until the weights have learned
        of it."""
        payloads = super().broadcast(server)
        group = server.only
        server.scratch |= {
            c: model.clone() for c, model in last_received(group, group.here).items()
        }
        return payloads


@dataclass
class SteppedRows(Relation):
    """Each client's own weight is set to 1 and its row divided by the sum; others' weights step
    within [0, 1].

    Args:
        eta: the step.
        momentum: of the step, in a client's own rounds.
    """

    sources = "uploaded"
    fixed = "its rows step on from those that were mixed by, and changes of them would pile up"

    eta: float
    momentum: float

    def init_server(self, run: RunContext) -> Tensors:
        """`weights` (N, N), receivers by sources, at first 0 for others; `weights.moment` (N, N):
        their momentum."""
        zeros = torch.zeros(run.clients, run.clients, dtype=torch.float64)
        return {"weights": zeros, "weights.moment": zeros.clone()}

    def weights(self, inputs: RelationInputs) -> Tensor:
        """Shape (1, m, n)."""
        rows = inputs.memory["weights"][inputs.receivers][:, inputs.sources]
        rows[torch.arange(len(rows)), inputs.places] = 1
        return (rows / rows.sum(1, keepdim=True))[None]

    def learn(self, server: Server) -> None:
        """A step of the rows of those who have answered, from the weights of the round's mixes, by
        how training moved these."""
        group = server.only
        memory = server.memory
        mixed = group.weighed
        assert mixed is not None
        gradient = -products(group, server.answered, mixed.sources, server.scratch).sum(0)
        places = [mixed.receivers.index(client) for client in server.answered]
        at = (torch.tensor(server.answered)[:, None], torch.tensor(mixed.sources))
        moment = self.momentum * memory["weights.moment"][at] + gradient
        memory["weights.moment"][at] = moment
        memory["weights"][at] = mixed.weights[0, places] - self.eta * moment
        memory["weights"].clamp_(0, 1)
        server.flops += 4 * gradient.numel()
