"""IFCA: Ghosh, Chung, Yin, Ramchandran: An Efficient Framework for Clustered Federated Learning.
NeurIPS 2020."""

from dataclasses import dataclass, replace

import torch

from fl_lightning.foundation.rng import key
from fl_lightning.methods import (
    Beside,
    Client,
    Payload,
    Payloads,
    PositiveInt,
    Server,
    Whole,
    searched,
)
from fl_lightning.methods.clustered import KClusters, name_of


@dataclass(frozen=True)
class IFCA(KClusters):
    """Several global models: every client takes the model with the least loss on its training data,
    and trains it.

    A model becomes the mean of the clients that took it (the paper's option II; option I, which
    averages gradients, is left out). The first model is the initial one, the others are drawn anew.
    Scored: the model that the client took last; the first, if it has never taken part.

    Args:
        clusters: number of models, k. 4: the paper's rotated MNIST.
        weighting: weights of clients in the mean: `uniform` (the paper), or by `samples`: with one
            cluster that is FedAvg.
    """

    traits = replace(
        KClusters.traits,
        statistics=True,
        receives_beside="the models of all clusters",
        sample_use="chooses its cluster by losses on samples",
    )

    clusters: PositiveInt = searched(4, Whole(2, 6), "around the paper's 4")

    def broadcast(self, server: Server) -> Payloads:
        """Send all models to each client."""
        group = server.only
        seed = server.run.config.seed
        payloads = group.send(dict.fromkeys(group.here, group["model"]))
        others = range(1, self.clusters)
        for k in others:
            if name_of(k) not in group:
                group[name_of(k)] = group.group.draw_initial(key(seed, "model", k))
        for payload in payloads.values():
            payload.further = group.send({k: group[name_of(k)] for k in others})
        return payloads

    def receive(self, client: Client, payload: Payload) -> None:
        """Start from the model with the least loss on the training data."""
        models = [client.composed(p) for p in (payload, *payload.further.values())]
        part = client.data.train
        if len(part):
            losses = [client.loss(part, model) for model in models] if len(models) > 1 else [0.0]
            cluster = losses.index(min(losses))
        else:  # chosen by `admit`; sites of a deployment always have samples
            cluster = int(client.run.server.memory["cluster"][client.id])
        client.scratch["cluster"] = cluster
        client["model"].copy_(models[cluster])

    def beside(self) -> dict[str, Beside]:
        meaning = "which of the global models suits the client best"
        return {"cluster": Beside("cluster", meaning, None)}

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Also upload the index of the chosen cluster."""
        upload = super().upload(client, payload)
        upload.statistics["cluster"] = torch.tensor(client.scratch["cluster"])
        return upload

    def aggregate(self, server: Server) -> None:
        """Average the models of each cluster."""
        cluster = server.memory["cluster"].clone()
        for c, statistics in server.statistics.items():
            cluster[c] = statistics["cluster"]
        self.average(server, cluster, server.answered)
