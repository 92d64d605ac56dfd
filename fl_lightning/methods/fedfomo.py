"""FedFomo: Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized Federated Learning with First Order
Model Optimization. ICLR 2021.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.relation import Weights
from fl_lightning.core.vectors import copy_models
from fl_lightning.data.part import Part
from fl_lightning.foundation.rng import numpy_rng
from fl_lightning.methods import (
    Alone,
    Beside,
    Client,
    Method,
    NonNegativeInt,
    Payload,
    Payloads,
    Relation,
    Rule,
    RunContext,
    Server,
    Slot,
    Tensors,
    Traits,
    UnitInterval,
    Whole,
    searched,
)


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

    def init_server(self, run: RunContext) -> Tensors:
        """`affinity` (N, N), float64: sums of a_j; a client's own entry is not used."""
        return {"affinity": torch.eye(run.clients, dtype=torch.float64)}

    def broadcast(self, server: Server) -> Payloads:
        """The candidates of each client, and no other model."""
        epsilon = max(self.epsilon - self.epsilon_decay * (server.round - 1), 0.0)
        run = server.run
        group = server.only
        sources = {}
        for c in group.cohort:
            rng = numpy_rng(run.config.seed, "candidates", c, server.round)
            others = sorted(run.server.uploaded - {c})
            scores = server.memory["affinity"][c]
            sources[c] = epsilon_greedy(scores, others, self.models, epsilon, rng)
        payloads = group.send(dict.fromkeys(group.here, group.initial))
        for c, models in copy_models(group, sources).items():
            payloads[c].sent[:] = False  # no block of it: the candidates alone travel
            payloads[c].further = group.send(models)
        return payloads

    def receive(self, client: Client, payload: Payload) -> None:
        """Go towards the candidates that do better."""
        start = client["previous"]
        models = [*map(client.composed, payload.further.values()), client["model"]]
        norm = 1 if self.gains == "code" else 2
        gains = first_order_gains(client, client.data.validation, start, models, norm)
        candidates = torch.tensor([*payload.further, client.id], dtype=torch.int32)
        client.scratch |= {"candidates": candidates, "gains": gains}
        client["model"].copy_(towards(start, models, positive_shares(gains)))
        start.copy_(client["model"])

    def beside(self) -> dict[str, Beside]:
        """Declares what `upload` adds to the model."""
        words = "a relation that the client computes: what each model is worth to it"
        return {
            "candidates": Beside("candidates", "whose models the client has tried", "public"),
            "gains": Beside("gains", words, None),
        }

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Also upload what each candidate was worth."""
        upload = super().upload(client, payload)
        upload.statistics |= client.scratch
        return upload

    def aggregate(self, server: Server) -> None:
        """Add the uploaded gains to `affinity`: with `gains code` each client's over |their sum|,
        so that a round counts as much as any other."""
        affinity = server.memory["affinity"]
        gains = torch.zeros_like(affinity)
        for client, upload in server.statistics.items():
            gains[client, upload["candidates"].long()] = upload["gains"]
        if self.gains == "code":
            gains = gains / gains.sum(1, keepdim=True).abs().clamp_min(1e-9)
        shares = positive_shares(gains)
        rows = shares + torch.diag(1 - shares.sum(1))  # no gain: the own model
        group = server.only
        mixed = rows[None, server.answered]
        group.weighed = Weights(group.group, mixed, server.answered, [*range(server.clients)])
        server.memory["affinity"] = affinity + gains.fill_diagonal_(0.0)


def epsilon_greedy(
    scores: Tensor,
    among: Sequence[int],
    count: int,
    epsilon: float,
    rng: np.random.Generator,
) -> list[int]:
    """`count` of `among`, by `scores` (N,): each the best that remains, or with probability
    `epsilon` any that remains."""
    remaining = rng.permutation(sorted(among)).tolist()
    remaining.sort(key=lambda j: -float(scores[j]))  # stable: ties stay as they were drawn
    chosen = []
    for _ in among[:count]:
        place = rng.integers(len(remaining)) if rng.random() < epsilon else 0
        chosen.append(remaining.pop(int(place)))
    return chosen


def first_order_gains(
    client: Client,
    part: Part,
    start: Tensor,
    models: Sequence[Tensor],
    norm: int = 2,
) -> Tensor:
    """(L(start) - L(model)) / ||model - start|| of each of the `models` (D,) on `part`, float64
    (models,).

    0 where a model is the start, or its loss is not finite. `norm`: 2 for the Euclidean, 1 for the
    sum of absolutes.
    """
    base = client.loss(part, start)
    columns = client.layout.parameters
    gains = []
    for model in models:
        distance = float((model - start)[columns].norm(norm))
        gains.append((base - client.loss(part, model)) / distance if distance else 0.0)
    client.flops += 3 * client.layout.size * len(models)
    return torch.tensor(gains, dtype=torch.float64).nan_to_num(0.0, 0.0, 0.0)


def positive_shares(gains: Tensor) -> Tensor:
    """max(gain, 0) over their sum, over the last dimension; all 0 where no gain is above 0."""
    positive = gains.clamp_min(0.0)
    return positive / positive.sum(-1, keepdim=True).clamp_min(torch.finfo(gains.dtype).tiny)


def towards(start: Tensor, models: Sequence[Tensor], shares: Tensor) -> Tensor:
    """start + sum of shares (model - start), a new vector (D,); where all shares are 0 it is the
    start."""
    moved = start.clone()
    for model, share in zip(models, shares.tolist(), strict=True):
        if share:
            moved += share * (model - start)
    return moved
