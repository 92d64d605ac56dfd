"""Quadratic functions on the simplex."""

from __future__ import annotations

import torch
from torch import Tensor


def simplex_minimum(Q: Tensor) -> Tensor:
    """argmin of a^T Q a over a >= 0 with sum 1, (n,), for a positive semidefinite `Q` (n, n), float64; of 0: uniform.

    The minimum of x^T Q x + (sum x - 1)^2 over x >= 0 lies in the same direction, whatever the scale of Q (for
    x = s a the best s depends on a^T Q a alone, and grows as that shrinks): that is non-negative least squares.
    """
    from sklearn.linear_model import LinearRegression

    n, scale = len(Q), float(Q.diagonal().mean())
    if scale <= 0:
        return torch.full((n,), 1 / n, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(Q / scale)
    root = values.clamp_min(0).sqrt()[:, None] * vectors.T
    rows, target = torch.cat([root, torch.ones(1, n, dtype=Q.dtype)]), torch.zeros(n + 1, dtype=Q.dtype)
    target[-1] = 1
    x = torch.from_numpy(LinearRegression(fit_intercept=False, positive=True).fit(rows.numpy(), target.numpy()).coef_)
    return x / x.sum()
