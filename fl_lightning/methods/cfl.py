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
    """FedAvg within clusters; a cluster is split in two by the angles between its clients' updates,
    once its mean update is small and one client's update is large.

    A cluster of more than two clients is split if ||mean update|| < eps1 and max ||update|| > eps2;
    updates are changes of the parameters in this round. Means are weighted by samples, as FedAvg's
    (the authors' code: plain). Clients that have not answered in that round stay in the half that
    keeps the cluster's number. Scored: the cluster's model.

    Args:
        eps1: upper bound on the mean update's norm. 0.4: the authors' code.
        eps2: lower bound on the largest update's norm. 1.6: the authors' code. Both bounds depend
            on model, learning rate and epochs.
        first_round: first round with splits. 21: the authors' code.
    """

    eps1: NonNegativeFloat = searched(
        0.4, LogRange(0.04, 4), "a decade around the authors': it depends on the model"
    )
    eps2: NonNegativeFloat = searched(1.6, LogRange(0.16, 16), "as eps1")
    first_round: NonNegativeInt = searched(
        21, Whole(2, 21), "up to the authors', which short runs do not reach"
    )

    def aggregate(self, server: Server) -> None:
        """Split clusters, then average each cluster's models."""
        cluster = server.memory["cluster"].clone()
        answered = torch.tensor(server.answered)
        for k in cluster[answered].unique().tolist():
            members = answered[cluster[answered] == k].tolist()
            cluster[self.split_off(server, members)] = int(cluster.max()) + 1
        self.average(server, cluster, server.answered)

    def split_off(self, server: Server, members: list[int]) -> list[int]:
        """Return the clients among a cluster's answering `members` that move to a new cluster; none
        if the cluster is not split."""
        if server.round < self.first_round or len(members) <= 2:
            return []
        group = server.only
        shares = server.shares(members)
        G = group.gram(members, group.layout.is_parameter, "sent").full[0]
        if shares @ G @ shares >= self.eps1**2 or G.diagonal().max() <= self.eps2**2:
            return []
        return [client for client, half in zip(members, halves(G), strict=True) if half]


def halves(G: Tensor) -> list[int]:
    """Divide n updates into two clusters, by complete linkage on 1 - cosine; return the cluster, 0
    or 1, of each.

    Args:
        G: inner products of the updates, (n, n).
    """
    from sklearn.cluster import AgglomerativeClustering

    norm = G.diagonal().clamp_min(0).sqrt().clamp_min(1e-30)
    distance = (1 - G / norm[:, None] / norm).clamp_min(0).fill_diagonal_(0)
    clustering = AgglomerativeClustering(2, metric="precomputed", linkage="complete")
    return list(clustering.fit_predict(distance))
