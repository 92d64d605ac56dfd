"""FedProto: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: Federated Prototype Learning across Heterogeneous Clients.

AAAI 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.callbacks.relations import Alone, Relation
from fl_lightning.config import check
from fl_lightning.core import Block, Client, Rule
from fl_lightning.knowledge.class_means import distance_to_means
from fl_lightning.knowledge.common import wide
from fl_lightning.methods.base import Scope
from fl_lightning.methods.classmeans import Batch, ClassMeans


@dataclass(frozen=True)
class FedProto(ClassMeans):
    """Clients exchange the mean feature of each class, never models, and pull their features towards the global means.

    Args:
        lam: weight of the pull. 1: the authors' code.
        distance: `squared` (the authors' code: mean over samples and coordinates) or `norm` (the paper).
        weighting: the server's mean over clients by `samples` of the class (paper) or `uniform` (the authors' code).
        predict: by the client's own `classifier`, or by the nearest global `prototype` (paper).
    """

    family = "prototypes and distillation"
    starts = "own"
    newcomers = Rule("own training, towards the class means of all", gives=False)

    lam: float = 1.0
    distance: Literal["squared", "norm"] = "squared"
    weighting: Literal["samples", "uniform"] = "samples"
    predict: Literal["classifier", "prototype"] = "classifier"

    def __post_init__(self) -> None:
        check("method.lam", self.lam, self.lam >= 0, "it must be 0 or more")

    @property
    def adds(self) -> bool:
        """The pull."""
        return self.lam > 0

    @property
    def uniform(self) -> bool:
        """`weighting`."""
        return self.weighting == "uniform"

    def relation(self) -> Relation:
        """Nobody receives a model."""
        return Alone()

    def scope(self, block: Block) -> Scope:
        """No tensor of the model travels."""
        return "personal"

    def loss(self, means: dict[str, Tensor], module: Any, batch: Batch) -> Tensor:
        """And lam times the mean distance of features to their class's prototype; unknown classes add 0."""
        task: Tensor = module.task_loss(batch)
        return task + self.lam * distance_to_means(module.features, batch[1], means, self.distance)

    def outputs(self, client: Client, x: Tensor, kind: str) -> Tensor:
        """The model's scores, or minus the distance to each known prototype (the model's while none is known)."""
        scores = super().outputs(client, x, kind)
        memory = client.run.server.memory
        if self.predict == "classifier" or not memory["means.known"].any():
            return scores
        prototypes, known = (memory[f"means.{name}"].to(scores.device) for name in ("features", "known"))
        return -torch.cdist(wide(client.module.features), prototypes).masked_fill(~known, torch.inf)
