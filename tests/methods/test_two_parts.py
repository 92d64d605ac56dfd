"""Methods whose clients train parts of a model apart, or mix them: FedRep (card 6.3), FedRoD (6.4)
and FedALA (6.5)."""

from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from classes import FedALA, FedAvg, FedRep, FedRoD
from reckoning import KEPT, ROUNDING, WHOLE, batch_of, part, seeded, shaken, slope, tensors_of
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, linear
from torch.testing import assert_close
from watching import Nets, client_of, global_model, payload_of, run_all, train

from fl_lightning.core import Fit

# ---------------------------------------------------------------- FedRep


@pytest.mark.parametrize("head", [True, False])
def test_fedreps_phases_leave_the_other_part_alone(federation, head):
    """INV1: bit for bit, under momentum, weight decay and kept state, after a round in which both
    have trained."""
    fed = run_all(federation(FedRep(head_epochs=2), rounds=1, **KEPT))
    client = client_of(fed, 1, t=2)
    before = client["model"].clone()
    first, second = FedRep(head_epochs=2).phases(client, payload_of(client))
    train(fed, client, first if head else second)
    assert torch.equal(
        part(client, client["model"], head=not head), part(client, before, head=not head)
    )
    assert not torch.equal(
        part(client, client["model"], head=head), part(client, before, head=head)
    )


def test_fedrep_trains_the_classifier_first(federation):
    """By hand: w_h - lr grad, and then the body's gradient under the new classifier."""
    fed = federation(FedRep(head_epochs=1), rounds=1, **WHOLE)
    client = client_of(fed, 2)
    head, w = client.columns(lambda b: b.head), client["model"].clone()
    batch = batch_of(client)
    w = torch.where(head, w - 0.05 * slope(client, w, batch), w)
    w = torch.where(head, w, w - 0.05 * slope(client, w, batch))
    run_all(fed)
    assert_close(client["model"], w, **ROUNDING)


# ---------------------------------------------------------------- FedRoD


def _scores(client, vector, x):
    """Features z and generic scores g(z), computed apart from the engine."""
    body, out = (tensors_of(client.layout, vector, f"model.{name}.") for name in ("body", "out"))
    z = functional_call(client.module.model.model.body, body, x)
    return z, linear(z, **out)


def test_fedrods_gradients_by_hand(federation):
    """Body and g go down the balanced loss, h down that of g + h; neither feels the other's."""
    fed = federation(FedRoD(), rounds=1, **WHOLE)
    client = client_of(fed, 1)
    client["model"].copy_(shaken(client, 0.1, where=lambda b: b.name.startswith("personal.")))
    x, y = batch_of(client)
    counts = torch.bincount(y, minlength=10)
    assert not counts.all() or counts.min() != counts.max()
    leaf = client["model"].clone().requires_grad_()
    z, g = _scores(client, leaf, x)
    balanced = (g + counts.double().log()).log_softmax(1)[torch.arange(len(y)), y].mean().neg()
    h = tensors_of(client.layout, leaf, "personal.")
    own = g.detach() + linear(z.detach(), **h)
    [gradient] = torch.autograd.grad(balanced + cross_entropy(own, y), leaf)
    expected = client["model"] - 0.05 * gradient
    [phase] = FedRoD().phases(client, payload_of(client))
    train(fed, client, phase)
    assert_close(client["model"], expected, **ROUNDING)


def test_fedrod_takes_a_network_with_more_outputs_than_classes(federation):
    """Outputs that no class has are as those of absent classes: the first ten train as ever."""
    fed = federation(FedRoD(), rounds=1, **WHOLE)
    client = client_of(fed, 1)
    [phase] = FedRoD().phases(client, payload_of(client))
    batch = batch_of(client)
    module, pad = client.module, partial(nn.functional.pad, pad=(0, 2), value=-1e3)
    own = module.model.personal
    wide = SimpleNamespace(
        model=Mock(side_effect=lambda x: pad(module.model(x)), personal=lambda z: pad(own(z)))
    )
    wide.features = (module.model(batch[0]), module.features)[1]
    narrow = phase.objective.loss(module, batch)
    assert phase.objective.loss(wide, batch).item() == pytest.approx(narrow.item(), rel=1e-6)


