"""FeSEM: Long, Xie, Shen, Zhou, Wang, Jiang: Multi-Center Federated Learning: Clients Clustering
for Better Personalization. World Wide Web 2023 (Xie et al., arXiv:2005.01026).
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from fl_lightning.core.vectors import distances
from fl_lightning.foundation.rng import numpy_rng
from fl_lightning.methods import (
    Client,
    PositiveInt,
    Rule,
    RunContext,
    Server,
    Tensors,
    Whole,
    searched,
)
from fl_lightning.methods.clustered import KClusters, centre, name_of, samples_of_clusters


@dataclass(frozen=True)
class FeSEM(KClusters):
    """Several global models, the centres: every client belongs to the cluster of the centre nearest
    to its last upload.

    After each round the E-step sets r_i = argmin_k ||w_i - W_k||^2, then the M-step sets W_k to the
    mean of the cluster's clients. Initial clusters are random: all clients start from one model,
    and the first uploads give the centres. Scored: the client's centre.

    Args:
        clusters: number of centres, K. 4: our choice, as IFCA's (the paper tries 2 to 4).
        distance: distance to a centre: over all parameters of the `model` (the paper), or of the
            `head` (the authors' code).
        weighting: weights of clients in the mean: `uniform` (the paper), or by `samples`.
    """

    traits = replace(
        KClusters.traits,
        newcomers=Rule(
            "cluster nearest to the model it trains (without labels: the largest), then local "
            "training",
            remembers=True,
        ),
    )
    averages = "known"
    """Centres average the last uploads of all clients, not only of the cohort."""

    clusters: PositiveInt = searched(4, Whole(2, 4), "the paper tries 2 to 4")
    distance: Literal["model", "head"] = "model"

    def init_server(self, run: RunContext) -> Tensors:
        """`cluster` (N,): the cluster of each client, random, with equally many clients in each."""
        clusters = numpy_rng(run.config.seed, "clusters").permutation(run.clients) % self.clusters
        return {"cluster": torch.from_numpy(clusters)}

    def aggregate(self, server: Server) -> None:
        """Reassign clients to the nearest centre (E-step), from the second round on; then average
        each cluster (M-step)."""
        group = server.only
        cluster = server.memory["cluster"].clone()
        uploaders = sorted(server.run.server.uploaded | set(server.answered))
        if server.run.server.uploaded:
            blocks = group.layout.mask(
                lambda b: b.kind == "parameter" and (b.head or self.distance == "model")
            )
            centres = [centre(group, k) for k in range(self.clusters)]
            cluster[uploaders] = distances(group, uploaders, centres, blocks).argmin(1)
        self.average(server, cluster, uploaders)

    def admit(self, server: Server, client: Client) -> None:
        """Give a newcomer with training samples a cluster of its own for the start, as it has no
        upload yet whose nearest centre would tell its cluster. The cluster's model is the mean of
        all centres by samples; the E-step after the newcomer's upload moves the newcomer to the
        nearest centre. Without samples, it joins the largest cluster."""
        if not len(client.data.train):
            return super().admit(server, client)
        group = server.only
        sizes = samples_of_clusters(server)
        total = sum(sizes.values())
        model = 0 * group.initial
        for k, size in sizes.items():
            model = model + size / total * centre(group, k)
        group[name_of(self.clusters)] = model
        server.memory["cluster"][client.id] = self.clusters
