"""CFL: Sattler, Mueller, Samek: Clustered Federated Learning: Model-Agnostic Distributed Multitask
Optimization under Privacy Constraints. IEEE TNNLS 2020.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.methods import LogRange, NonNegativeFloat, NonNegativeInt, Server, Whole, searched
from fl_lightning.methods.clustered import Clustered


@dataclass(frozen=True)
class CFL(Clustered):
    """FedAvg within clusters; a cluster whose mean update is small, but a client's update large, is
    split by angle.

    That is if ||mean update|| < eps1 and max ||update|| > eps2 among more than two clients; updates
    are changes of the parameters in this round. Means are weighted by samples, as FedAvg's (the
    authors' code: plain). Clients that have not answered in that round stay with the half that
    keeps the cluster's number. Scored: the cluster's model.

    Args:
        eps1: the mean's bound. 0.4: the authors' code.
        eps2: the largest update's bound. 1.6: the authors' code. Both depend on model, learning
            rate and epochs.
        first_round: no split before. 21: the authors' code.
    """

    eps1: NonNegativeFloat = searched(
        0.4, LogRange(0.04, 4), "a decade around the authors': it depends on the model"
    )
    eps2: NonNegativeFloat = searched(1.6, LogRange(0.16, 16), "as eps1")
    first_round: NonNegativeInt = searched(
        21, Whole(2, 21), "up to the authors', which short runs do not reach"
    )

    def aggregate(self, server: Server) -> None:
        """Split, then the mean of each cluster."""
        cluster = server.memory["cluster"].clone()
        who = torch.tensor(server.answered)
        for k in cluster[who].unique().tolist():
            members = who[cluster[who] == k].tolist()
            cluster[self.leaving(server, members)] = int(cluster.max()) + 1
        self.average(server, cluster, server.answered)

    def leaving(self, server: Server, who: list[int]) -> list[int]:
        """Those of a cluster's clients (who have answered) that leave it now: one of two halves, or
        nobody."""
        if server.round < self.first_round or len(who) <= 2:
            return []
        group = server.only
        shares = server.shares(who)
        G = group.gram(who, group.layout.is_parameter, "sent").full[0]
        if shares @ G @ shares >= self.eps1**2 or G.diagonal().max() <= self.eps2**2:
            return []
        return [client for client, half in zip(who, halves(G), strict=True) if half]


def halves(G: Tensor) -> list[int]:
    """Which of two clusters, 0 or 1, each of n updates is in: complete linkage on 1 - cosine; G (n,
    n): products."""
    from sklearn.cluster import AgglomerativeClustering

    norm = G.diagonal().clamp_min(0).sqrt().clamp_min(1e-30)
    distance = (1 - G / norm[:, None] / norm).clamp_min(0).fill_diagonal_(0)
    clustering = AgglomerativeClustering(2, metric="precomputed", linkage="complete")
    return list(clustering.fit_predict(distance))
