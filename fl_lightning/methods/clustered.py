"""Clusters of clients with a model each: shared code of CFL, FeSEM and IFCA."""

from abc import ABC
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
    """Base: a client receives the model of its cluster and is scored with it. At the start all
    clients are in one cluster."""

    traits = Traits(
        family="clusters",
        several=False,
        newcomers=Rule(
            "cluster of least loss on its samples (without any: the largest), then local training"
        ),
        receives="the mean of its cluster's models",
    )

    def init_server(self, run: RunContext) -> Tensors:
        """The cluster of each client: `cluster` (N,), int64, all 0."""
        return {"cluster": torch.zeros(run.clients, dtype=torch.int64)}

    def broadcast(self, server: Server) -> Payloads:
        """Send each client the model of its cluster."""
        group = server.only
        return group.send({c: model_of(group, c) for c in group.here})

    def admit(self, server: Server, client: Client) -> None:
        """Put a newcomer into the cluster whose model has the least loss on its training samples
        or, if it has no samples, into the cluster with the most samples."""
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
        uploaders: list[int],
    ) -> None:
        """Store the clients' clusters and set each cluster's model to the mean of its clients' last
        uploads.

        Args:
            server: the round's server.
            cluster: the new cluster of each client, (N,), int64.
            uploaders: clients whose uploads are averaged. A cluster without any of them keeps its
                model.
        """
        group = server.only
        cluster_of = cluster[uploaders]
        rows = torch.zeros(1, len(uploaders), len(uploaders), dtype=torch.float64)
        for k in cluster_of.unique().tolist():
            places = (cluster_of == k).nonzero()[:, 0]
            members = [uploaders[place] for place in places.tolist()]
            group[name_of(k)] = group.mean_by(server.run.relation, members)
            assert group.weighed is not None
            rows[0, places[:, None], places] = group.weighed.weights[0].double()
        server.memory["cluster"] = cluster
        answered = [place for place, client in enumerate(uploaders) if client in server.answered]
        receivers = [uploaders[place] for place in answered]
        group.weighed = Weights(group.group, rows[:, answered], receivers, uploaders)

    def global_model(self, group: GroupServer, client: int) -> Tensor:
        """Return the model of the client's cluster."""
        return model_of(group, client)


@dataclass(frozen=True)
class KClusters(Clustered, ABC):
    """Base: a fixed number of clusters, each with the mean of its clients' models."""

    averages: ClassVar[Literal["cohort", "known"]] = "cohort"
    """Clients whose models are averaged: `cohort`: those that have answered; `known`: all that have
    ever uploaded."""

    clusters: PositiveInt = 4
    weighting: Literal["samples", "uniform"] = "uniform"

    def relation(self) -> Relation:
        """Return the weights of clients in a cluster's mean: equal, or by samples."""
        return mean_relation(self.weighting, self.averages)


def name_of(cluster: int) -> str:
    """Return the name of a cluster's model among the server's vectors."""
    return "model" if cluster == 0 else f"model.{cluster}"


def centre(group: GroupServer, cluster: int) -> Tensor:
    """Return the model (D,) of a cluster; the initial model until the cluster has one of its
    own."""
    name = name_of(cluster)
    return group[name] if name in group else group.initial  # noqa: SIM401  # GroupServer has no `get`


def model_of(group: GroupServer, client: int) -> Tensor:
    """Return the model (D,) of the client's cluster."""
    return centre(group, int(group.server.memory["cluster"][client]))


def samples_of_clusters(server: Server) -> dict[int, float]:
    """Count the training samples of each cluster's clients that have ever uploaded; clusters
    without any are left out."""
    uploaded = sorted(server.run.server.uploaded)
    sizes = server.memory["cluster"][uploaded].bincount(weights=server.samples(uploaded))
    return {k: size for k, size in enumerate(sizes.tolist()) if size}
