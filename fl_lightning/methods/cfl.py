"""CFL: Sattler, Mueller, Samek: Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization under
Privacy Constraints. IEEE TNNLS 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.config import check
from fl_lightning.core.client import Client
from fl_lightning.core.newcomer import Rule
from fl_lightning.core.payload import Payload
from fl_lightning.core.run import Run
from fl_lightning.core.server import GroupServer, Server
from fl_lightning.knowledge.clusters import average, model_of, own_cluster, settle
from fl_lightning.methods.base import Method


@dataclass(frozen=True)
class CFL(Method):
    """FedAvg within clusters: one whose updates have come to rest on average, but not one by one, is split by angle.

    That is where ||mean update|| < eps1 and max ||update|| > eps2 among more than two clients; updates are changes of
    the parameters in this round. Means are weighted by samples, as FedAvg's (the authors' code: plain). Who has not
    answered in that round stays with one half. Scored: the cluster's model.

    Args:
        eps1: the mean's bound. 0.4: the authors' code.
        eps2: the largest update's bound. 1.6: the authors' code. Both depend on model, learning rate and epochs.
        first_round: no split before. 21: the authors' code.
    """

    family = "clusters"
    several = False
    newcomers = Rule("cluster of least loss on its samples (without any: the largest), then local training")

    eps1: float = 0.4
    eps2: float = 1.6
    first_round: int = 21

    def __post_init__(self) -> None:
        for key in ("eps1", "eps2", "first_round"):
            check(f"method.{key}", getattr(self, key), getattr(self, key) >= 0, "it must be 0 or more")

    def init_server(self, run: Run) -> dict[str, Tensor]:
        """`cluster` (N,): of every client."""
        return {"cluster": torch.zeros(run.clients, dtype=torch.int64)}

    def broadcast(self, server: Server) -> dict[int, Payload]:
        """The model of the client's cluster."""
        return own_cluster(server)

    def aggregate(self, server: Server) -> None:
        """Split, then the mean of each cluster."""
        cluster, who = server.memory["cluster"].clone(), torch.tensor(server.answered)
        for k in cluster[who].unique().tolist():
            leaving = self.leaving(server, who[cluster[who] == k].tolist())
            cluster[leaving] = int(cluster.max()) + 1
        average(server, cluster, server.run.relation, server.answered)

    def leaving(self, server: Server, who: list[int]) -> list[int]:
        """Those of a cluster's clients (who have answered) that leave it now: one of two halves, or nobody."""
        if server.round < self.first_round or len(who) <= 2:
            return []
        group, shares = server.only, server.shares(who)
        G = group.gram(who, since="sent", blocks=group.layout.is_parameter).full[0]
        if shares @ G @ shares >= self.eps1**2 or G.diagonal().max() <= self.eps2**2:
            return []
        return [c for c, half in zip(who, halves(G), strict=True) if half]

    def admit(self, server: Server, client: Client) -> None:
        """Choose its cluster."""
        settle(server, client)

    def global_model(self, group: GroupServer, client: int) -> Tensor:
        """The cluster's."""
        return model_of(group, client)


def halves(G: Tensor) -> list[int]:
    """Which of two clusters, 0 or 1, each of n updates is in: complete linkage on 1 - cosine; G (n, n): products."""
    from sklearn.cluster import AgglomerativeClustering

    norm = G.diagonal().clamp_min(0).sqrt().clamp_min(1e-30)
    distance = (1 - G / norm[:, None] / norm).clamp_min(0).fill_diagonal_(0)
    return list(AgglomerativeClustering(2, metric="precomputed", linkage="complete").fit_predict(distance))
