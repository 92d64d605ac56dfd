"""KAPC's objective and gradient norms as they are logged, and `sources: uploaded`: by autograd and
by hand."""

from typing import get_args, get_type_hints

import pytest
import torch
from classes import FEDORA, KAPC, FedAMP
from reckoning import tensors_of
from torch.testing import assert_close
from watching import client_of, models, module_of

from fl_lightning.callbacks.base import Transform
from fl_lightning.callbacks.propagation import Propagation
from fl_lightning.callbacks.relations import Attention
from fl_lightning.configuration import catalogue
from fl_lightning.configuration.config import Component

DOUBLE = {"precision": "64-true"}


def layers_of(fed):
    """The columns of each coached layer."""
    group = fed.run.groups[0]
    blocks = [b for b, sent in zip(group.layout.blocks, group.down_mask, strict=True) if sent]
    return [
        [slice(b.start, b.stop) for b in blocks if b.layer == k]
        for k in range(len(fed.run.layer_names))
    ]


def f_per(fed, W, R, lam, beta):
    """Task losses, coaching and prior of KAPC's objective over all training data; W (N, D), R (N,
    L, N)."""
    task, module = [], module_of(fed)
    for i in range(fed.run.clients):
        x, y = next(client_of(fed, i).data.train.batches(10_000))
        tensors = tensors_of(module.layout, W[i])
        task.append(
            torch.nn.functional.cross_entropy(
                torch.func.functional_call(module.model, tensors, x), y
            )
        )
    coaching = W.new_zeros(())
    for k, columns in enumerate(layers_of(fed)):
        layer = torch.cat([W[:, c] for c in columns], 1)
        coaching = coaching + lam * ((R[:, k] @ layer).sub(layer)).square().sum()
    return torch.stack(task).sum(), coaching, beta / 2 * (R - 1 / fed.run.clients).square().sum()


@pytest.mark.parametrize("solver", ["step", "exact"])
def test_the_logged_objective_is_the_theorys(federation, solver):
    """With one step a round on all data, the losses are those of the models that the round began
    from."""
    lam, beta = 0.3, 0.4
    method = KAPC(lam=lam, beta=beta, eta_r=0.05, solver=solver)
    fed = federation(method, **DOUBLE, batch_size=10_000)
    fed.round(1)
    W = torch.stack(models(fed))
    before = fed.run.server.memory["relation"].clone()
    metrics = fed.round(2).metrics
    after = fed.run.server.memory["relation"]
    assert not torch.equal(before, after)
    task, coaching, prior = f_per(fed, W, after, lam, beta)
    assert metrics["objective"] == pytest.approx(float(task + coaching + prior), rel=1e-9)
    assert (
        metrics["objective_coaching"] == pytest.approx(float(coaching), rel=1e-9)
        and float(coaching) > 0
    )
    assert metrics["objective_relation"] == pytest.approx(float(prior), rel=1e-9)

    R = before.requires_grad_()
    (slope,) = torch.autograd.grad(sum(f_per(fed, W, R, lam, beta)[1:]), R)
    assert metrics["gradient_norm_relation"] == pytest.approx(float(slope.norm()), rel=1e-9)

    # The proxy of one plain step is the gradient of what the clients descend: their mixes are
    # constant (journal version, Eq. 16).
    V = W.clone().requires_grad_()
    pulls = V.new_zeros(())
    for k, columns in enumerate(layers_of(fed)):
        for c in columns:
            pulls = pulls + lam * (V[:, c] - after.detach()[:, k] @ W[:, c]).square().sum()
    (slope,) = torch.autograd.grad(f_per(fed, V, after.detach(), lam, beta)[0] + pulls, V)
    assert metrics["gradient_norm_models_proxy"] == pytest.approx(float(slope.norm()), rel=1e-6)


class Received(Transform):
    """Keeps what each client receives."""

    def __init__(self):
        self.vectors = {}

    def on_download(self, client, payload):
        self.vectors[client.id] = payload.vector.clone()


@pytest.mark.parametrize("projection", ["simplex", "none"])
def test_clients_receive_what_the_rows_say_whatever_their_sum(federation, projection):
    received = Received()
    fed = federation(
        KAPC(lam=1.0, eta_r=1.0, projection=projection), callbacks=[received], **DOUBLE
    )
    fed.round(1)
    W = torch.stack(models(fed))
    fed.round(2)
    R = fed.run.server.memory["relation"]  # (N, L, N)
    assert (float((R.sum(-1) - 1).abs().max()) > 1e-4) is (projection == "none")
    for k, columns in enumerate(layers_of(fed)):
        for c in columns:
            mixed = torch.stack([received.vectors[i][c] for i in range(fed.run.clients)])
            assert_close(mixed, R[:, k] @ W[:, c], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strength", [{"beta": 0.6}, {"rho": 0.6}], ids=["beta", "rho"])
def test_units_of_spread_weigh_each_layers_prior(federation, strength):
    """Beta is 2 lam rho: the prior weighs alike, whichever of the two is given."""
    method = KAPC(lam=0.5, solver="exact", rho_units="spread", **strength)
    fed = federation(method, **DOUBLE)
    fed.round(1)
    W = torch.stack(models(fed))
    spread = []
    for columns in layers_of(fed):
        layer = torch.cat([W[:, c] for c in columns], 1)
        spread.append((layer - layer.mean(0)).square().sum(1).mean())
    metrics = fed.round(2).metrics
    away = (fed.run.server.memory["relation"] - 0.25).square().sum((0, 2))
    assert metrics["objective_relation"] == pytest.approx(
        float((0.3 * torch.stack(spread) * away).sum()), rel=1e-9
    )


# ---------------------------------------------------------------- clients that have not been heard


@pytest.mark.parametrize(
    "method", [FEDORA(selection="always", sources="uploaded"), FedAMP(sources="uploaded")], ids=repr
)
def test_others_mix_those_they_have_heard_and_oneself(federation, method):
    fed = federation(method, participation=0.5, **DOUBLE)
    fed.round(1, [0, 1])
    view = fed.round(2, [1, 2]).relation
    rows = torch.from_numpy(view.rows[:, 0]).double()
    own = [view.sources.index(c) for c in (1, 2)]
    # client 2's initial model counts for itself alone
    assert rows[0, own[1]] == 0 and rows[1, own[1]] > 0
    assert (rows[:, [view.sources.index(c) for c in (0, 1)]] > 0).all()
    assert_close(rows.sum(1), torch.ones(2, dtype=torch.float64))
    assert 3 not in view.sources
    relation = fed.run.relation
    if isinstance(relation, Propagation):
        known = fed.run.server.memory["fedora.rows"]
        assert_close(rows[0, :2], known[1, :2] / known[1, :2].sum(), rtol=1e-6, atol=1e-7)
        weights = relation.newcomer(fed.run, fed.run.data.client(3).train, True)
        assert weights[3] == 0 and float(weights.sum()) == pytest.approx(1)
    else:
        assert isinstance(relation, Attention)


@pytest.mark.parametrize("entry", catalogue.table("methods").values(), ids=lambda entry: entry.name)
def test_a_relation_mixes_the_sources_that_its_method_names(entry):
    method = Component(entry.class_path).load()
    for choice in get_args(get_type_hints(method).get("sources")):
        assert method(sources=choice).relation().sources == choice
