"""Points on the simplex (non-negative entries that sum to 1): nearest points, and minima of
quadratic functions."""

import torch
from torch import Tensor

from fl_lightning.foundation.errors import RunFailed

PIVOTS = 20
"""Greatest number of steps of block pivoting. It ends within a few, or it may cycle, for instance
if there are more sources than dimensions."""


def to_simplex(R: Tensor) -> Tensor:
    """Return the nearest points (Euclidean) with non-negative entries that sum to 1, over the last
    dimension; all NaN if any number is not finite."""
    u = R.sort(dim=-1, descending=True).values
    k = torch.arange(1, R.shape[-1] + 1, dtype=R.dtype, device=R.device)
    threshold = (u.cumsum(-1) - 1) / k
    last = (u > threshold).sum(-1, keepdim=True) - 1
    if (last < 0).any():  # numbers so great that 1 is lost: only their differences count
        R = R - u[..., :1]
        return to_simplex(R) if R.isfinite().all() else torch.full_like(R, torch.nan)
    return (R - threshold.gather(-1, last)).clamp_min(0.0)


def simplex_rows(H: Tensor | float, Q: Tensor) -> Tensor:
    """Return the rows r that minimise r H r / 2 - r q over the simplex, by block principal pivoting
    over the free entries.

    Rows for which pivoting does not end within `PIVOTS` steps are computed by non-negative least
    squares.

    Args:
        H: positive definite (n, n), float64. Its symmetric part is used: float32 products are
            slightly asymmetric by rounding, and pivoting on those may never end. A number h > 0
            stands for h I, which needs only a projection.
        Q: one q for each row, (k, n), float64.

    Returns:
        Rows (k, n), non-negative, summing to 1.

    Raises:
        RunFailed: H or Q is not finite, and a row needs least squares; other rows are NaN then.
    """
    if not isinstance(H, Tensor):
        return to_simplex(Q / H)
    k, n = Q.shape
    H = (H + H.T) / 2
    scale = float(H.diagonal().max())
    tolerance = 1e-11 * scale
    free = torch.ones(k, n, dtype=torch.bool)
    for _ in range(PIVOTS):
        pair = free[:, :, None] & free[:, None, :]
        scaled = free.to(H.dtype) * scale
        K = H.new_zeros(k, n + 1, n + 1)
        K[:, :n, :n] = torch.where(pair, H, 0.0) + torch.diag_embed(scale - scaled)
        K[:, :n, n] = K[:, n, :n] = scaled
        right = H.new_full((k, n + 1), scale)
        right[:, :n] = torch.where(free, Q, 0.0)
        solution = torch.linalg.solve(K, right)
        r = solution[:, :n]
        multiplier = solution[:, n:] * scale
        slack = r @ H - Q + multiplier  # must be >= 0 where r = 0
        change = (free & (r < -1e-13)) | (~free & (slack < -tolerance))
        if not change.any():
            break
        free = free ^ change
        free |= ~free.any(-1, keepdim=True) & (Q.max(-1, keepdim=True).values == Q)
    unfinished = change.any(-1)
    if unfinished.any():
        r[unfinished] = _by_least_squares(H, Q[unfinished])
    r = r.clamp_min(0.0)
    return r / r.sum(-1, keepdim=True)


def simplex_minimum(Q: Tensor) -> Tensor:
    """Return the a (n,) that minimises a^T Q a over a >= 0 with sum 1, for a positive semidefinite
    `Q` (n, n), float64; uniform if `Q` is 0."""
    n = len(Q)
    scale = float(Q.diagonal().mean())
    if scale <= 0:
        return torch.full((n,), 1 / n, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(Q / scale)
    return _shortest(values.clamp_min(0).sqrt()[:, None] * vectors.T)


def _by_least_squares(H: Tensor, Q: Tensor) -> Tensor:
    """Return rows as `simplex_rows` does. With H = A^T A and q = A^T b, A r - b is (A - b 1^T) r on
    the simplex."""
    values, vectors = torch.linalg.eigh(H)
    if not (values.isfinite().all() and Q.isfinite().all()):
        reason = "a number is not finite; lower optimizer.lr"
        raise RunFailed(f"a relation's rows cannot be computed: {reason}")
    root = values.clamp_min(1e-12 * float(values[-1])).sqrt()[:, None]
    A = root * vectors.T
    b = (vectors.T @ Q.T) / root
    return torch.stack([_shortest((A - b[:, k, None]) / root[-1]) for k in range(len(Q))])


def _shortest(A: Tensor) -> Tensor:
    """Return the a (n,) that minimises ||A a|| over a >= 0 with sum 1; `A` (m, n).

    The minimum of ||A x||^2 + (sum x - 1)^2 over x >= 0 lies in the same direction, whatever the
    scale of A: for x = s a the best s depends on ||A a|| alone, and grows as that shrinks. So
    non-negative least squares finds it.
    """
    from sklearn.linear_model import LinearRegression

    rows = torch.cat([A, A.new_ones(1, A.shape[1])])
    target = A.new_zeros(len(A) + 1)
    target[-1] = 1
    regression = LinearRegression(fit_intercept=False, positive=True)
    x = torch.from_numpy(regression.fit(rows.numpy(), target.numpy()).coef_)
    return x / x.sum()
