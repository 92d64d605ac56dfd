"""Updates of clients that conflict, and the step that suits the worst off (ConFREE: Zheng et al.,
AAAI 2025).

Everything is done on the Gram matrix G (n, n), float64, of the clients' updates D_j, never on
models: a vector is given by its coefficients on them, (n,).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.callbacks.simplex import simplex_rows
from fl_lightning.foundation.errors import RunFailed

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
    n, squares = len(G), G.diagonal()
    conflicts = (G < 0) & ~torch.eye(n, dtype=torch.bool) & (squares > RIDGE * squares.mean())
    return (torch.eye(n, dtype=G.dtype) - torch.where(conflicts, G / squares, 0)).mean(0)


def worst_off(G: Tensor, guide: Tensor, c: float) -> Tensor:
    """The weights w (n,) on the simplex that minimise <d, D_w> + c ||d|| ||D_w||, D_w = sum_j w_j
    D_j, d the `guide`.

    ||D_w||^2 / (2 s) + s / 2 is at least ||D_w||, and equal where s = ||D_w||: the best s is found
    by halving, and for each s the weights solve a quadratic problem.
    """
    G = G + RIDGE * torch.eye(len(G), dtype=G.dtype)
    b, k = G @ guide, c * float((guide @ G @ guide).clamp_min(0).sqrt())
    low, high = 1e-6, float(G.diagonal().max().sqrt())
    w = torch.full_like(guide, 1 / len(G))
    for _ in range(HALVINGS if k > 0 and len(G) > 1 else 0):
        s = (low + high) / 2
        w = simplex_rows(G * (k / s), -b[None])[0]
        shorter = float((w @ G @ w).clamp_min(0).sqrt()) < s
        low, high = (low, s) if shorter else (s, high)
    return w


RADIUS = 1e-7
"""Below so small a radius the step's second part is lost in float32's rounding, and its weights
cannot be found."""


def conflict_free(G: Tensor, c: float, *, rescaled: bool) -> Tensor:
    """d + c ||d|| D_w / ||D_w||, of the guidance vector d and the `worst_off` w; over 1 + c^2 where
    it is `rescaled`.

    Raises:
        RunFailed: an update is not finite.
    """
    if not G.isfinite().all():
        raise RunFailed("a client's model is no longer finite; lower optimizer.lr")
    scale = float(G.diagonal().mean())
    if scale <= 0:
        return torch.full((len(G),), 1 / len(G), dtype=G.dtype)
    G = (G + G.T) / (2 * scale)
    guide = guidance(G)
    if c < RADIUS:
        return guide
    w = worst_off(G, guide, c)
    lengths = [float((v @ G @ v).clamp_min(0).sqrt()) for v in (guide, w)]
    step = guide + (c * lengths[0] / lengths[1] * w if lengths[1] > 1e-12 else 0)
    return step / (1 + c**2) if rescaled else step
