"""Clusters by first neighbours: Sarfraz, Sharma, Stiefelhagen: Efficient Parameter-free Clustering Using First Neighbor
Relations. CVPR 2019 (FPL)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize


def linked(points: Tensor) -> Tensor:
    """The clusters (n,), 0 and up, of `points` (n, d), each of which is linked to the one of greatest cosine."""
    unit = normalize(points.double())
    group = torch.arange(len(points))
    nearest = (unit @ unit.T).fill_diagonal_(-torch.inf).argmax(1) if len(points) > 1 else group
    while True:  # the least number of each connected part
        least = torch.minimum(group, group[nearest]).scatter_reduce(0, nearest, group, "amin")
        if torch.equal(least, group):
            numbers: Tensor = group.unique(return_inverse=True)[1]
            return numbers
        group = least


def means(points: Tensor, clusters: Tensor) -> Tensor:
    """The mean point of each of the `clusters` (n,) of `points` (n, d): (k, d)."""
    return torch.stack([points[clusters == k].mean(0) for k in range(int(clusters.max()) + 1)])


def finch(points: Tensor) -> Tensor:
    """The coarsest partition (n,) of `points` (n, d) with more than one cluster, or the first, if that has one.

    Clusters are linked by their means in the same way, again and again.
    """
    clusters = linked(points)
    while int(clusters.max()):
        merged = linked(means(points, clusters))[clusters]
        if not 0 < int(merged.max()) < int(clusters.max()):
            break
        clusters = merged
    return clusters