@Nets
def test_fedrod_on_equally_many_of_each_class_is_fedavg(federation, net):
    """INV2: the prior is the same for all classes, 0: bit for bit."""
    one, other = federation(FedRoD(), net=net), run_all(federation(FedAvg(), net=net))
    one.run.data.class_counts[:] = 7
    run_all(one)
    layout = other.run.groups[0].layout
    names = {b.name: global_model(one)[b.start : b.stop] for b in one.run.groups[0].layout.blocks}
    assert all(
        torch.equal(names[f"model.{b.name}"], global_model(other)[b.start : b.stop])
        for b in layout.blocks
    )


def test_fedrod_takes_a_label_that_it_does_not_know_of(federation):
    """A class without samples has log 0: a wrong label of it must not make the loss infinite."""
    fed = federation(FedRoD(), rounds=1)
    absent = int(np.argmin(fed.run.data.class_counts[1]))
    counts = np.where(np.arange(10) == absent, 0, fed.run.data.class_counts[1])
    fed.run.data.relabel(1, lambda y: torch.full_like(y, absent))
    fed.run.data.trained_counts = lambda i: counts
    record = fed.round(1)
    assert all(np.isfinite(row["train_loss"]) for row in record.clients)
    assert torch.isfinite(global_model(fed)).all()


# ---------------------------------------------------------------- FedALA


def test_fedalas_weights_by_hand(federation):
    """W <- clip(W - eta grad f(w^) (w - w_i), 0, 1) in the top layer, and w^ from the new W."""
    method = FedALA(eta=40.0, share=1.0)
    fed = federation(method, **WHOLE)
    client = client_of(fed, 1, t=3)
    client.state.rounds = 2  # no longer the first time: one pass
    draws = seeded()
    noise = torch.randn(client.layout.size, generator=draws, dtype=torch.float64)
    received = client["model"] + 0.3 * noise * client.columns(lambda b: b.kind == "parameter")
    client["blend"].uniform_(0, 1, generator=draws)
    own, weights, top = (
        client["model"].clone(),
        client["blend"].clone(),
        client.columns(lambda b: b.head),
    )
    mix = torch.where(top, own + (received - own) * weights, received)
    expected = (weights - 40.0 * slope(client, mix, batch_of(client)) * (received - own)).clamp(
        0, 1
    )
    assert ((expected == 0) & top).any() and ((expected == 1) & top).any()
    assert ((expected != weights) & (expected > 0) & (expected < 1) & top).any()
    client.payload = payload_of(client, received)
    phases = method.receive(client, client.payload)
    train(fed, client, next(phases))
    assert torch.equal(client["model"], own)  # until W is learned
    client.fits += [_fit(1.0)]
    assert next(phases, None) is None
    assert_close(client["blend"][top], expected[top], **ROUNDING)
    now = torch.where(top, own + (received - own) * expected, received)
    assert_close(client["model"], now, **ROUNDING)
    assert torch.equal(client["model"][~top], received[~top])


def _fit(loss):
    return Fit(torch.tensor(loss), torch.zeros(()), 1, 1)


@pytest.mark.parametrize(
    "rounds, losses, passes",
    [
        (0, [], 0),  # there is no last model
        (1, [1.0] * 50, 4),  # they rest: one more than the window
        (1, [1.0, 5.0, 1.0, 5.0, 1.0, 1.0, 1.0, 9.0], 7),  # the last three do
        (1, [1.0, 5.0] * 50, 12),  # they never do: at most so many
        (2, [1.0, 5.0], 1),  # later it is one
    ],
)
def test_fedala_learns_its_weights_until_they_rest(federation, rounds, losses, passes):
    client = client_of(federation(FedALA(window=3, most=12)), 0, t=rounds + 1)
    client.state.rounds, client.payload = rounds, payload_of(client)
    found = 0
    for _ in FedALA(window=3, most=12).receive(client, client.payload):
        client.fits.append(_fit(losses[found]))
        found += 1
    assert found == passes


@pytest.mark.parametrize("looks_at, passes", [("mean", 12), ("last", 4)])
def test_fedala_may_look_at_the_last_batch_alone(federation, looks_at, passes):
    """Of each pass the mean loss jumps to and fro, while that of the last batch rests (no step is
    taken, eta 0)."""
    method = FedALA(window=3, most=12, eta=0.0, looks_at=looks_at)
    fed = federation(method, **WHOLE)
    client = client_of(fed, 0, t=2)
    client.state.rounds, client.payload = 1, payload_of(client)
    x, y = batch_of(client)
    found = 0
    for phase in method.receive(client, client.payload):
        first = phase.step(client, (x * found, y))
        last = phase.step(client, (x, y))
        client.fits.append(_fit(float(first + last) + found % 2))
        found += 1
    assert found == passes
