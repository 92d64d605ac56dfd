"""Methods with a classifier apart or of their own: FedBABU (card 1.9), FedPAC (6.6), FedCP (6.8),
GPFL (6.9), DBE (6.10).
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from classes import DBE, GPFL, FedRep
from reckoning import WHOLE, batch_of, by_supports, features, scores_at, seeded, shaken, tensors_of
from refusals import refuses
from torch import nn
from torch.nn.functional import cross_entropy, linear, normalize
from torch.testing import assert_close
from watching import (
    Nets,
    client_of,
    global_model,
    payload_of,
    run_all,
    same,
    train,
    trained,
)

from fl_lightning.callbacks.simplex import simplex_minimum
from fl_lightning.core import Phase
from fl_lightning.methods import Method, Traits, fedpac
from fl_lightning.methods.common.classifiers import is_personal
from fl_lightning.methods.fedcp import FedCP, Separated, mmd
from fl_lightning.methods.fedpac import FedPAC, collaborators, feature_moments

HALF = {"participation": 0.5}


def block(client, vector, ends):
    """The block of a vector whose name ends so."""
    [found] = [b for b in client.layout.blocks if b.name.endswith(ends)]
    return vector[found.start : found.stop].view(found.shape)


class TwoLayers(nn.Module):
    """Whose classifier is more than a linear layer."""

    head = "out"

    def __init__(self):
        super().__init__()
        self.out = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x):
        """Scores."""
        found = self.out(x)
        return found


@pytest.mark.parametrize("method", [DBE(), FedCP(), GPFL()])
def test_networks_whose_classifier_cannot_be_replaced(method):
    with refuses("one linear layer"):
        method.build(TwoLayers(), 10)


# ---------------------------------------------------------------- FedBABU


# ---------------------------------------------------------------- FedPAC


def test_the_minimum_on_the_simplex_is_one():
    """Whatever the scale."""
    draws = seeded()
    for n in (1, 2, 5, 9):
        root = torch.randn(n, n, generator=draws, dtype=torch.float64)
        shift = torch.randn(n, 1, generator=draws, dtype=torch.float64)
        Q = (root + 2 * shift) @ (root + 2 * shift).T
        best = torch.from_numpy(by_supports(Q.numpy(), np.zeros(n)))
        for scale in (1e-6, 1.0, 1e6):
            a = simplex_minimum(scale * Q)
            assert (a >= 0).all() and float(a.sum()) == pytest.approx(1, abs=1e-12)
            assert_close(a @ Q @ a, best @ Q @ best, rtol=1e-6, atol=1e-9)
    assert (simplex_minimum(torch.zeros(3, 3, dtype=torch.float64)) == 1 / 3).all()


def test_collaborators():
    """INV2: without variance the own classifier costs nothing. INV3: equal clients count the same,
    far ones do not."""
    draws = seeded()
    H = torch.randn(4, 6, generator=draws, dtype=torch.float64)
    V = torch.tensor([0.5, 0.1, 2.0, 0.3], dtype=torch.float64)
    for i in range(4):
        alone = collaborators(H, torch.zeros_like(V), i)
        assert float(alone @ ((H[i] - H) @ (H[i] - H).T) @ alone) == pytest.approx(0, abs=1e-9)
    assert_close(
        collaborators(H[:1].expand(4, -1), V[:1].expand(4), 2), torch.full((4,), 0.25).double()
    )
    mixed = collaborators(H[:1].expand(4, -1), V, 2)  # inverse variances
    assert_close(mixed, (1 / V) / (1 / V).sum(), rtol=1e-6, atol=1e-9)
    assert collaborators(torch.stack([H[0], H[0], 100 * H[1]]), V[:3], 0)[2] < 1e-3


def test_feature_moments_are_the_papers(federation):
    """H_k = p_k mean, V = (sum_k p_k tr(Z_k^T Z_k / n_k) - sum_k ||H_k||^2) / n."""
    fed = federation(FedPAC(), **WHOLE)
    client = client_of(fed, 1)
    found = feature_moments(client)
    x, y = batch_of(client)
    z, n = features(client, client["model"], x), len(y)
    H, V = torch.zeros(10, 16, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for k in y.unique().tolist():
        mine = z[y == k]
        H[k] = len(mine) / n * mine.mean(0)
        V += len(mine) / n * torch.trace(mine.T @ mine / len(mine)) - H[k].square().sum()
    assert_close(found["moments.means"], H)
    assert_close(found["moments.V"].double(), V / n, rtol=1e-6, atol=0)


def test_fedpac_without_alignment_and_mixing_is_fedrep(federation, monkeypatch):
    """INV1: bit for bit, with one learning rate for both parts."""
    monkeypatch.setattr(
        fedpac, "collaborators", lambda H, V, i: torch.eye(len(H), dtype=torch.float64)[i]
    )
    ours = trained(federation, FedPAC(lam=0.0, head_lr=None), rounds=3)
    assert same(ours, trained(federation, FedRep(head_epochs=1), rounds=3))
    assert not same(ours, trained(federation, FedPAC(lam=0.0, head_lr=0.1), rounds=3))
    assert not same(ours, trained(federation, FedPAC(lam=1.0, head_lr=None), rounds=3))


# ---------------------------------------------------------------- FedCP


def gated(seed=0, gumbel=False):
    """A classifier of 6 features, whose two parts differ, and features."""
    torch.manual_seed(seed)
    net = Separated(nn.Linear(6, 3), gumbel)
    nn.init.normal_(net.received.weight)
    return net, torch.randn(5, 6)


def test_fedcps_gate_by_hand():
    """INV1 and the formula; v is the own classifier's, or what is held."""
    net, z = gated()
    for v in (net.personal.weight.sum(0).detach(), torch.randn(6)):
        a = net.gate(z * v / v.norm()).view(5, 2, 6)
        r = a[:, 0].exp() / (a[:, 0].exp() + a[:, 1].exp())
        want = net.personal(r * z) + net.received((1 - r) * z)
        with net.using(v):
            shares = net.shares(z)
            assert_close(shares.sum(1), torch.ones(5, 6))
            assert_close(net(z), want)
    assert net.context is None
    assert_close(net.shares(z)[:, 0] + net.shares(z)[:, 1], torch.ones(5, 6))


