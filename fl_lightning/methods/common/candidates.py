"""Choosing among models of others: which to fetch, and how much each helps (Zhang et al., FedFomo,
ICLR 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core import Client, Payload, Server
from fl_lightning.core.vectors import fetched
from fl_lightning.data.part import Part
from fl_lightning.foundation.rng import numpy_rng


def epsilon_greedy(
    scores: Tensor, among: Sequence[int], count: int, epsilon: float, rng: np.random.Generator
) -> list[int]:
    """`count` of `among`, by `scores` (N,): each the best that is left, or with probability
    `epsilon` any that is."""
    left = [int(j) for j in rng.permutation(sorted(among))]
    left.sort(key=lambda j: -float(scores[j]))  # a stable order: ties stay as they were drawn
    return [
        left.pop(int(rng.integers(len(left))) if rng.random() < epsilon else 0)
        for _ in among[:count]
    ]


def send_candidates(
    server: Server, scores: Tensor, count: int, epsilon: float
) -> dict[int, Payload]:
    """To every client `count` models of others that have uploaded, and no other model.

    Args:
        server: of one architecture.
        scores: by client and candidate, (N, N).
        count: of each client, at most.
        epsilon: probability of any in place of the best.
    """
    run, group, sources = server.run, server.only, {}
    for c in group.cohort:
        rng = numpy_rng(run.config.seed, "candidates", c, server.round)
        sources[c] = epsilon_greedy(
            scores[c], sorted(run.server.uploaded - {c}), count, epsilon, rng
        )
    sent = group.send(dict.fromkeys(group.here, group.initial))
    for c, models in fetched(group, sources).items():
        sent[c].sent[:], sent[c].further = False, group.send(models)
    return sent


def first_order_gains(
    client: Client, part: Part, start: Tensor, models: Sequence[Tensor], norm: int = 2
) -> Tensor:
    """(L(start) - L(model)) / ||model - start|| of each of the `models` (D,) on `part`, float64
    (models,).

    0 where a model is the start, or its loss is not finite. `norm`: 2 for the Euclidean, 1 for the
    sum of absolutes.
    """
    base, columns, gains = client.loss(part, start), client.layout.parameters, []
    for model in models:
        away = float((model - start)[columns].norm(norm))
        gains.append((base - client.loss(part, model)) / away if away else 0.0)
    client.flops += 3 * client.layout.size * len(models)
    return torch.tensor(gains, dtype=torch.float64).nan_to_num(0.0, 0.0, 0.0)


def positive_shares(gains: Tensor) -> Tensor:
    """max(gain, 0) over their sum, over the last dimension; all 0 where no gain is above 0."""
    positive = gains.clamp_min(0.0)
    return positive / positive.sum(-1, keepdim=True).clamp_min(torch.finfo(gains.dtype).tiny)


def towards(start: Tensor, models: Sequence[Tensor], shares: Tensor) -> Tensor:
    """start + sum of shares (model - start), a new vector (D,); where all shares are 0 it is the
    start."""
    moved = start.clone()
    for model, share in zip(models, shares.tolist(), strict=True):
        if share:
            moved += share * (model - start)
    return moved


def uploaded_gains(server: Server, *, relative: bool = False) -> Tensor:
    """What was uploaded in this round, (N, N), float64: by client and candidate, 0 where nothing
    was; `relative`: each client's over |their sum|, so that a round counts as much as any other."""
    gains = torch.zeros(server.clients, server.clients, dtype=torch.float64)
    for c, uploaded in server.statistics.items():
        gains[c, uploaded["candidates"].long()] = uploaded["gains"]
    return gains / gains.sum(1, keepdim=True).abs().clamp_min(1e-9) if relative else gains
