"""FeSEM: Long, Xie, Shen, Zhou, Wang, Jiang: Multi-Center Federated Learning: Clients Clustering for Better
Personalization. World Wide Web 2023 (Xie et al., arXiv:2005.01026).
"""

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
from fl_lightning.core.vectors import distances
from fl_lightning.knowledge.clusters import average, centre, model_of, own_cluster, settle
from fl_lightning.methods.base import Method
from fl_lightning.rng import numpy_rng


@dataclass(frozen=True)
class FeSEM(Method):
    """Some global models, the centres: every client is in the cluster of the one nearest to what it uploaded last.

    After each round first r_i = argmin_k ||w_i - W_k||^2 (E), then W_k = mean of its clients (M). Clusters are dealt
    out at random at first: all clients begin from one model, and the first uploads make the centres. Scored: the
    client's centre.

    Args:
        clusters: how many centres, K. 4: ours, as IFCA's (the paper tries 2 to 4).
        distance: over all parameters of the `model` (the paper), or of the `head` (the authors' code).
        weighting: of the mean: `uniform` (the paper), or by `samples`.
    """

    family = "clusters"
    several = False
    newcomers = Rule(
        "cluster nearest to the model it trains (without labels: the largest), then local training", remembers=True
    )

    clusters: int = 4
    distance: Literal["model", "head"] = "model"
    weighting: Literal["samples", "uniform"] = "uniform"

    def __post_init__(self) -> None:
        check("method.clusters", self.clusters, self.clusters >= 1, "it must be at least 1")

    @property
    def server_models(self) -> int:  # type: ignore[override]
        """`clusters`."""
        return self.clusters

    def relation(self) -> Relation:
        """The mean of all that have uploaded."""
        return mean_relation(self.weighting, "known")

    def init_server(self, run: Run) -> dict[str, Tensor]:
        """`cluster` (N,): of every client; equally many in each, at random."""
        dealt = numpy_rng(run.config.seed, "clusters").permutation(run.clients) % self.clusters
        return {"cluster": torch.from_numpy(dealt).to(torch.int64)}

    def broadcast(self, server: Server) -> dict[int, Payload]:
        """The client's centre."""
        return own_cluster(server)

    def aggregate(self, server: Server) -> None:
        """E, from the second round on, and M."""
        group, cluster = server.only, server.memory["cluster"].clone()
        who = sorted(server.run.server.uploaded | set(server.answered))
        if server.run.server.uploaded:
            blocks = group.layout.mask(lambda b: b.kind == "parameter" and (b.head or self.distance == "model"))
            centres = [centre(group, k) for k in range(self.clusters)]
            cluster[who] = distances(group, who, centres, blocks).argmin(1)
        average(server, cluster, server.run.relation, who)

    def admit(self, server: Server, client: Client) -> None:
        """It begins between the centres, where it can train."""
        settle(server, client, self.clusters if len(client.data.train) else None)

    def global_model(self, group: GroupServer, client: int) -> Tensor:
        """The client's centre."""
        return model_of(group, client)
