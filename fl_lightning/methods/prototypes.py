"""Prototypes of classes in place of models: shared code of FedProto and FedTGP."""

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
from fl_lightning.methods.classmeans import ClassMeans, distance_to_means, empty_upload_tables
from fl_lightning.methods.common.basics import wide


@dataclass(frozen=True)
class Prototypes(WithoutModels, ClassMeans, ABC):
    """Base: models are never sent; features are pulled towards the global prototype of their class,
    and the nearest prototype predicts.

    The server uses each client's last upload. If all clients take part in each round, as in the
    papers, these are the round's uploads. With a small cohort, prototypes of its uploads alone
    would change from cohort to cohort, and clients share nothing else.

    Arguments as for `fedproto`.
    """

    traits = replace(ClassMeans.traits, starts="own")

    lam: NonNegativeFloat = 1.0
    distance: Literal["means", "norm", "squared"] = "means"
    predict: Literal["classifier", "prototype"] = "prototype"

    @property
    def uses_means(self) -> bool:
        """Whether `lam` is above 0."""
        return self.lam > 0

    def init_server(self, run: RunContext) -> Tensors:
        """Zeros for class means and, unless all clients take part in each round, for the clients'
        last uploads."""
        memory = super().init_server(run)
        return (
            memory
            if run.config.federation.participation == 1
            else memory | empty_upload_tables(run)
        )

    def loss(
        self,
        means: Tensors,
        module: Module,
        batch: Batch,
    ) -> Tensor:
        """Return the task loss plus lam times the distance of features to their class's prototype,
        shape (). Samples of a class without a prototype add 0."""
        task = module.task_loss(batch)
        return task + self.lam * distance_to_means(module.features, batch[1], means, self.distance)

    def outputs(self, client: Client, x: Tensor, kind: str) -> Tensor:
        """Return minus the distance to each prototype, or the model's scores if it predicts by its
        classifier or there are no prototypes yet."""
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
        """Return the classes that may be predicted, bool (C,), among those with a prototype."""
        return has_prototype
