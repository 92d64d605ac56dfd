"""FedProto: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: Federated Prototype Learning across Heterogeneous Clients.

AAAI 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.core import Client, Module, Rule
from fl_lightning.core.phase import Batch
from fl_lightning.methods.base import WithoutModels
from fl_lightning.methods.classmeans import ClassMeans
from fl_lightning.methods.common.basics import wide
from fl_lightning.methods.common.class_means import distance_to_means
from fl_lightning.ranges import NonNegativeFloat
from fl_lightning.search import LogRange, searched


@dataclass(frozen=True)
class FedProto(WithoutModels, ClassMeans):
    """Clients exchange the mean feature of each class, never models, and pull their features towards the global means.

    Args:
        lam: weight of the pull. 1: the authors' readme, for MNIST and FEMNIST (0.1 for CIFAR-10).
        distance: `means` (the paper): the sum over a batch's classes of ||mean feature - prototype||; `norm`, the mean
            of that over samples; or `squared`, the mean over samples and coordinates of the square (the authors' code,
            to which their lam belongs: on the digits it does better, docs/results/switches.md).
        weighting: the server's mean over clients by `samples` of the class (paper) or `uniform` (the authors' code).
        predict: by the nearest global `prototype` (paper), or by the client's own `classifier` (until there are
            prototypes it is that).
    """

    family = "prototypes and distillation"
    starts = "own"
    newcomers = Rule("own training, towards the class means of all", gives=False)

    lam: NonNegativeFloat = searched(1.0, LogRange(0.05, 10), "FedHKD's 0.05 for it to ten times the authors' 1")
    distance: Literal["means", "norm", "squared"] = "means"
    weighting: Literal["samples", "uniform"] = "samples"
    predict: Literal["classifier", "prototype"] = "prototype"

    @property
    def adds(self) -> bool:
        """The pull."""
        return self.lam > 0

    @property
    def uniform(self) -> bool:
        """`weighting`."""
        return self.weighting == "uniform"

    def loss(self, means: dict[str, Tensor], module: Module, batch: Batch) -> Tensor:
        """And lam times the distance of features to their class's prototype; unknown classes add 0."""
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
