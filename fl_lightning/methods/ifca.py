"""IFCA: Ghosh, Chung, Yin, Ramchandran: An Efficient Framework for Clustered Federated Learning. NeurIPS 2020."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.callbacks.relations import Relation, mean_relation
from fl_lightning.config import check
from fl_lightning.core.client import Client
from fl_lightning.core.newcomer import Rule
from fl_lightning.core.payload import Payload
from fl_lightning.core.run import Run
from fl_lightning.core.server import GroupServer, Server
from fl_lightning.knowledge.clusters import average, model_of, name_of, settle
from fl_lightning.methods.base import Method
from fl_lightning.rng import key


@dataclass(frozen=True)
class IFCA(Method):
    """Some global models: every client takes the one with the least loss on its training data, and trains that.

    A model becomes the mean of the clients that took it (the paper's option II; option I, which averages gradients, is
    left out). The first model is the initial one, the others are drawn anew. Scored: the model that the client took
    last; who never took part counts with the first.

    Args:
        clusters: how many models, k. 4: the paper's rotated MNIST.
        weighting: of the mean: `uniform` (the paper), or by `samples`: with one cluster that is FedAvg.
    """

    family = "clusters"
    statistics = True
    several = False
    newcomers = Rule("cluster of least loss on its samples (without any: the largest), then local training")

    clusters: int = 4
    weighting: Literal["samples", "uniform"] = "uniform"

    def __post_init__(self) -> None:
        check("method.clusters", self.clusters, self.clusters >= 1, "it must be at least 1")

    @property
    def server_models(self) -> int:  # type: ignore[override]
        """`clusters`."""
        return self.clusters

    def relation(self) -> Relation:
        """The mean."""
        return mean_relation(self.weighting)

    def init_server(self, run: Run) -> dict[str, Tensor]:
        """`cluster` (N,): whose model a client took last."""
        return {"cluster": torch.zeros(run.clients, dtype=torch.int64)}

    def broadcast(self, server: Server) -> dict[int, Payload]:
        """All models."""
        sent, group, seed = super().broadcast(server), server.only, server.run.config.seed
        for k in range(1, self.clusters):
            if name_of(k) not in group:
                group[name_of(k)] = group.group.another(key(seed, "model", k))
        for payload in sent.values():
            payload.further = group.send({k: group[name_of(k)] for k in range(1, self.clusters)})
        return sent

    def receive(self, client: Client, payload: Payload) -> None:
        """Take the best."""
        models = [client.composed(p) for p in (payload, *payload.further.values())]
        losses = [client.loss(client.data.train, model) for model in models] if len(models) > 1 else [0.0]
        known = int(client.run.server.memory["cluster"][client.id])
        client.noted["cluster"] = losses.index(min(losses)) if len(client.data.train) else known
        client["model"].copy_(models[client.noted["cluster"]])

    def upload(self, client: Client, payload: Payload) -> Payload:
        """With it whose model that was."""
        sent = super().upload(client, payload)
        sent.statistics["cluster"] = torch.tensor(client.noted["cluster"])
        return sent

    def aggregate(self, server: Server) -> None:
        """The mean of each cluster."""
        cluster = server.memory["cluster"].clone()
        for c, told in server.statistics.items():
            cluster[c] = told["cluster"]
        average(server, cluster, server.run.relation, server.answered)

    def admit(self, server: Server, client: Client) -> None:
        """Choose its cluster."""
        settle(server, client)

    def global_model(self, group: GroupServer, client: int) -> Tensor:
        """The one that the client took last."""
        return model_of(group, client)
