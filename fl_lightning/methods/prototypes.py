"""What FedProto and FedTGP have in common: prototypes of classes in place of models."""

from abc import ABC
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.methods import (
    Batch,
    Client,
    Module,
    NonNegativeFloat,
    RunContext,
    Tensors,
    WithoutModels,
)
from fl_lightning.methods.classmeans import ClassMeans, distance_to_means, no_uploads
from fl_lightning.methods.common.basics import wide


@dataclass(frozen=True)
class Prototypes(WithoutModels, ClassMeans, ABC):
    """Base: models never travel; features are pulled to the global prototype of their class, and
    the nearest predicts.

    The server works with each client's last upload. Where all take part in each round, as in the
    papers, these are the round's uploads; prototypes of a small cohort alone would change with each
    cohort, and nothing else ties clients.

    Arguments as of `fedproto`.
    """

    traits = replace(ClassMeans.traits, starts="own")

    lam: NonNegativeFloat = 1.0
    distance: Literal["means", "norm", "squared"] = "means"
    predict: Literal["classifier", "prototype"] = "prototype"

    @property
    def adds(self) -> bool:
        """Whether prototypes pull features."""
        return self.lam > 0

    def init_server(self, run: RunContext) -> Tensors:
        """Class means, and clients' last uploads, where not all take part in each round."""
        memory = super().init_server(run)
        return memory if run.config.federation.participation == 1 else memory | no_uploads(run)

    def loss(
        self,
        means: Tensors,
        module: Module,
        batch: Batch,
    ) -> Tensor:
        """The task loss, and lam times the distance of features to their class's prototype, shape
        (); classes without one add 0."""
        task = module.task_loss(batch)
        return task + self.lam * distance_to_means(module.features, batch[1], means, self.distance)

    def outputs(self, client: Client, x: Tensor, kind: str) -> Tensor:
        """The model's scores, or minus the distance to each known prototype (the model's while none
        is known)."""
        scores = super().outputs(client, x, kind)
        memory = client.run.server.memory
        has_prototype = memory["means.known"]
        if self.predict == "classifier" or not has_prototype.any():
            return scores
        prototypes = memory["means.features"].to(scores.device)
        candidates = self.candidates(client, has_prototype).to(scores.device)
        distances = torch.cdist(wide(client.module.features), prototypes)
        return -distances.masked_fill(~candidates, torch.inf)

    def candidates(self, client: Client, has_prototype: Tensor) -> Tensor:
        """The classes, bool (C,), that may be predicted, of those that have a prototype."""
        return has_prototype
