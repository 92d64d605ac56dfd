"""FedFomo: Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized Federated Learning with First Order
Model Optimization. ICLR 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.callbacks.relations import Alone, Relation
from fl_lightning.configuration.ranges import NonNegativeInt, UnitInterval
from fl_lightning.configuration.search import Whole, searched
from fl_lightning.core import Beside, Client, Payload, Rule, RunContext, Server, Slot, Traits
from fl_lightning.core.relation import Weights
from fl_lightning.methods.base import Method
from fl_lightning.methods.common import candidates


@dataclass(frozen=True)
class FedFomo(Method):
    """Every client fetches a few models of others and moves towards those that do better on its
    validation data.

    With theta the model before the client's last training and candidates theta_j, its own trained
    one among them: a_j = (L(theta) - L(theta_j)) / ||theta_j - theta||, theta <- theta + sum_j w_j
    (theta_j - theta), w = max(a, 0) over its sum; where no a_j is above 0, theta stays. The server
    fetches those with the greatest sums of a_j so far.

    Args:
        models: of others that a client fetches. 4: the authors' readme's "5 models"
            (--num_update_clients 4), one's own trained one being the fifth (the default of their
            code, before any command, is 8).
        epsilon: probability of any model in place of the best that is left. 0.3: the authors'
            readme.
        epsilon_decay: what is taken off it in each round. 0.05: the authors' readme.
        gains: a_j and their sums as in the `paper` (Euclidean norm), or as in the authors' `code`:
            the norm is the sum of absolutes, and what a client adds to its sums in a round is a_j /
            |sum_k a_k|.
    """

    traits = Traits(
        family="mixing",
        judge="after",
        starts="both",
        statistics=True,
        several=False,
        changes_download=True,
        newcomers=Rule(
            "mean of all, towards who does better on its validation data; then local training",
            remembers=True,
        ),
        receives_beside="models of other clients",
        sample_use="weighs models by their losses on validation samples",
    )

    models: NonNegativeInt = searched(
        4, Whole(2, 8), "around the authors' readme's 4, up to their code's 8"
    )
    epsilon: UnitInterval = 0.3
    epsilon_decay: UnitInterval = 0.05
    gains: Literal["paper", "code"] = "paper"

    def check(self, run: RunContext) -> None:
        """Validation data are needed."""
        run.check_validation("weighs models by their loss on validation data")

    def slots(self) -> dict[str, Slot]:
        """The model before the last training."""
        return {"previous": Slot()}

    def relation(self) -> Relation:
        """The server mixes nothing."""
        return Alone()

    def init_server(self, run: RunContext) -> dict[str, Tensor]:
        """`affinity` (N, N), float64: the identity, and sums of a_j."""
        return {"affinity": torch.eye(run.clients, dtype=torch.float64)}

    def broadcast(self, server: Server) -> dict[int, Payload]:
        """The candidates of each client, and no other model."""
        epsilon = max(self.epsilon - self.epsilon_decay * (server.round - 1), 0.0)
        return candidates.send_candidates(server, server.memory["affinity"], self.models, epsilon)

    def receive(self, client: Client, payload: Payload) -> None:
        """Go towards the candidates that do better."""
        start, data = client["previous"], client.data.validation
        models = [*map(client.composed, payload.further.values()), client["model"]]
        gains = candidates.first_order_gains(
            client, data, start, models, 1 if self.gains == "code" else 2
        )
        client.scratch |= {
            "candidates": torch.tensor([*payload.further, client.id], dtype=torch.int32),
            "gains": gains,
        }
        client["model"].copy_(candidates.towards(start, models, candidates.positive_shares(gains)))
        start.copy_(client["model"])

    def beside(self) -> dict[str, Beside]:
        """Declares what `upload` adds to the model."""
        return {
            "candidates": Beside("candidates", "whose models the client has tried", "public"),
            "gains": Beside(
                "gains", "a relation that the client computes: what each model is worth to it", None
            ),
        }

    def upload(self, client: Client, payload: Payload) -> Payload:
        """With it what each candidate was worth."""
        sent = super().upload(client, payload)
        sent.statistics |= client.scratch
        return sent

    def aggregate(self, server: Server) -> None:
        """Remember it."""
        gains, who = (
            candidates.uploaded_gains(server, relative=self.gains == "code"),
            server.answered,
        )
        # no gain: the own model
        rows = (shares := candidates.positive_shares(gains)) + torch.diag(1 - shares.sum(1))
        server.only.weighed = Weights(
            server.only.group, rows[None, who], who, list(range(server.clients))
        )
        server.memory["affinity"] = server.memory["affinity"] + gains.fill_diagonal_(0.0)
