"""GPFL: Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan: GPFL: Simultaneously Learning Global and
Personalized Feature Information for Personalized Federated Learning. ICCV 2023.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from fl_lightning.methods import (
    Batch,
    Client,
    LogRange,
    Module,
    NonNegativeFloat,
    Objective,
    Payload,
    Phase,
    Phases,
    PureLoss,
    Tensors,
    Traits,
    searched,
)
from fl_lightning.methods.common.basics import norms
from fl_lightning.methods.common.classifiers import (
    ContextClassifier,
    NewClassifier,
    PersonalPart,
    is_personal,
)


@dataclass(frozen=True)
class GPFL(PersonalPart):
    """Each client's personal classifier takes features conditioned on the client; class embeddings
    that all share are targets of features conditioned globally.

    Args:
        lam: weight of the distance. 0.01: the authors' run script for a CNN.
        mu: weight decay of e, gamma and beta. 0.1: the authors' run script for a CNN.
        norm: how the distances ||f(z, g) - e_y|| of a batch are taken: `sample`: one for each
            sample, averaged (paper). `batch`: one norm of the whole batch (the authors' code, which
            also computes g and q_i before the client receives the new e, from its own last e).
    """

    traits = Traits(
        family="partial sharing",
        judge="before",
        features=True,
        classes=True,
        sample_use="conditions its loss on class shares of samples",
    )

    lam: NonNegativeFloat = searched(
        0.01, LogRange(1e-4, 0.1), "the authors' scripts: 1e-4 and 0.01"
    )
    mu: NonNegativeFloat = searched(0.1, LogRange(0.001, 1), "the authors' scripts: 0 and 0.1")
    norm: Literal["sample", "batch"] = "sample"

    def build(self, model: nn.Module, num_classes: int) -> nn.Module:
        """Return the network with class embeddings, and a classifier of conditioned features."""
        return NewClassifier(model, Conditioned, "gpfl")

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return one phase with all losses; conditions are those of the received embeddings."""
        e = client.bind().head.embedding.weight.detach()[: client.module.num_classes].clone()
        loss = PureLoss(self.loss, {"e": e, "g": e.mean(0), "q": self._shares(client) @ e})
        decays = client.mask(lambda block: block.kind == "parameter" and not is_personal(block))
        in_head = client.mask(lambda block: block.name.startswith(f"{client.layout.head}."))
        decay = np.where(decays & in_head, self.mu / 2, 0.0)
        return [Phase(objective=Objective(torch.zeros_like(client["model"]), decay, loss=loss))]

    def loss(
        self,
        tensors: Tensors,
        module: Module,
        batch: Batch,
    ) -> Tensor:
        """Return the sum of all losses but the decay, with e, g and q as received, shape ()."""
        e = tensors["e"]
        head = module.head
        with head.using(tensors["q"]):
            task = module.task_loss(batch)
        f = head.under(module.features, tensors["g"])
        cosines = normalize(f, dim=1) @ normalize(head.embedding.weight[: len(e)], dim=1).T
        gap = f - e[batch[1]]
        distance = norms(gap if self.norm == "sample" else gap.reshape(1, -1)).mean()
        return task + cross_entropy(cosines, batch[1]) + self.lam * distance

    def outputs(self, client: Client, x: Tensor, kind: str) -> Tensor:
        """Return class scores with the client's condition q_i, computed from the current
        embeddings."""
        head = client.module.head
        embeddings = head.embedding.weight.detach()[: client.module.num_classes]
        with head.using(self._shares(client) @ embeddings):
            return super().outputs(client, x, kind)

    def _shares(self, client: Client) -> Tensor:
        counts = client.class_counts
        shares = counts / counts.sum().clamp_min(1)
        return shares.to(client.run.device, client.run.dtype)


class Conditioned(ContextClassifier):
    """A classifier of features conditioned on a vector, with an embedding of each class (GPFL).

    The condition is set by `using`; without it, the mean embedding is the condition.
    """

    def __init__(self, classifier: nn.Linear) -> None:
        super().__init__()
        d = classifier.in_features
        self.personal = classifier
        self.embedding = nn.Embedding(classifier.out_features, d)
        self.gamma, self.beta = (
            nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.LayerNorm(d)) for _ in range(2)
        )

    def under(self, z: Tensor, condition: Tensor) -> Tensor:
        """Return features under a condition k, ReLU((gamma(k) + 1) z + beta(k)), (batch, d).

        Args:
            z: features (batch, d).
            condition: k, (d,).
        """
        scaled = (self.gamma(condition) + 1) * z
        return torch.relu(scaled + self.beta(condition))

    def forward(self, z: Tensor) -> Tensor:
        condition = self.embedding.weight.mean(0) if self.context is None else self.context
        scores: Tensor = self.personal(self.under(z, condition))
        return scores
