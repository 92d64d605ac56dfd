"""Who receives whose knowledge: what a relation answered, and how that can be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.protocols import places
from fl_lightning.core.run import ModelGroup
from fl_lightning.results.record import RelationView


@dataclass
class Weights:
    """What a relation answered for one group of clients: `weights` (layers or 1, m or 1, n),
    receivers by sources."""

    group: ModelGroup
    weights: Tensor
    receivers: list[int]
    sources: list[int]

    def own(self) -> np.ndarray:
        """Each receiver's weight on itself by layer, float32 (m, L)."""
        rows = torch.arange(len(self.receivers))
        columns = places(self.receivers, self.sources)
        own = self.weights[:, rows, columns].to(torch.float32)
        return own.expand(len(self.group.layout.layers), -1).T.numpy()

    def view(self, layers: list[str]) -> RelationView:
        """As it can be drawn: layers of which nothing is sent are one's own."""
        group = self.group
        weights = self.weights.expand(len(layers), len(self.receivers), -1)
        # one copy: it is the largest there is
        rows = weights.transpose(0, 1).numpy().astype(np.float32, order="C")
        sent = set(group.layout.layer_of[group.down_mask].tolist())
        own = [layer for layer in range(len(layers)) if layer not in sent]
        rows[:, own] = np.equal.outer(self.receivers, self.sources)[:, None]
        return RelationView(rows, self.receivers, layers, self.sources)


def agreement(view: RelationView, groups: Sequence[int]) -> float | None:
    """The adjusted Rand index of the receivers' true `groups` (of every client) and clusters by
    what they receive.

    Clusters: average linkage on how much two receive of each other (mean over layers and both
        ways), cut at the true
    number of groups. It sees the order of weights, not their size; rows that tell nobody apart have
    0. None: fewer than two groups, or no two clients in one, or nobody receives.
    """
    known = set(view.sources)
    receivers = sorted(c for c in view.receivers if c in known)
    true = np.array([groups[c] for c in receivers])
    count = len(np.unique(true))
    if not 1 < count < len(true) <= MOST_CLUSTERED:
        return None
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform
    from sklearn.metrics import adjusted_rand_score

    index = (places(receivers, clients).numpy() for clients in (view.receivers, view.sources))
    rows = view.rows.mean(axis=1, dtype=np.float64)[np.ix_(*index)]
    likeness = rows + rows.T
    apart = likeness.max() - likeness
    np.fill_diagonal(apart, 0)
    clusters = fcluster(linkage(squareform(apart, checks=False), "average"), count, "maxclust")
    return float(adjusted_rand_score(true, clusters))


MOST_CLUSTERED = 2000
"""Receivers whose rows are clustered: its cost grows with the square, half a second there."""


def one_view(parts: Sequence[Weights]) -> RelationView:
    """The relations of several groups in one picture of one layer, `model`: nobody receives another
    group's model."""
    everyone = sorted(c for p in parts for c in p.receivers)
    mixed = sorted(c for p in parts for c in p.sources)
    table = np.zeros((len(everyone), len(mixed)), np.float32)
    for part in parts:
        place = np.ix_(
            np.searchsorted(everyone, part.receivers), np.searchsorted(mixed, part.sources)
        )
        rows = part.weights[0].expand(len(part.receivers), -1).numpy()
        table[place] = (
            rows if part.group.down_mask.any() else np.equal.outer(part.receivers, part.sources)
        )
    return RelationView(table[:, None], everyone, ["model"], mixed)
