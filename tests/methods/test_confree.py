"""ConFREE: updates without their conflicts, and the step that suits the client worst off."""

import pytest
import torch
from reckoning import seeded
from torch.testing import assert_close
from watching import Watch, global_model

from fl_lightning.methods.confree import ConFREE, conflict_free_weights, guidance_weights, worst_off

EXACT = {"precision": "64-true", "rounds": 2}


def updates(n=4, d=6, seed=0):
    """Random updates (n, d) of which some conflict."""
    return torch.randn(n, d, generator=seeded(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(3))
def test_the_step_is_the_best_for_the_worst_off(seed):
    """Of all steps within c ||d|| of d: its least <step, D_j> is the dual's value, and no random
    step reaches it."""
    D, c = updates(seed=seed), 0.5
    G = D @ D.T
    d = guidance_weights(G) @ D
    w = worst_off(G, guidance_weights(G), c)
    assert (w >= 0).all() and float(w.sum()) == pytest.approx(1)
    step, radius = conflict_free_weights(G, c, rescaled=False) @ D, c * d.norm()
    assert float((step - d).norm()) == pytest.approx(float(radius), rel=1e-6)
    dual = d @ (w @ D) + radius * (w @ D).norm()
    assert float((D @ step).min()) == pytest.approx(float(dual), rel=1e-4)
    away = torch.randn(2000, 6, generator=seeded(9), dtype=torch.float64)
    others = d + radius * away / away.norm(dim=1, keepdim=True)
    assert (others @ D.T).min(1).values.max() < dual + 1e-6
    assert_close(conflict_free_weights(G, c, rescaled=True) @ D, step / 1.25)


@pytest.mark.parametrize("by, classifier", [("model", "own"), ("layer", "shared")])
def test_the_servers_step_by_hand(federation, by, classifier):
    """On whole vectors, for the model or layer by layer; running statistics are the plain mean."""
    watch = Watch()
    fed = federation(ConFREE(by=by, classifier=classifier), net="norm", callbacks=[watch], **EXACT)
    blocks, old = fed.run.groups[0].layout.blocks, global_model(fed).clone()
    fed.round(1)
    new = global_model(fed)
    w = torch.stack([model for _, model in sorted(watch.models, key=lambda m: m[0])])
    sent = [b for b in blocks if b.kind == "parameter" and (classifier == "shared" or not b.head)]
    layers = sorted({b.layer for b in sent}) if by == "layer" else [None]
    for layer in layers:
        index = torch.cat([torch.arange(b.start, b.stop) for b in sent if layer in (None, b.layer)])
        D = (w - old)[:, index]
        step = conflict_free_weights(D @ D.T, 0.5, rescaled=False) @ D
        assert_close(new[index], old[index] + step, rtol=0, atol=1e-8)
    for b in blocks:
        if b.kind == "buffer":
            assert_close(new[b.start : b.stop], w[:, b.start : b.stop].mean(0), rtol=0, atol=1e-12)
        elif b.head and classifier == "own":
            assert torch.equal(new[b.start : b.stop], old[b.start : b.stop])


def test_who_has_next_to_no_update_is_in_conflict_with_nobody():
    """A client whose loss is 0 uploads what it received, up to rounding."""
    torch.manual_seed(0)
    D = torch.randn(4, 6, dtype=torch.float64)
    D[2] = -1e-160 * D[0]
    G = D @ D.T
    assert G[0, 2] < 0
    steps = conflict_free_weights(G, 0.5, rescaled=False)
    assert_close(
        guidance_weights(G) @ D,
        (guidance_weights(G[[0, 1, 3]][:, [0, 1, 3]]) @ D[[0, 1, 3]]) * 3 / 4,
    )
    assert float(steps.abs().sum()) < 10