def test_gumbel_noise_is_for_training():
    net, z = gated(gumbel=True)
    plain, _ = gated()
    assert not torch.equal(net(z), plain(z))
    assert torch.equal(net.eval()(z), plain.eval()(z))


def test_mmd_is_its_sum_over_pairs():
    draws = seeded()
    x, y = torch.randn(3, 4, generator=draws), 2 * torch.randn(5, 4, generator=draws)

    def k(a, b):
        squares = torch.cdist(a, b).square()
        return sum((-0.5 * squares / w).exp().mean() for w in (10, 15, 20, 50))

    assert_close(mmd(x, y), k(x, x) + k(y, y) - 2 * k(x, y), rtol=1e-4, atol=0)
    assert float(mmd(x, x)) == 0


def test_fedcps_context_stands_still_while_it_trains(federation):
    """By hand: the second of two steps is taken under the first classifier's v."""
    fed = federation(FedCP(lam=0.0), rounds=1, local_epochs=2, **WHOLE)
    client = client_of(fed, 1)
    # equal classifiers would leave the gate nothing to learn
    client["model"].copy_(shaken(client, 0.1))
    batch, w = batch_of(client), client["model"].clone()
    v = block(client, w, "personal.weight").sum(0)
    trains = client.columns(lambda b: "received" not in b.name)
    for _ in range(2):
        leaf = w.clone().requires_grad_()
        with client.module.head.using(v):
            loss = cross_entropy(scores_at(client, leaf, batch[0]), batch[1])
        w = w - 0.05 * (trains * torch.autograd.grad(loss, leaf)[0])
    client.payload = payload_of(client)
    [phase] = FedCP(lam=0.0).phases(client, client.payload)
    train(fed, client, phase)
    assert_close(client["model"], w, rtol=0, atol=1e-12)


# ---------------------------------------------------------------- GPFL


