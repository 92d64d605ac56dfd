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
    """Every client starts from its own mix m_i = sum_j a_ij w_j; the server learns the weights a_i
    from how training changes the mix.

    After client i has trained m_i to w_i, a_ij takes a step down <w_j, m_i - w_i>, the gradient of
    ||m_i - w_i||^2 / 2 with w_i constant, and is clipped to [0, 1]. Before the next mix a_ii is set
    to 1 and the row divided by its sum.

    Args:
        eta: step size of the weights. 0.01: the authors' config.
        momentum: momentum of the steps on a_ij. 0: the paper's update; 0.9: the authors' code.
        classifier: each client's `own` (the authors' code), or `mixed` with the body.
    """

    traits = Traits(
        family="mixing",
        judge="after",
        several=False,
        newcomers=Rule(
            "mean of all models, then its own mix with learned weights; local training",
            remembers=True,
        ),
    )

    eta: NonNegativeFloat = searched(0.01, LogRange(0.001, 0.1), "a decade around the authors'")
    momentum: ShareBelow1 = 0.0
    classifier: Literal["own", "mixed"] = "own"

    def relation(self) -> Relation:
        """Return the relation whose rows the server learns."""
        return SteppedRows(self.eta, self.momentum)

    def scope(self, block: Block) -> Scope:
        """Share parameters, the classifier's only if it is mixed; running statistics are personal,
        since a mix of them fits no mixed model."""
        if block.kind == "buffer" or (block.head and self.classifier == "own"):
            return "personal"
        return "shared"

    def broadcast(self, server: Server) -> Payloads:
        """Send each client its mix, and keep copies of the cohort's last models: the server learns
        the mixing weights from these copies after the round's uploads have replaced the models."""
        payloads = super().broadcast(server)
        group = server.only
        server.scratch |= {
            c: model.clone() for c, model in last_received(group, group.here).items()
        }
        return payloads


@dataclass
class SteppedRows(Relation):
    """Learned rows of weights: a client's own weight is 1, the others are learned within [0, 1],
    and each row is divided by its sum before mixing.

    Args:
        eta: step size of the weights.
        momentum: momentum of the steps; a client's changes only in rounds in which the client takes
            part.
    """

    sources = "uploaded"
    fixed = "its rows are learned from those that mixed, and changes of them would accumulate"

    eta: float
    momentum: float

    def init_server(self, run: RunContext) -> Tensors:
        """`weights` (N, N), receivers by sources, and their momentum `weights.moment` (N, N); all
        0."""
        zeros = torch.zeros(run.clients, run.clients, dtype=torch.float64)
        return {"weights": zeros, "weights.moment": zeros.clone()}

    def weights(self, inputs: RelationInputs) -> Tensor:
        rows = inputs.memory["weights"][inputs.receivers][:, inputs.sources]
        rows[torch.arange(len(rows)), inputs.places] = 1
        return (rows / rows.sum(1, keepdim=True))[None]

    def learn(self, server: Server) -> None:
        """Take a gradient step on the rows of the clients that have answered, from the round's
        mixing weights, by how training changed the mixes."""
        group = server.only
        memory = server.memory
        mixing = group.weighed
        assert mixing is not None
        gradient = -products(group, server.answered, mixing.sources, server.scratch).sum(0)
        places = [mixing.receivers.index(client) for client in server.answered]
        at = (torch.tensor(server.answered)[:, None], torch.tensor(mixing.sources))
        moment = self.momentum * memory["weights.moment"][at] + gradient
        memory["weights.moment"][at] = moment
        memory["weights"][at] = mixing.weights[0, places] - self.eta * moment
        memory["weights"].clamp_(0, 1)
        server.flops += 4 * gradient.numel()
