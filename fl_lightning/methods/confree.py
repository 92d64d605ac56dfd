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
    """FedPer whose server keeps conflicting updates from cancelling, and goes further for the
    client worst off.

    Server: w <- w + d + c ||d|| D_v / ||D_v||. d is the mean of the updates D_i, each less its
    projections on the D_j with <D_i, D_j> < 0; v minimises <d, D_v> + c ||d|| ||D_v|| on the
    simplex, D_v = sum_j v_j D_j. So of all steps within c ||d|| of d it is the one whose least
    <step, D_j> is greatest. Running statistics: the plain mean.

    Args:
        c: radius about the guidance vector d. 0.5: our choice, the middle of the paper's (0, 1).
        by: one step for all that is exchanged (`model`: the paper's formula), or one for each
            `layer` (the authors' code: each tensor).
        classifier: each client's `own`, as in methods that the paper adds this to, or `shared`.
        rescaled: the step is divided by 1 + c^2 (the authors' code).
    """

    traits = Traits(family="partial sharing", judge="after", several=False)

    c: ShareBelow1 = searched(0.5, Range(0.1, 0.9), "the paper's (0, 1)")
    by: Literal["model", "layer"] = "model"
    classifier: Literal["own", "shared"] = "own"
    rescaled: bool = False

    def scope(self, block: Block) -> Scope:
        """All, or all but the classifier."""
        return "personal" if block.head and self.classifier == "own" else "shared"

    def aggregate(self, server: Server) -> None:
        """The conflict-free step."""
        group = server.only
        layout = group.layout
        who = server.answered
        old = group["model"]
        received = group.group.down_mask
        parameters = layout.is_parameter & received
        by_layer = self.by == "layer"
        plain = torch.full((len(who),), 1 / len(who), dtype=torch.float64)
        mean = group.mean(plain, who, like=old)
        gram = group.gram(who, parameters, "sent", by_layer=by_layer).full
        steps = torch.stack([conflict_free(G, self.c, rescaled=self.rescaled) for G in gram])
        spare = 1 - steps.sum(1)  # of weights that sum to 1: so much of the mean is taken back
        weights = steps + spare[:, None] * plain
        new = group.mean(weights, who, by_layer=by_layer, like=old)
        for s in layout.segments(parameters, by_layer=by_layer):
            new[s.columns] -= float(spare[s.layer]) * (mean - old)[s.columns]
        for s in layout.segments(received & ~parameters):
            new[s.columns] = mean[s.columns]
        group["model"] = new


RIDGE = 1e-9
"""Of the mean squared norm of updates: makes the weights unique where updates depend on each other;
updates of less are none."""


HALVINGS = 60
"""Of the interval in which the norm of the answer lies: to the last bit of float64."""


def guidance(G: Tensor) -> Tensor:
    """The mean of the updates, each less its projections on those that it conflicts with (<D_i,
    D_j> below 0).

    Who has next to no update (`RIDGE`) is in conflict with nobody: its direction is rounding.
    """
    squares = G.diagonal()
    itself = torch.eye(len(G), dtype=G.dtype)
    conflicts = (G < 0) & (itself == 0) & (squares > RIDGE * squares.mean())
    return (itself - torch.where(conflicts, G / squares, 0)).mean(0)


def worst_off(G: Tensor, guide: Tensor, c: float) -> Tensor:
    """The weights w (n,) on the simplex that minimise <d, D_w> + c ||d|| ||D_w||, D_w = sum_j w_j
    D_j, d the `guide`.

    ||D_w||^2 / (2 s) + s / 2 is at least ||D_w||, and equal where s = ||D_w||: the best s is found
    by halving, and for each s the weights solve a quadratic problem.
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
    """Norm of the sum of updates by `weights` (n,), from their inner products `G` (n, n)."""
    return float((weights @ G @ weights).clamp_min(0).sqrt())


RADIUS = 1e-7
"""Below so small a radius the step's second part is lost in float32's rounding, and its weights
cannot be found."""


def conflict_free(G: Tensor, c: float, *, rescaled: bool) -> Tensor:
    """d + c ||d|| D_w / ||D_w||, of the guidance vector d and the `worst_off` w; over 1 + c^2 where
    it is `rescaled`.

    Raises:
        RunFailed: an update is not finite.
    """
    check_finite(G)
    scale = float(G.diagonal().mean())
    if scale <= 0:
        return torch.full((len(G),), 1 / len(G), dtype=G.dtype)
    G = (G + G.T) / (2 * scale)
    step = guidance(G)
    if c < RADIUS:
        return step
    w = worst_off(G, step, c)
    reach = length(G, w)
    if reach > 1e-12:
        step = step + c * length(G, step) / reach * w
    return step / (1 + c**2) if rescaled else step