@pytest.mark.parametrize("norm", ["sample", "batch"])
def test_gpfls_step_by_hand(federation, norm):
    method = GPFL(lam=0.7, mu=0.3, norm=norm)
    fed = federation(method, rounds=1, **WHOLE)
    client = client_of(fed, 1)
    client["model"].copy_(shaken(client, 0.1))
    (x, y), leaf = batch_of(client), client["model"].clone().requires_grad_()
    tensors = tensors_of(client.layout, leaf)
    get = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}

    def layers(which, k):
        h = linear(k, get[f"out.{which}.0.weight"], get[f"out.{which}.0.bias"]).relu()
        h = (h - h.mean()) / (h.var(unbiased=False) + 1e-5).sqrt()
        return h * get[f"out.{which}.2.weight"] + get[f"out.{which}.2.bias"]

    def f(k):
        return ((layers("gamma", k) + 1) * features(client, leaf, x) + layers("beta", k)).relu()

    e = get["out.embedding.weight"]
    shares = torch.bincount(y, minlength=10) / len(y)
    g, q = e.detach().mean(0), shares.double() @ e.detach()
    own = cross_entropy(linear(f(q), get["out.personal.weight"], get["out.personal.bias"]), y)
    guided = cross_entropy(normalize(f(g)) @ normalize(e).T, y)
    gaps = f(g) - e.detach()[y]
    apart = gaps.norm(dim=1).mean() if norm == "sample" else gaps.norm()
    decayed = sum(
        get[name].square().sum()
        for name in get
        if "gamma" in name or "beta" in name or "embedding" in name
    )
    [gradient] = torch.autograd.grad(own + guided + 0.7 * apart + 0.3 / 2 * decayed, leaf)
    expected = client["model"] - 0.05 * gradient
    [phase] = method.phases(client, payload_of(client))
    train(fed, client, phase)
    assert_close(client["model"], expected, rtol=0, atol=1e-10)


# ---------------------------------------------------------------- DBE


@dataclass(frozen=True)
class Waiting(Method):
    """FedAvg in whose first round nothing is sent back."""

    traits = Traits(changes_upload=True, everyone_first=True)

    def upload(self, client, payload):
        """Nothing, at first."""
        sent = super().upload(client, payload)
        sent.sent &= client.round > 1
        return sent


@dataclass(frozen=True)
class Still(DBE):
    """DBE whose own vectors never train."""

    def phases(self, client, payload):
        """Without them."""
        for phase in super().phases(client, payload):
            yield Phase(objective=phase.objective, trains=~client.mask(is_personal))


@Nets
def test_dbe_without_its_two_parts_is_fedavg(federation, net):
    """INV1: bit for bit, after the first round."""
    changes = {"net": net, "rounds": 4, **HALF, "optimizer": {"momentum": 0.9}}
    one, other = (run_all(federation(m, **changes)) for m in (Still(kappa=0.0), Waiting()))
    shared = one.run.groups[0].layout.blocks
    theirs = {
        b.name: global_model(other)[b.start : b.stop] for b in other.run.groups[0].layout.blocks
    }
    ours = {b.name: global_model(one)[b.start : b.stop] for b in shared if not is_personal(b)}
    plain = {name.removeprefix("model.").replace(".generic", ""): v for name, v in ours.items()}
    assert plain.keys() == theirs.keys() and all(
        torch.equal(v, theirs[k]) for k, v in plain.items()
    )
    assert not torch.equal(global_model(other), other.run.groups[0].initial)


def test_dbes_mean_is_of_complete_batches_alone(federation):
    """With momentum 1 the last complete batch decides, not the remainder; what has no other batch
    has that one."""
    for size, batches in ((8, (8, 8, 1)), (1000, (0,))):
        method = DBE(kappa=3.0)
        client = client_of(federation(method, **WHOLE | {"batch_size": size}), 1, t=2)
        client.payload = payload_of(client)
        client.payload.extra["mean"] = torch.zeros(16)
        phases = iter(method.phases(client, client.payload))
        loss = next(phases).objective.loss
        x, y = next(iter(client.data.train.batches(1000)))
        means, start, module = [], 0, client.bind()
        for k in [k or len(y) for k in batches]:
            batch, start = (x[start : start + k], y[start : start + k]), start + k
            added = loss(module, batch) - module.task_loss(batch)
            means.append(features(client, client["model"], batch[0]).mean(0))
            assert (float(added.detach()) > 0) is (k > 1)
        assert next(phases, None) is None
        wanted = means[:2][-1]
        assert_close(client.scratch["mean"].double(), wanted.double(), rtol=1e-6, atol=1e-6)
