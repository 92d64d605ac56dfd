"""Who receives whose models: what a relation looks at, the weights that it gave, and how they are
drawn."""

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
"""Receivers whose rows are clustered: the cost grows with the square, half a second there."""


@dataclass
class RelationInputs:
    """What a relation may look at when the server composes what a round's receivers are sent."""

    receivers: list[int]
    """Clients that will receive (m), among the sources."""
    sources: list[int]
    """Clients whose last-received models are mixed (n), ascending."""
    samples: Tensor
    """Training samples of each source, float64 (n,)."""
    layers: int
    """Layers the relation tells apart (1 where it does not)."""
    clients: int
    """Clients in the federation, N."""
    memory: dict[str, Tensor]
    """The server's named tensors: a relation that learns keeps its cube there."""
    gram: Callable[..., Gram]
    """Computes inner products of the sources' last-received layers (all that travels);
    `gram("parameters")`: without running statistics; `gram("initial")`: of the parameters' changes
    since the initial model."""

    @property
    def places(self) -> Tensor:
        """Index of each receiver among the sources, int64 (m,)."""
        return places(self.receivers, self.sources)


def places(clients: Sequence[int], among: Sequence[int]) -> Tensor:
    """Index of each of the `clients` in the list `among`, int64 (m,)."""
    place_of = {c: k for k, c in enumerate(among)}
    return torch.tensor([place_of[c] for c in clients], dtype=torch.int64)


@dataclass
class Weights:
    """The weights that a relation gave for one group of clients, receivers by sources: (layers or
    1, m or 1, n)."""

    group: ModelGroup
    weights: Tensor
    receivers: list[int]
    sources: list[int]

    def own(self) -> np.ndarray:
        """Each receiver's weight on itself by layer, float32 (m, L)."""
        rows = torch.arange(len(self.receivers))
        columns = places(self.receivers, self.sources)
        on_itself = self.weights[:, rows, columns].to(torch.float32)
        layers = len(self.group.layout.layers)
        return on_itself.expand(layers, -1).T.numpy()

    def view(self, layers: list[str]) -> RelationView:
        """The relation to be drawn: of layers that are not sent, each receiver has its own."""
        by_layer = self.weights.expand(len(layers), len(self.receivers), -1)
        by_receiver = by_layer.transpose(0, 1).numpy()
        # one copy: it is the largest there is
        rows = by_receiver.astype(np.float32, order="C")
        layer_of = self.group.layout.layer_of
        sent = layer_of[self.group.down_mask]
        unsent = np.setdiff1d(np.arange(len(layers)), sent)
        identity = np.equal.outer(self.receivers, self.sources)
        rows[:, unsent] = identity[:, None]
        return RelationView(rows, self.receivers, layers, self.sources)


def agreement(view: RelationView, groups: Sequence[int]) -> float | None:
    """The adjusted Rand index of the receivers' true `groups` (of every client) and their clusters
    by the models they receive.

    Clusters: average linkage on how much two clients receive of each other (mean over layers and
    both directions), cut at the true number of groups. The index sees the order of weights, not
    their size; rows with equal weights have 0. None: fewer than two groups, no two clients in one,
    more than `MOST_CLUSTERED` receivers, or nobody receives.
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
    likeness = received + received.T
    distance = likeness.max() - likeness
    np.fill_diagonal(distance, 0)
    pairs = squareform(distance, checks=False)
    tree = linkage(pairs, "average")
    clusters = fcluster(tree, count, "maxclust")
    return float(adjusted_rand_score(truth, clusters))


def one_view(parts: Sequence[Weights]) -> RelationView:
    """The relations of several groups in one picture of one layer, `model`: nobody receives another
    group's model."""
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
