"""What CFL, FeSEM and IFCA have in common: every client is in a cluster, which has a model."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fl_lightning.callbacks.relations import Relation, mean_relation
from fl_lightning.configuration.ranges import PositiveInt
from fl_lightning.core import Client, GroupServer, Payload, Rule, RunContext, Server, Traits
from fl_lightning.methods.base import Method
from fl_lightning.methods.common.clusters import model_of, settle


@dataclass(frozen=True)
class Clustered(Method, ABC):
    """Base: a client is sent, and scored with, the model of its cluster. In the beginning there is
    one cluster."""

    traits = Traits(
        family="clusters",
        several=False,
        newcomers=Rule(
            "cluster of least loss on its samples (without any: the largest), then local training"
        ),
        receives="the mean of its cluster's models",
    )

    def init_server(self, run: RunContext) -> dict[str, Tensor]:
        """`cluster` (N,): of every client."""
        return {"cluster": torch.zeros(run.clients, dtype=torch.int64)}

    def broadcast(self, server: Server) -> dict[int, Payload]:
        """The model of the client's cluster."""
        group = server.only
        return group.send({c: model_of(group, c) for c in group.here})

    def admit(self, server: Server, client: Client) -> None:
        """Choose its cluster."""
        settle(server, client)

    def global_model(self, group: GroupServer, client: int) -> Tensor:
        """That of the client's cluster."""
        return model_of(group, client)


@dataclass(frozen=True)
class KClusters(Clustered, ABC):
    """Base: there are so many clusters, each with the mean of its clients."""

    averages: ClassVar[Literal["cohort", "known"]] = "cohort"
    """Whose models the means are of: of the clients that have answered, or of all that ever
    have."""

    clusters: PositiveInt = 4
    weighting: Literal["samples", "uniform"] = "uniform"

    def relation(self) -> Relation:
        """The mean."""
        return mean_relation(self.weighting, self.averages)
