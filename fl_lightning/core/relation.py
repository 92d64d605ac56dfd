"""Relations, the weights with which clients receive each other's models: their inputs, their
weights and the view that is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.mixing import Gram
from fl_lightning.core.run import ModelGroup
from fl_lightning.results.record import RelationView

MOST_CLUSTERED = 2000
"""Largest number of receivers that are clustered, which takes half a second; the cost grows with
the square."""


@dataclass
class RelationInputs:
    """Inputs from which a relation computes a round's weights."""

    receivers: list[int]
    """The m clients that will receive a mix; all of them are sources."""
    sources: list[int]
    """The n clients whose last uploads are mixed, ascending."""
    samples: Tensor
    """Training samples of each source, float64 (n,)."""
    layers: int
    """Number of layers with separate weights; 1 if all layers have the same."""
    clients: int
    """Number of clients in the federation, N."""
    memory: dict[str, Tensor]
    """The server's named tensors: a relation that learns keeps its cube there."""
    gram: Callable[..., Gram]
    """Computes inner products of the sources' last uploads by layer, over all sent blocks;
    `gram("parameters")`: without running statistics; `gram("initial")`: of the parameters' changes
    since the initial model."""

    @property
    def places(self) -> Tensor:
        """Index of each receiver among the sources, int64 (m,)."""
        return places(self.receivers, self.sources)


def places(clients: Sequence[int], order: Sequence[int]) -> Tensor:
    """Return the index of each client in the list `order`, int64 (m,)."""
    place_of = {c: k for k, c in enumerate(order)}
    return torch.tensor([place_of[c] for c in clients], dtype=torch.int64)


@dataclass
class Weights:
    """The weights that a relation returned for one group of clients."""

    group: ModelGroup
    weights: Tensor
    """(layers or 1, m receivers or 1, n sources)."""
    receivers: list[int]
    sources: list[int]

    def on_self(self) -> np.ndarray:
        """Return each receiver's weight on itself by layer, float32 (m, L)."""
        rows = torch.arange(len(self.receivers))
        columns = places(self.receivers, self.sources)
        on_itself = self.weights[:, rows, columns].to(torch.float32)
        layers = len(self.group.layout.layers)
        return on_itself.expand(layers, -1).T.numpy()

    def view(self, layers: list[str]) -> RelationView:
        """Return the relation for drawing. In layers that are not sent, each receiver has weight 1
        on itself.

        Args:
            layers: the names of the layers.
        """
        by_layer = self.weights.expand(len(layers), len(self.receivers), -1)
        by_receiver = by_layer.transpose(0, 1).numpy()
        # a single copy of the run's largest array
        rows = by_receiver.astype(np.float32, order="C")
        layer_of = self.group.layout.layer_of
        sent = layer_of[self.group.down_mask]
        unsent = np.setdiff1d(np.arange(len(layers)), sent)
        identity = np.equal.outer(self.receivers, self.sources)
        rows[:, unsent] = identity[:, None]
        return RelationView(rows, self.receivers, layers, self.sources)


def agreement(view: RelationView, groups: Sequence[int]) -> float | None:
    """Return the adjusted Rand index between the receivers' true groups and their clusters in the
    relation.

    Clusters are computed by average linkage: two clients are the closer, the greater their weights
    on each other (mean over layers and both directions). The tree is cut at the true number of
    groups. The index depends on the order of weights, not on their size; with equal weights it is
    0.

    Args:
        groups: the true group of every client.

    Returns:
        The index, at most 1. None if it is not defined: if all receivers are in the same group, if
        each is in a group of its own, or if there are no receivers. Also None if there are more
        than `MOST_CLUSTERED` receivers.
    """
    receivers = sorted(set(view.receivers) & set(view.sources))
    truth = np.array([groups[c] for c in receivers])
    count = len(np.unique(truth))
    if count < 2 or count == len(truth):
        return None
    if len(truth) > MOST_CLUSTERED:
        return None
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform
    from sklearn.metrics import adjusted_rand_score

    rows = places(receivers, view.receivers).numpy()
    columns = places(receivers, view.sources).numpy()
    mean = view.rows.mean(axis=1, dtype=np.float64)
    received = mean[np.ix_(rows, columns)]
    similarity = received + received.T
    distance = similarity.max() - similarity
    np.fill_diagonal(distance, 0)
    pairs = squareform(distance, checks=False)
    tree = linkage(pairs, "average")
    clusters = fcluster(tree, count, "maxclust")
    return float(adjusted_rand_score(truth, clusters))


def joint_view(parts: Sequence[Weights]) -> RelationView:
    """Join the relations of several groups to one view with a single layer, `model`. Weights
    between groups are 0."""
    receivers = sorted(c for part in parts for c in part.receivers)
    sources = sorted(c for part in parts for c in part.sources)
    table = np.zeros((len(receivers), len(sources)), np.float32)
    for part in parts:
        rows = np.searchsorted(receivers, part.receivers)
        columns = np.searchsorted(sources, part.sources)
        weights: np.ndarray = np.equal.outer(part.receivers, part.sources)
        if part.group.down_mask.any():
            weights = part.weights[0].expand(len(rows), -1).numpy()
        table[np.ix_(rows, columns)] = weights
    return RelationView(table[:, None], receivers, ["model"], sources)
