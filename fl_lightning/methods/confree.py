"""ConFREE: Zheng, Hu, Yang, Zheng, Xu, Wang: ConFREE: Conflict-free Client Update Aggregation for
Personalized Federated Learning. AAAI 2025.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.callbacks.relations import check_finite
from fl_lightning.callbacks.simplex import simplex_rows
from fl_lightning.methods import (
    Block,
    PlainMean,
    Range,
    Scope,
    Server,
    ShareBelow1,
    Traits,
    searched,
)


@dataclass(frozen=True)
class ConFREE(PlainMean):
    """FedPer whose server removes conflicts between the clients' updates, and adds a step that
    favours the client that gains least.

    Let D_i be the clients' updates. The guidance vector d is the mean of the D_i, after subtracting
    from each its projections on all D_j with <D_i, D_j> < 0. The server sets w <- w + d + c ||d||
    D_v / ||D_v||, with D_v = sum_j v_j D_j; v minimises <d, D_v> + c ||d|| ||D_v|| over the
    simplex. A client's gain from a step is the inner product of the step and the client's update.
    No other step within the distance c ||d|| of d gives the client that gains least a greater gain.
    Running statistics are the plain mean.

    Args:
        c: radius of the ball around d, in units of ||d||. 0.5: our choice, the middle of the
            paper's (0, 1).
        by: one step for the whole exchanged part (`model`: the paper's formula), or one for each
            `layer` (the authors' code: for each tensor).
        classifier: each client's `own`, as in the methods that the paper combines with this one, or
            `shared`.
        rescaled: whether the step is divided by 1 + c^2 (the authors' code).
    """

    traits = Traits(family="partial sharing", judge="after", several=False)

    c: ShareBelow1 = searched(0.5, Range(0.1, 0.9), "the paper's (0, 1)")
    by: Literal["model", "layer"] = "model"
    classifier: Literal["own", "shared"] = "own"
    rescaled: bool = False

    def scope(self, block: Block) -> Scope:
        return "personal" if block.head and self.classifier == "own" else "shared"

    def aggregate(self, server: Server) -> None:
        """Move the global model by the conflict-free step."""
        group = server.only
        layout = group.layout
        clients = server.answered
        old = group["model"]
        received = group.group.down_mask
        parameters = layout.is_parameter & received
        by_layer = self.by == "layer"
        plain = torch.full((len(clients),), 1 / len(clients), dtype=torch.float64)
        mean = group.mean(plain, clients, like=old)
        gram = group.gram(clients, parameters, "sent", by_layer=by_layer).full
        steps = torch.stack(
            [conflict_free_weights(G, self.c, rescaled=self.rescaled) for G in gram]
        )
        # `mean` below wants weights that sum to 1; what is added here is subtracted again
        remainder = 1 - steps.sum(1)
        weights = steps + remainder[:, None] * plain
        new = group.mean(weights, clients, by_layer=by_layer, like=old)
        for s in layout.segments(parameters, by_layer=by_layer):
            new[s.columns] -= float(remainder[s.layer]) * (mean - old)[s.columns]
        for s in layout.segments(received & ~parameters):
            new[s.columns] = mean[s.columns]
        group["model"] = new


RIDGE = 1e-9
"""In units of the updates' mean squared norm: added to inner products, so that the weights are
unique if updates are linearly dependent. A smaller squared norm counts as no update."""


HALVINGS = 60
"""Bisection steps for the norm of D_w: enough for float64's last bit."""


def guidance_weights(G: Tensor) -> Tensor:
    """Return the weights (n,) of the updates D_j in the guidance vector d, the mean of
    conflict-free updates.

    From each update, its projections on all updates with a negative inner product are subtracted.
    An update that is nearly 0 (`RIDGE`) conflicts with none, since rounding decides its direction.

    Args:
        G: inner products of the updates, (n, n).
    """
    squares = G.diagonal()
    itself = torch.eye(len(G), dtype=G.dtype)
    conflicts = (G < 0) & (itself == 0) & (squares > RIDGE * squares.mean())
    return (itself - torch.where(conflicts, G / squares, 0)).mean(0)


def worst_off(G: Tensor, guide: Tensor, c: float) -> Tensor:
    """Return the weights w (n,) of the mix of updates D_w = sum_j w_j D_j that gains least, even
    from the best step near d: those on the simplex that minimise <d, D_w> + c ||d|| ||D_w||.

    ||D_w|| is the minimum over s > 0 of ||D_w||^2 / (2 s) + s / 2, at s = ||D_w||. Bisection finds
    s; for each s the weights solve a quadratic problem.

    Args:
        G: inner products of the updates, (n, n).
        guide: weights (n,) of the updates in d.
        c: radius in units of ||d||.
    """
    G = G + RIDGE * torch.eye(len(G), dtype=G.dtype)
    b = G @ guide
    k = c * length(G, guide)
    low = 1e-6
    high = float(G.diagonal().max().sqrt())
    w = torch.full_like(guide, 1 / len(G))
    if k <= 0 or len(G) == 1:
        return w
    for _ in range(HALVINGS):
        s = (low + high) / 2
        w = simplex_rows(G * (k / s), -b[None])[0]
        if length(G, w) < s:
            high = s
        else:
            low = s
    return w


def length(G: Tensor, weights: Tensor) -> float:
    """Return the norm of a weighted sum of updates, ||sum_j weights_j D_j||.

    Args:
        G: inner products of the updates D_j, (n, n).
        weights: (n,).
    """
    return float((weights @ G @ weights).clamp_min(0).sqrt())


RADIUS = 1e-7
"""Smallest radius c for which the step's second part is computed; below, it is lost in float32's
rounding."""


def conflict_free_weights(G: Tensor, c: float, *, rescaled: bool) -> Tensor:
    """Return the weights (n,) of the updates in the server's step d + c ||d|| D_w / ||D_w||, with
    the guidance vector d and the `worst_off` weights w.

    Args:
        G: inner products of the updates, (n, n).
        c: radius in units of ||d||.
        rescaled: whether to divide by 1 + c^2.

    Raises:
        RunFailed: an update is not finite.
    """
    check_finite(G)
    scale = float(G.diagonal().mean())
    if scale <= 0:
        return torch.full((len(G),), 1 / len(G), dtype=G.dtype)
    G = (G + G.T) / (2 * scale)
    step = guidance_weights(G)
    if c < RADIUS:
        return step
    w = worst_off(G, step, c)
    norm = length(G, w)
    if norm > 1e-12:
        step = step + c * length(G, step) / norm * w
    return step / (1 + c**2) if rescaled else step
