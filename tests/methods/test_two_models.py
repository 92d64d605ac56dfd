"""Methods whose clients have a second model of their own: Ditto (card 1.28), pFedMe (1.22) and APFL
(1.27)."""

import pytest
import torch
from classes import APFL, FLAYER, SCAFFOLD, Ditto, FedNova, Local, PerFedAvg, PFedMe
from reckoning import ROUNDING, WHOLE, batch_of, scores_at, seeded, slope, uploads
from refusals import refuses
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from watching import Nets, client_of, global_model, run_all, same

ALONE = [
    (Ditto(lam=0.0), {"optimizer": {"momentum": 0.9, "weight_decay": 0.01}}),
    (Ditto(lam=0.0), {"optimizer": {"momentum": 0.9, "keep_state": True}}),
    (APFL(alpha=1.0, adaptive=False), {}),
]


@Nets
@pytest.mark.parametrize("method, optimizer", ALONE, ids=repr)
def test_a_personal_model_that_hears_nobody_is_locals(federation, net, method, optimizer):
    """Ditto's INV1, APFL's INV2: bit for bit, running statistics too, also with a part of the
    clients in each round; each model has a momentum of its own."""
    changes = {"net": net, "rounds": 4, "participation": 0.5, **optimizer}
    one, other, pulled = (
        run_all(federation(each, **changes)) for each in (method, Local(), type(method)())
    )
    alone = uploads(other)
    assert same(uploads(one, "personal"), alone)
    assert not any(map(torch.equal, uploads(pulled, "personal"), alone))


# ---------------------------------------------------------------- Ditto


def test_ditto_pulls_towards_what_was_received(federation):
    """v <- v - lr (grad f(v) + lam (v - w)), where w is the global model as it was sent, not as it
    has been trained."""
    fed = federation(Ditto(lam=0.7), **WHOLE)
    fed.round(1)
    received, before = global_model(fed).clone(), uploads(fed, "personal")
    fed.round(2)
    for c, v in enumerate(before):
        client = client_of(fed, c)
        expected = v - 0.05 * (slope(client, v, batch_of(client)) + 0.7 * (v - received))
        assert_close(client["personal"], expected, **ROUNDING)


# ---------------------------------------------------------------- pFedMe


def test_pfedmes_step_by_hand(federation):
    """K steps on theta from w, then w <- w - lr lam (w - theta)."""
    method = PFedMe(lam=3.0, inner_steps=3, personal_lr=0.2)
    fed = federation(method, precision="64-true")
    client = client_of(fed, 1)
    client["personal"].normal_()  # where it comes from is of no matter
    batch, w = batch_of(client, 16), client["model"].clone()
    theta = w.clone()
    for _ in range(3):
        last = theta
        theta = theta - 0.2 * (slope(client, theta, batch) + 3.0 * (theta - w))
    loss = method.step(client, batch)
    assert_close(client["personal"], theta, **ROUNDING)
    assert_close(client["model"], w - 0.05 * 3.0 * (w - theta), **ROUNDING)
    x, y = batch
    client.bind(last)
    assert_close(loss, cross_entropy(client.module.model(x), y).detach())


# ---------------------------------------------------------------- APFL


def drawn(federation, method):
    """A client with models w and v apart from each other, and copies of them."""
    client = client_of(federation(method, precision="64-true"), 1)
    draws = seeded(0)
    for slot in ("model", "personal"):
        noise = torch.randn(client.layout.size, generator=draws, dtype=torch.float64)
        client[slot].add_(0.1 * noise * client.columns(lambda b: b.kind == "parameter"))
    return client, client["model"].clone(), client["personal"].clone()


def test_apfls_step_by_hand(federation):
    """All three from the values before the step; INV4: the slope of alpha is that of the mixture's
    loss."""
    method = APFL(alpha=0.3)
    client, w, v = drawn(federation, method)
    batch = batch_of(client, 16)
    leaf = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    own = v.clone().requires_grad_()
    mixture = leaf * own + (1 - leaf) * w
    [of_alpha, of_v] = torch.autograd.grad(_loss(client, mixture, batch), [leaf, own])
    assert of_alpha.abs() > 0.01
    step = 1e-5
    ends = [_loss(client, (0.3 + s) * v + (0.7 - s) * w, batch) for s in (-step, step)]
    assert_close((ends[1] - ends[0]) / (2 * step), of_alpha, rtol=1e-6, atol=0)

    loss = method.step(client, batch)
    assert_close(client["model"], w - 0.05 * slope(client, w, batch), **ROUNDING)
    assert_close(client["personal"], v - 0.05 * of_v, **ROUNDING)
    assert_close(client.memory["alpha"], 0.3 - 0.05 * of_alpha, **ROUNDING)
    assert_close(loss, _loss(client, w, batch))
    now = client.memory["alpha"]
    assert_close(method.personal(client), now * client["personal"] + (1 - now) * client["model"])


def _loss(client, vector, batch):
    return cross_entropy(scores_at(client, vector, batch[0]), batch[1])


# ---------------------------------------------------------------- steps of their own


SPOILED = {
    "name": {"name": "adam"},
    "momentum": {"momentum": 0.9},
    "weight_decay": {"weight_decay": 0.1},
    "clip_norm": {"clip_norm": 1.0},
    "keep_state": {"momentum": 0.9, "keep_state": True},
}
"""By key, settings of the optimiser in which it would go unheeded, or spoil what steps come to."""
REFUSED = {
    **dict.fromkeys([PFedMe(), APFL(), PerFedAvg(), FLAYER()], [*SPOILED][:4]),
    SCAFFOLD(): ["name", "clip_norm", "keep_state"],
    FedNova(): ["keep_state"],
}


@pytest.mark.parametrize("method", REFUSED, ids=repr)
def test_settings_of_the_optimiser_that_do_not_suit_are_refused(federation, method):
    for key in REFUSED[method]:
        with refuses(rf"^optimizer\.{key}="):
            federation(method, optimizer=SPOILED[key]).prepare()
