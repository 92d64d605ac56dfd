"""Several prototypes of each class, by clusters of clients' class means, and the losses on them (FPL)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fl_lightning.methods.common.basics import wide
from fl_lightning.methods.common.finch import finch, means


def cluster_prototypes(uploads: Iterable[Mapping[str, Tensor]], like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean uploads of each cluster (K, d), of the type of `like` (C, d), and their classes (K,), ascending.

    Each of `uploads` has `classes` and `features`, a row for each.
    """
    uploads = list(uploads)
    y = torch.cat([torch.empty(0, dtype=torch.int64), *(u["classes"].long() for u in uploads)])
    points = torch.cat([like[:0], *(u["features"].to(like) for u in uploads)])
    parts = [means(points[y == k], finch(points[y == k])) for k in y.unique()]
    classes = [torch.full((len(part),), int(k)) for part, k in zip(parts, y.unique(), strict=True)]
    return torch.cat([like[:0], *parts]), torch.cat([torch.empty(0, dtype=torch.int64), *classes])


def cluster_losses(features: Tensor, labels: Tensor, known: Tensor, classes: Tensor, tau: float) -> Tensor:
    """-log of the own class's share of e^(cos(z, p) / tau) over all prototypes p, + the mean squared distance of z to
    the mean of the own class's; the sum over a batch's samples of known classes, over the size of the batch, shape ().

    Args:
        features: z, (batch, d).
        labels: (batch,).
        known: prototypes (K, d).
        classes: theirs, (K,).
        tau: temperature.
    """
    z = wide(features)
    own = labels[:, None] == classes
    here = own.any(1)
    if not here.any():
        return z.sum() * 0
    z, own = z[here], own[here]
    scores = cosine_similarity(z[:, None], known, 2) / tau
    contrast = scores.logsumexp(1) - scores.masked_fill(~own, -torch.inf).logsumexp(1)
    centre = own.to(known) @ known / own.sum(1, keepdim=True)
    return (contrast + (z - centre).square().mean(1)).sum() / len(labels)
