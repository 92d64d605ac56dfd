"""The relation's formulas against autograd and closed forms."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from reckoning import by_supports, seeded
from torch.testing import assert_close

from fl_lightning.callbacks.cube import CubeSettings, LearnedCube, exact, gradient, to_simplex
from fl_lightning.core.mixing import Gram
from fl_lightning.core.relation import RelationInputs
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.methods.kapc import KAPC


def gram_of(W):
    """Gram of models W (L, n, d), as the server computes it."""
    mean = W.mean(1)
    D = W - mean[:, None]
    return Gram(D @ D.transpose(1, 2), (D @ mean[:, :, None])[..., 0], (mean * mean).sum(-1))


def models(L=3, n=6, d=40, drift=0.3, seed=0):
    """Clients that have drifted from one common model."""
    g = seeded(seed)
    common = torch.randn(L, 1, d, generator=g, dtype=torch.float64)
    return common + drift * torch.randn(L, n, d, generator=g, dtype=torch.float64)


def cube(**changes):
    return LearnedCube(CubeSettings(**changes))


def inputs(W, cube_, receivers, sources):
    samples = torch.arange(1, len(sources) + 1, dtype=torch.float64)
    return RelationInputs(
        receivers,
        sources,
        samples,
        W.shape[0],
        cube_.shape[0],
        {"relation": cube_},
        lambda: gram_of(W[:, sources]),
    )


@pytest.mark.parametrize("on_simplex", [True, False])
def test_gradient_is_autograds(on_simplex):
    W, prior = models(), torch.full((6,), 1 / 6, dtype=torch.float64)
    R = torch.rand(3, 6, 6, dtype=torch.float64, generator=seeded(1))
    if on_simplex:
        R /= R.sum(-1, keepdim=True)
    R.requires_grad_()
    lam, beta = 0.7, 0.3
    objective = lam * (R @ W - W).square().sum() + beta / 2 * (R - prior).square().sum()
    (expected,) = torch.autograd.grad(objective, R)
    got = gradient(R.detach(), gram_of(W), prior, lam, beta, torch.arange(6))
    assert (got - expected).abs().max() <= 1e-10


def test_projection_is_the_nearest_point():
    g = seeded(3)
    points = torch.randn(50, 4, dtype=torch.float64, generator=g)
    got = to_simplex(points)
    assert (got >= 0).all()
    assert_close(got.sum(-1), torch.ones(50, dtype=torch.float64))
    for point, answer in zip(points.numpy(), got.numpy(), strict=True):
        assert_allclose(answer, by_supports(np.eye(4), point), atol=1e-12)


@pytest.mark.parametrize("rho", [1e-3, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_exact_rows_are_the_minimum(rho, seed):
    W = models(L=1, n=5, d=8, drift=1.0, seed=seed)
    W[0, 1] = W[0, 0] + 0.05 * W[0, 1]  # two clients that are nearly the same
    prior = torch.tensor([0.4, 0.1, 0.2, 0.2, 0.1], dtype=torch.float64)
    R = exact(gram_of(W).centred, prior, torch.tensor([rho], dtype=torch.float64), torch.arange(5))[
        0
    ]
    assert (R >= 0).all()
    assert_close(R.sum(-1), torch.ones(5, dtype=torch.float64))
    X, p = W[0].numpy(), prior.numpy()
    for row, x in zip(R.numpy(), X, strict=True):
        best = by_supports(X @ X.T + rho * np.eye(5), X @ x + rho * p)
        assert_allclose(row, best, atol=1e-8)


def test_a_partial_cohort_keeps_the_mass_it_had():
    """Written back scaled, a slice moves no weight to or from clients that are away; the literal
    form does."""
    W, n, cohort = models(n=8), 8, [1, 4, 6]
    start = torch.full((n, 3, n), 1 / n, dtype=torch.float64)
    kept, literal = start.clone(), start.clone()
    cube().weights(inputs(W, kept, cohort, cohort))
    cube(partial="literal").weights(inputs(W, literal, cohort, cohort))
    away = [c for c in range(n) if c not in cohort]
    assert torch.equal(kept[:, :, away], start[:, :, away])
    assert torch.equal(kept[away], start[away])
    assert_close(kept[cohort][:, :, cohort].sum(-1), torch.full((3, 3), 3 / 8, dtype=torch.float64))
    assert (literal[cohort][:, :, cohort].sum(-1) > 3 / 8 + 0.1).all()
    for whole in (kept, literal):
        assert_close(whole.sum(-1), torch.ones(n, 3, dtype=torch.float64))


def test_a_slice_without_weight_starts_from_the_prior_again():
    W, n = models(n=4), 4
    R = torch.full((n, 3, n), 0.5, dtype=torch.float64)
    R[0, :, :2], R[0, :, 2:] = 0.5, 0.0
    # own weight 0.5, so this slice has mass
    rows = cube(eta_r=0.0).weights(inputs(W, R, [0], [0, 2]))
    assert_close(rows[:, 0], torch.tensor([[1.0, 0.0]] * 3, dtype=torch.float64))
    R[0] = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    rows = cube(eta_r=0.0).weights(inputs(W, R, [0], [0, 2]))
    assert_close(rows, torch.full((3, 1, 2), 0.5, dtype=torch.float64))
    assert_close(R[0].sum(-1), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("partial", ["preserve", "literal"])
def test_without_a_projection_rows_keep_the_sum_that_the_steps_gave_them(partial):
    W, R, everyone = (
        models(drift=0.1),
        torch.full((6, 3, 6), 1 / 6, dtype=torch.float64),
        list(range(6)),
    )
    unbound, want = cube(projection="none", eta_r=1e-3, partial=partial), R.transpose(0, 1).clone()
    prior = torch.full((6,), 1 / 6, dtype=torch.float64)
    for _ in range(3):
        rows = unbound.weights(inputs(W, R, everyone, everyone))
        want -= 1e-3 * gradient(want, gram_of(W), prior, 1.0, 0.01, torch.arange(6))
        assert_close(rows, want)
    assert (rows.sum(-1) - 1).abs().max() > 1e-3


def test_without_a_projection_the_paper_step_explodes_and_says_so():
    W = 100 * models()
    R = torch.full((6, 3, 6), 1 / 6, dtype=torch.float64)
    everyone = list(range(6))
    with pytest.raises(RunFailed, match="projection"):
        for _ in range(200):
            cube(projection="none").weights(inputs(W, R, everyone, everyone))


def test_random_rows_are_drawn_evenly_from_the_simplex_by_the_seed_alone(make_run):
    cubes = [
        make_run(KAPC(init="random"), clients=40, seed=s).server.memory["relation"]
        for s in (0, 0, 1)
    ]
    assert torch.equal(cubes[0], cubes[1]) and not torch.equal(cubes[0], cubes[2])
    rows = cubes[0].flatten(0, 1)
    assert (rows >= 0).all()
    assert_close(rows.sum(-1), torch.ones(len(rows), dtype=torch.float64))
    # Dirichlet(1, ..., 1)
    assert float(rows.var()) == pytest.approx((1 / 40) * (39 / 40) / 41, rel=0.2)
    assert (make_run(KAPC()).server.memory["relation"] == 0.25).all()


def test_the_pull_alone_leaves_the_prior():
    """lam = 0 makes rho infinite: every row is the prior."""
    W = models()
    R = torch.full((6, 3, 6), 1 / 6, dtype=torch.float64)
    rows = cube(lam=0.0, solver="exact", prior="samples").weights(
        inputs(W, R, list(range(6)), list(range(6)))
    )
    samples = torch.arange(1, 7, dtype=torch.float64)
    assert torch.equal(rows, (samples / 21).expand(3, 6, 6))
