"""Which classifiers suit which client's data, by the first two moments of features by class
(FedPAC)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.callbacks.relations import Relation
from fl_lightning.callbacks.simplex import simplex_minimum
from fl_lightning.core import Client, Payload, RelationInputs, RunContext, Server
from fl_lightning.core.layout import copy_columns
from fl_lightning.foundation.device import wide
from fl_lightning.methods.common.class_means import class_means
from fl_lightning.results.record import RelationView

MEANS, VARIANCE = "moments.means", "moments.V"


def no_moments(run: RunContext) -> dict[str, Tensor]:
    """What the server keeps at first: H_i, `moments.means` (N, C, d), and V_i, `moments.V` (N,)."""
    shape = (run.clients, run.data.num_classes, run.feature_width)
    return {MEANS: torch.zeros(shape), VARIANCE: torch.zeros(run.clients)}


def feature_moments(client: Client) -> dict[str, Tensor]:
    """H (C, d), where H_k is p_k times the mean feature of class k, and V, shape (), of the
    client's model and data.

    V = (mean ||z||^2 - ||H||^2) / n; the squares of all classes' H_k are summed.
    """
    device = client.run.device
    squares = torch.zeros((), dtype=wide(device), device=device)

    def noted(z: Tensor) -> Tensor:
        squares.add_(z.to(squares.dtype).square().sum())
        return z

    means, _, counts = class_means(client, bounded=noted)
    n = counts.sum()
    H = means * (counts / n)[:, None]
    return {MEANS: H, VARIANCE: ((squares.cpu() / n - H.double().square().sum()) / n).float()}


def lay_out(
    memory: Mapping[str, Tensor], uploads: Mapping[int, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """What the server keeps of moments after the clients' `uploads` (rows of `classes`)."""
    means, variance = memory[MEANS].clone(), memory[VARIANCE].clone()
    for client, tensors in uploads.items():
        means[client] = 0
        means[client, tensors["classes"].long()] = tensors[MEANS].to(means)
        variance[client] = tensors[VARIANCE]
    return {MEANS: means, VARIANCE: variance}


def collaborators(H: Tensor, V: Tensor, i: int) -> Tensor:
    """Client i's weights (n,) on all: argmin of a^T (diag V + D) a on the simplex, D_jl = <H_i -
    H_j, H_i - H_l>.

    `H` (n, C d) and `V` (n,) in float64.
    """
    apart = H[i] - H
    return simplex_minimum(torch.diag(V.clamp_min(0)) + apart @ apart.T)


def under_mean_body(server: Server, sent: Mapping[int, Payload]) -> None:
    """Put the server's body under the mixed classifiers that are to be `sent`, and show who has
    whose classifier."""
    group, layout = server.only, server.only.layout
    for payload in sent.values():
        copy_columns(
            payload.vector, group["model"], layout.segments(layout.mask(lambda b: not b.head))
        )
    if (mixed := group.weighed) is not None:
        rows = mixed.weights.transpose(0, 1).float().numpy()
        server.view = RelationView(rows, mixed.receivers, [layout.head], mixed.sources)


@dataclass
class Collaboration(Relation):
    """Every client's mix of the classifiers of all that have uploaded, by `collaborators`.

    Args:
        least: smaller weights count as 0.
    """

    least: float = 0.0
    sources = "uploaded"

    def weights(self, inputs: RelationInputs) -> Tensor:
        """Weights (1, m, n); a client that has uploaded none keeps its own."""
        H, V = (inputs.memory[name][inputs.sources].double() for name in (MEANS, VARIANCE))
        H = H.flatten(1)
        rows = torch.eye(len(inputs.sources), dtype=torch.float64)[inputs.places]
        for row, i in zip(rows, inputs.places.tolist(), strict=True):
            if H[i].any():
                weights = collaborators(H, V, i)
                weights = weights * (weights >= min(self.least, float(weights.max())))
                row.copy_(weights / weights.sum())
        return rows[None]
