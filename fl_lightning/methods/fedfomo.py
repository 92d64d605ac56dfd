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
    """Every client receives a few other clients' models and moves towards those that do better on
    its validation data.

    Let theta be the model before the client's last training. The candidates theta_j are the
    received models and the client's own trained one. The gain of a candidate is a_j = (L(theta) -
    L(theta_j)) / ||theta_j - theta||, and theta <- theta + sum_j w_j (theta_j - theta) with w_j =
    max(a_j, 0) / sum_k max(a_k, 0). If no gain is above 0, theta stays. The server adds up each
    client's gains over the rounds, and sends it the models with the greatest sums.

    Args:
        models: number of other clients' models that a client receives. 4: the readme of the
            authors' code, whose "5 models" count the client's own (--num_update_clients 4; 8 where
            the option is not given).
        epsilon: probability of a random model in place of the best remaining one. 0.3: the authors'
            readme.
        epsilon_decay: subtracted from epsilon in each round. 0.05: the authors' readme.
        gains: how gains are computed: `paper`: with the Euclidean norm. `code`, as in the authors'
            code: with the 1-norm, and a client's gains of a round are divided by the absolute value
            of their sum before they are added up.
    """

    traits = Traits(
        family="mixing",
        judge="after",
        starts="both",
        statistics=True,
        several=False,
        changes_download=True,
        newcomers=Rule(
            "mean of all models, moved towards those better on its validation data; local training",
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
        """Raise `BadInput` unless every client has validation data."""
        run.check_validation("weighs models by their loss on validation data")

    def slots(self) -> dict[str, Slot]:
        """The model before the client's last training."""
        return {"previous": Slot()}

    def relation(self) -> Relation:
        """Return the relation without mixing: clients combine models themselves."""
        return Alone()

    def init_server(self, run: RunContext) -> Tensors:
        """`affinity` (N, N), float64: each client's sums of a_j. Diagonal entries are not used."""
        return {"affinity": torch.eye(run.clients, dtype=torch.float64)}

    def broadcast(self, server: Server) -> Payloads:
        """Send each client its candidates, and no other model."""
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
        """Move the client's model towards the candidates that do better."""
        start = client["previous"]
        models = [*map(client.composed, payload.further.values()), client["model"]]
        norm = 1 if self.gains == "code" else 2
        gains = first_order_gains(client, client.data.validation, start, models, norm)
        candidates = torch.tensor([*payload.further, client.id], dtype=torch.int32)
        client.scratch |= {"candidates": candidates, "gains": gains}
        client["model"].copy_(towards(start, models, positive_shares(gains)))
        start.copy_(client["model"])

    def beside(self) -> dict[str, Beside]:
        meaning = "a relation that the client computes: what each model is worth to it"
        return {
            "candidates": Beside("candidates", "whose models the client has tried", "public"),
            "gains": Beside("gains", meaning, None),
        }

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Also upload the numbers of the candidates and their a_j."""
        upload = super().upload(client, payload)
        upload.statistics |= client.scratch
        return upload

    def aggregate(self, server: Server) -> None:
        """Add the uploaded a_j to `affinity`. With `gains code`, a client's are first divided by
        the absolute value of their sum, so that all rounds weigh the same."""
        affinity = server.memory["affinity"]
        gains = torch.zeros_like(affinity)
        for client, upload in server.statistics.items():
            gains[client, upload["candidates"].long()] = upload["gains"]
        if self.gains == "code":
            gains = gains / gains.sum(1, keepdim=True).abs().clamp_min(1e-9)
        shares = positive_shares(gains)
        rows = shares + torch.diag(1 - shares.sum(1))  # without a gain: the own model
        group = server.only
        weights = rows[None, server.answered]
        group.weighed = Weights(group.group, weights, server.answered, [*range(server.clients)])
        server.memory["affinity"] = affinity + gains.fill_diagonal_(0.0)


def epsilon_greedy(
    scores: Tensor,
    among: Sequence[int],
    count: int,
    epsilon: float,
    rng: np.random.Generator,
) -> list[int]:
    """Choose `count` clients: in turn the remaining one with the highest score or, with probability
    `epsilon`, any remaining one.

    Args:
        scores: scores of all clients, (N,).
        among: numbers of the clients to choose from.
        count: how many are chosen.
        epsilon: probability of a random choice.
        rng: random generator of the choices, and of the order of equal scores.
    """
    remaining = rng.permutation(sorted(among)).tolist()
    remaining.sort(key=lambda j: -float(scores[j]))  # stable: ties keep their random order
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
    """Return (L(start) - L(model)) / ||model - start|| of each of the `models` on `part`, float64
    (models,).

    The gain is 0 if the model equals the start, or its loss is not finite.

    Args:
        client: computes the losses.
        part: the client's validation data.
        start: a model (D,).
        models: models, (D,) each.
        norm: 2: Euclidean; 1: sum of absolute values.
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
    """Return max(gain, 0) divided by its sum over the last dimension; all 0 if no gain is above
    0."""
    positive = gains.clamp_min(0.0)
    return positive / positive.sum(-1, keepdim=True).clamp_min(torch.finfo(gains.dtype).tiny)


def towards(start: Tensor, models: Sequence[Tensor], shares: Tensor) -> Tensor:
    """Return start + sum_j share_j (model_j - start), a new vector (D,)."""
    mix = start.clone()
    for model, share in zip(models, shares.tolist(), strict=True):
        if share:
            mix += share * (model - start)
    return mix
