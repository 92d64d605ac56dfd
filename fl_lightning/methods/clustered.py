"""What CFL, FeSEM and IFCA have in common: every client is in a cluster, which has a model."""

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fl_lightning.core.relation import Weights
from fl_lightning.methods import (
    Client,
    GroupServer,
    Method,
    Payloads,
    PositiveInt,
    Relation,
    Rule,
    RunContext,
    Server,
    Tensors,
    Traits,
    mean_relation,
)


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

    def init_server(self, run: RunContext) -> Tensors:
        """`cluster` (N,): of every client."""
        return {"cluster": torch.zeros(run.clients, dtype=torch.int64)}

    def broadcast(self, server: Server) -> Payloads:
        """The model of the client's cluster."""
        group = server.only
        return group.send({c: model_of(group, c) for c in group.here})

    def admit(self, server: Server, client: Client) -> None:
        """Put a newcomer into the cluster whose model has the least loss on its training samples;
        without any, into that of the most samples."""
        part = client.data.train
        sizes = samples_of_clusters(server)
        losses = {k: -size for k, size in sizes.items()}
        if len(part):
            losses = {k: client.loss(part, centre(server.only, k)) for k in sizes}
        server.memory["cluster"][client.id] = min(losses, key=lambda k: losses[k])

    def average(
        self,
        server: Server,
        cluster: Tensor,
        who: Sequence[int],
    ) -> None:
        """Put clients into the clusters `cluster` (N,), int64, and make the model of each the mean
        of the last uploads of its clients among `who`; without any it stays."""
        group = server.only
        cluster_of = cluster[list(who)]
        rows = torch.zeros(1, len(who), len(who), dtype=torch.float64)
        for k in cluster_of.unique().tolist():
            places = (cluster_of == k).nonzero()[:, 0]
            members = [who[place] for place in places.tolist()]
            group[name_of(k)] = group.mean_by(server.run.relation, members)
            assert group.weighed is not None
            rows[0, places[:, None], places] = group.weighed.weights[0].double()
        server.memory["cluster"] = cluster
        answered = [place for place, client in enumerate(who) if client in server.answered]
        receivers = [who[place] for place in answered]
        group.weighed = Weights(group.group, rows[:, answered], receivers, list(who))

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


def name_of(cluster: int) -> str:
    """What the server calls the model of a cluster."""
    return "model" if cluster == 0 else f"model.{cluster}"


def centre(group: GroupServer, cluster: int) -> Tensor:
    """The model (D,) of a cluster: the initial one until it has another."""
    name = name_of(cluster)
    return group[name] if name in group else group.initial  # noqa: SIM401  # it is no dictionary


def model_of(group: GroupServer, client: int) -> Tensor:
    """The model (D,) of the cluster that the client is in."""
    return centre(group, int(group.server.memory["cluster"][client]))


def samples_of_clusters(server: Server) -> dict[int, float]:
    """Training samples of the clients of each cluster that have uploaded; no empty clusters."""
    uploaded = sorted(server.run.server.uploaded)
    sizes = server.memory["cluster"][uploaded].bincount(weights=server.samples(uploaded))
    return {k: size for k, size in enumerate(sizes.tolist()) if size}
