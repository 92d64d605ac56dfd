"""FedAS (card 6.12) and FedCAC (6.13)."""

import pytest
import torch
from classes import FedAS, FedCAC
from numpy.testing import assert_allclose
from reckoning import ROUNDING, WHOLE, batch_of, features, shaken, slope
from torch.testing import assert_close
from watching import (
    Watch,
    client_of,
    models,
    payload_of,
    server_of,
    train,
)

from fl_lightning.methods import fedcac as masks
from fl_lightning.methods.common import basics

# ---------------------------------------------------------------- FedAS


def test_fedass_alignment_by_hand(federation):
    """The received body goes down sum_k MSE(z_k, mu_k), with mu the old body's class means; the
    classifier stays."""
    method = FedAS(align_lr=0.3, align_batch_size=10_000)
    fed = federation(method, **WHOLE)
    client = client_of(fed, 1)
    received = shaken(client, 0.1)
    payload, own, head = (
        payload_of(client, received),
        client["model"].clone(),
        client.columns(lambda b: b.head),
    )
    x, y = batch_of(client)
    mu = torch.stack(
        [
            features(client, own, x[y == k]).mean(0) if (y == k).any() else torch.zeros(16)
            for k in range(10)
        ]
    )
    start = torch.where(head, own, received)
    leaf = start.clone().requires_grad_()
    z = features(client, leaf, x)
    loss = sum(
        torch.nn.functional.mse_loss(z[y == k], mu[k].expand_as(z[y == k]))
        for k in y.unique().tolist()
    )
    [gradient] = torch.autograd.grad(loss, leaf)
    client.payload = payload
    phases = method.receive(client, payload)
    phase = next(phases)
    assert_close(client["model"], start)
    train(fed, client, phase)
    assert_close(client["model"], start - 0.3 * gradient, **ROUNDING)
    assert next(phases, None) is None and not gradient[head].any()


