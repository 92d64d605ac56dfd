"""FPL: Huang, Ye, Shi, Li, Du: Rethinking Federated Learning with Domain Shift: A Prototype View.
CVPR 2023."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize, one_hot

from fl_lightning.methods import (
    Batch,
    Client,
    LogRange,
    Method,
    Module,
    Objective,
    Payload,
    Payloads,
    PositiveFloat,
    RunContext,
    Server,
    Tensors,
    searched,
)
from fl_lightning.methods.classmeans import ClassMeans
from fl_lightning.methods.common.basics import wide


@dataclass(frozen=True)
class FPL(ClassMeans):
    """FedAvg whose clients' features are pulled towards prototypes of their class: one for each
    cluster of the clients' class means.

    The server clusters the uploaded means of each class by first neighbours (FINCH). Client: CE + a
    contrastive loss of each sample with the prototypes of all classes + MSE to the mean prototype
    of its class, in which all clusters weigh the same.

    Args:
        tau: temperature of the contrastive loss. 0.02: the authors' code.
    """

    traits = replace(
        ClassMeans.traits,
        judge="global",
        receives_beside="class means of clusters of clients",
    )

    tau: PositiveFloat = searched(0.02, LogRange(0.01, 1), "the authors' to plain cosines")

    def init_server(self, run: RunContext) -> Tensors:
        """Empty tensors for the prototypes (K, d) and their classes (K,)."""
        return cluster_prototypes([], super().init_server(run)["means.features"])

    def broadcast(self, server: Server) -> Payloads:
        """Also send the prototypes, once there are any."""
        payloads = Method.broadcast(self, server)
        memory = server.memory
        if len(memory["clusters.classes"]):
            for payload in payloads.values():
                payload.extra["prototypes"] = memory["clusters.prototypes"]
                payload.statistics["classes"] = memory["clusters.classes"].int()
        return payloads

    def objective(self, client: Client, payload: Payload) -> Objective:
        """Return the task loss, plus the losses on prototypes if the client has received any."""
        if "prototypes" not in payload.extra:
            return Objective()
        device = client.run.device
        prototypes = payload.extra["prototypes"].to(device)
        classes = payload.statistics["classes"].long().to(device)

        def loss(module: Module, batch: Batch) -> Tensor:
            # operations of cosines, their gradients and class means
            client.flops += 8 * len(batch[1]) * prototypes.numel()
            return self.loss({"prototypes": prototypes, "classes": classes}, module, batch)

        return Objective(loss=loss)

    def loss(
        self,
        means: Tensors,
        module: Module,
        batch: Batch,
    ) -> Tensor:
        """Return the task loss plus the losses on prototypes, shape ()."""
        task = module.task_loss(batch)
        prototypes = means["prototypes"]
        classes = means["classes"]
        return task + cluster_losses(module.features, batch[1], prototypes, classes, self.tau)

    def aggregate(self, server: Server) -> None:
        """Average the models, and compute the round's prototypes."""
        Method.aggregate(self, server)
        like = server.memory["clusters.prototypes"]
        server.memory |= cluster_prototypes(server.statistics.values(), like)


def first_neighbour_clusters(points: Tensor) -> Tensor:
    """Cluster `points` (n, d): each is linked to the point with the greatest cosine to it; return
    the connected components as numbers (n,) from 0."""
    from scipy.sparse.csgraph import connected_components

    directions = normalize(points.double())
    cosines = (directions @ directions.T).fill_diagonal_(-torch.inf)
    nearest = cosines.argmax(1)
    links = one_hot(nearest, len(points))
    return torch.from_numpy(connected_components(links.numpy(), directed=False)[1]).long()


def cluster_means(points: Tensor, clusters: Tensor) -> Tensor:
    """Return the mean of each cluster, (k, d), for the `clusters` (n,) of `points` (n, d)."""
    count = int(clusters.max()) + 1
    return torch.stack([points[clusters == k].mean(0) for k in range(count)])


def finch(points: Tensor) -> Tensor:
    """Cluster `points` (n, d) by first neighbours, then the clusters' means in the same way,
    repeatedly.

    Returns:
        The coarsest partition (n,) with more than one cluster. If the first partition already has a
        single cluster, that partition.
    """
    clusters = first_neighbour_clusters(points)
    while int(clusters.max()):
        merged = first_neighbour_clusters(cluster_means(points, clusters))[clusters]
        if not 0 < int(merged.max()) < int(clusters.max()):
            break
        clusters = merged
    return clusters


def cluster_prototypes(uploads: Iterable[Tensors], like: Tensor) -> Tensors:
    """Return the mean of each cluster of uploaded class means, `clusters.prototypes` (K, d), and
    its class, `clusters.classes` (K,), ascending.

    Args:
        uploads: for each client `classes` and `features`, a row for each class.
        like: (C, d); gives the type of the prototypes.
    """
    labels = [torch.empty(0, dtype=torch.int64)]
    features = [like[:0]]
    for upload in uploads:
        labels.append(upload["classes"].long())
        features.append(upload["features"].to(like))
    y = torch.cat(labels)
    points = torch.cat(features)
    prototypes = [like[:0]]
    classes = [y[:0]]
    for k in y.unique():
        of_class = points[y == k]
        centres = cluster_means(of_class, finch(of_class))
        prototypes.append(centres)
        classes.append(k.expand(len(centres)))
    return {"clusters.prototypes": torch.cat(prototypes), "clusters.classes": torch.cat(classes)}


def cluster_losses(
    features: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    classes: Tensor,
    tau: float,
) -> Tensor:
    """Return a contrastive loss plus a squared distance, shape ().

    For a sample with features z: -log of the share of its class's prototypes in the sum of
    e^(cos(z, p) / tau) over all prototypes p, plus the mean squared distance of z to the mean
    prototype of its class. The result is the sum over samples whose class has a prototype, divided
    by the size of the batch.

    Args:
        features: z, (batch, d).
        labels: (batch,).
        prototypes: (K, d).
        classes: class of each prototype, (K,).
        tau: temperature.
    """
    z = wide(features)
    same_class = labels[:, None] == classes
    has_prototype = same_class.any(1)
    if not has_prototype.any():
        return z.sum() * 0
    z = z[has_prototype]
    same_class = same_class[has_prototype]
    scores = cosine_similarity(z[:, None], prototypes, 2) / tau
    of_class = scores.masked_fill(~same_class, -torch.inf)
    contrast = scores.logsumexp(1) - of_class.logsumexp(1)
    centre = same_class.to(prototypes) @ prototypes / same_class.sum(1, keepdim=True)
    distance = (z - centre).square().mean(1)
    return (contrast + distance).sum() / len(labels)