def test_an_incomplete_batch_may_be_left_out_of_fishers_sum(federation):
    """As the authors' loaders drop it; where it is the only one, it stays: else nobody's slope
    would be 0."""
    fed = federation(FedAS(batches="whole"), precision="64-true")
    client = client_of(fed, 0)
    n, w = len(client.data.train), client["model"].clone()
    for size in (n - 1, (n + 1) // 2, n, n + 5):
        object.__setattr__(fed.run.config.federation, "batch_size", size)
        batches = [b for b in client.data.train.batches(size) if len(b[1]) == min(size, n)]
        assert sum(len(b[1]) for b in batches) == (n if size >= n else n // size * size)
        told = fed.run.method.upload(client, payload_of(client)).statistics["fisher"]
        assert float(told) == pytest.approx(
            sum(float(slope(client, w, b).square().sum()) for b in batches), rel=1e-9
        )
        every = FedAS().upload(client, payload_of(client)).statistics["fisher"]
        assert (float(every) > float(told)) == (n % min(size, n) > 0)


@pytest.mark.parametrize("told, expected", [([2.0, 2.0, 2.0], 1 / 3), ([0.0, 0.0, 0.0], 1 / 3)])
def test_equal_or_no_slopes_weigh_equally(federation, told, expected):
    """INV3, and no 0/0."""
    fed = federation(FedAS(), clients=3)
    fed.round(1)
    server = server_of(fed)
    server.collect(
        [0, 1, 2], {c: {"fisher": torch.tensor(t, dtype=torch.float64)} for c, t in enumerate(told)}
    )
    FedAS().aggregate(server)
    assert_allclose(server.relation_view().rows[:, 0], expected, rtol=1e-6)


# ---------------------------------------------------------------- FedCAC: masks


def test_critical_numbers_are_each_tensors_greatest(federation):
    """int(tau n) of each, also where many are equal."""
    layout = federation(FedCAC()).run.groups[0].layout
    importance = torch.rand(layout.size)
    found = masks.critical(layout, importance, 0.3)
    for b in layout.blocks:
        mine, inside = found[b.start : b.stop], importance[b.start : b.stop]
        assert int(mine.sum()) == int(0.3 * b.size)
        assert inside[mine].min() >= inside[~mine].max()
    assert int(masks.critical(layout, torch.zeros(layout.size), 0.5).sum()) == sum(
        b.size // 2 for b in layout.blocks
    )
    assert not masks.critical(layout, importance, 0.0).any()


def test_masks_travel_eight_to_a_byte():
    mask = torch.rand(1003) < 0.4
    bits = basics.packed(mask)
    assert bits.dtype == torch.uint8 and len(bits) == 126
    assert torch.equal(basics.unpacked(bits, 1003), mask)


@pytest.mark.parametrize(
    "threshold, rows",
    [
        (0.0, [[1, 1, 0], [1, 1, 0], [0, 1, 1]]),
        (0.7, [[1, 1, 0], [1, 1, 0], [0, 0, 1]]),
        (1.0, [[1, 1, 0], [0, 1, 0], [0, 0, 1]]),
        (1.1, [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
    ],
)
def test_who_is_alike_by_the_threshold(threshold, rows):
    """It rises from the mean overlap over pairs, 0.5, to the greatest, 0.9, and beyond."""
    overlap = torch.tensor([[1.0, 0.9, 0.2], [0.8, 1.0, 0.3], [0.2, 0.6, 1.0]]).double()
    wanted = torch.tensor(rows).double()
    assert torch.equal(
        masks.collaboration_rows(overlap, threshold), wanted / wanted.sum(1, keepdim=True)
    )


@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.parametrize("value", [0.1, 0.3, 0.7])
def test_equal_overlaps_make_all_alike(n, value):
    """Their mean may be above each of them by rounding."""
    rows = masks.collaboration_rows(torch.full((n, n), value, dtype=torch.float64), 0.0)
    assert_close(rows, torch.full((n, n), 1 / n, dtype=torch.float64))


# ---------------------------------------------------------------- FedCAC: rounds


def test_what_fedcac_sends_by_hand(federation):
    """M_i u_i + (1 - M_i) w: masks from |change times value|, u_i the mean of those alike, w
    weighted by samples."""
    watch = Watch()
    fed = federation(FedCAC(tau=0.4, beta=1), callbacks=[watch], precision="64-true", rounds=2)
    fed.round(1)
    w, start, layout = models(fed), fed.run.groups[0].initial, fed.run.groups[0].layout
    w = [v.clone() for v in w]
    M = [masks.critical(layout, ((v - start) * v).abs(), 0.4) for v in w]
    for c in range(4):
        assert torch.equal(basics.unpacked(fed.run.server.memory["critical"][c], layout.size), M[c])
    F = torch.stack(M).double()
    overlap = 1 - (F[:, None] - F).abs().sum(2) / (2 * F.sum(1, keepdim=True))
    rows = masks.collaboration_rows(overlap, 1.0)
    assert 0 < int((rows == 0).sum()) < 12 and not torch.equal(
        rows, masks.collaboration_rows(overlap, 2.0)
    )
    W, shares = torch.stack(w), torch.tensor(fed.run.data.train_sizes).double()
    mean = (shares / shares.sum()) @ W
    record = fed.round(2)
    assert_allclose(record.relation.rows[:, 0], rows, atol=1e-6)
    for c, vector, sent in watch.downloads[4:]:
        expected = torch.where(M[c], (rows @ W)[c], mean)
        assert sent.all()
        assert_close(vector, expected, **ROUNDING)


def test_fedcacs_running_statistics_may_stay_at_home(federation):
    """As in the authors' code: parameters are composed as ever, statistics are those of the
    client's own passes."""
    watch = Watch()
    fed = federation(
        FedCAC(statistics_of="client", beta=1), net="norm", callbacks=[watch], rounds=2
    )
    fed.round(1)
    w, blocks = [v.clone() for v in models(fed)], fed.run.groups[0].layout.blocks
    fed.round(2)
    home = client_of(fed, 0).columns(lambda b: b.kind == "buffer")
    assert home.any()
    for c, vector, sent in watch.downloads[4:]:
        assert [bool(s) for s in sent] == [b.kind == "parameter" for b in blocks]
        client = client_of(fed, c)
        client["model"].copy_(w[c])
        client.overwrite(payload_of(client, vector))
        assert torch.equal(client["model"][home], w[c][home]) and not torch.equal(
            client["model"], w[c]
        )


def test_who_has_not_uploaded_receives_the_mean(federation):
    """And is in nobody's mean; who has is there with its last model."""
    fed = federation(FedCAC(beta=100), clients=4, precision="64-true")
    fed.round(1, [0, 1])
    last = [fed.run.states[c].vectors["model"].clone() for c in (0, 1)]
    server = server_of(fed, [0, 3])
    sent = FedCAC().broadcast(server)
    shares = torch.tensor(fed.run.data.train_sizes[:2]).double()
    assert_close(sent[3].vector, (shares / shares.sum()) @ torch.stack(last), **ROUNDING)
    view = server.relation_view()
    assert (view.receivers, view.sources) == ([0], [0, 1])
    assert not torch.equal(sent[0].vector, sent[3].vector)


def test_fedcac_begins_where_it_was_judged(federation):
    """Judged before training, the final model is what a client began its last round with, not the
    mean."""
    fed = federation(FedCAC(), evaluation={"judge": "before"}, rounds=2)
    records = [fed.round(t) for t in (1, 2)]
    assert fed.evaluator.everyone()["final_mean_accuracy"] == records[-1].metrics["accuracy_before"]
