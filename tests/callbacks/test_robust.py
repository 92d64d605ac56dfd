"""Robust aggregation, the norm bound and the simulated attackers."""

import csv
import math
from dataclasses import dataclass

import pytest
import torch
from classes import KAPC, FedAvg, FedBN, FedPer, FedProto, FedProx
from reckoning import seeded
from refusals import refuses
from torch.testing import assert_close

from fl_lightning.callbacks.attack import Attack
from fl_lightning.callbacks.base import Aggregator
from fl_lightning.callbacks.compression import Quantize, TopK
from fl_lightning.callbacks.robust import Krum, Median, NormBound, TrimmedMean, trimmed_mean
from fl_lightning.configuration.config import DataConfig
from fl_lightning.core.layout import Segment
from fl_lightning.core.mixing import Mixer
from fl_lightning.core.relation import RelationInputs
from fl_lightning.core.server import Server
from fl_lightning.data import prepare
from fl_lightning.foundation.metric import NO_TARGET
from fl_lightning.foundation.parallel import RankGroup
from fl_lightning.methods import Traits

AGGREGATORS = [TrimmedMean(0.2), Median(), Krum(2), Krum(2, keep=5)]
SHARED = [FedAvg(), FedProx(), FedPer(), FedBN()]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed))


def taken(aggregator, W):
    """What `aggregator` makes of the rows `W`, all of them one layer, with equal weights before."""
    n = len(W)

    class One(RankGroup):
        def __init__(self):
            self.rank, self.size, self.device = 0, 1, torch.device("cpu")

    mixer = Mixer(One(), [0] * n, dict(enumerate(W)), range(n), W.dtype)
    segments = [Segment(0, W.shape[1], 0)]
    inputs = RelationInputs(
        [], list(range(n)), torch.ones(n), 1, n, {}, lambda: mixer.gram(segments, 1)
    )
    p = aggregator.weights(torch.full((1, n), 1 / n, dtype=torch.float64), inputs)
    assert p.shape == (1, n) and float(p.sum()) == pytest.approx(1)
    out = torch.empty(W.shape[1], dtype=W.dtype)
    mixer.mean(segments, p, out, aggregator.combine)
    return out


@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=repr)
def test_equal_models_stay_equal_bit_for_bit(aggregator):
    w = normal(70_000)
    assert torch.equal(taken(aggregator, w.expand(10, -1).contiguous()), w)


def test_the_formulas():
    W = normal(10, 300).double()
    s = W.sort(0).values
    assert_close(taken(TrimmedMean(0.0), W), W.mean(0), rtol=0, atol=1e-14)
    assert_close(taken(TrimmedMean(0.2), W), s[2:8].mean(0), rtol=0, atol=1e-14)
    assert_close(taken(TrimmedMean(0.11), W), s[2:8].mean(0), rtol=0, atol=1e-14)
    assert_close(taken(Median(), W), s[4:6].mean(0), rtol=0, atol=1e-14)
    assert torch.equal(taken(Median(), W[:9]), W[:9].median(0).values)
    assert torch.equal(taken(TrimmedMean(0.4), W[:2]), trimmed_mean(W[:2], 0))  # too few to cut
    distance = torch.cdist(W, W).square()
    scores = distance.sort(1).values[:, 1 : 1 + 10 - 2 - 2].sum(1)
    best = scores.argsort()
    assert torch.equal(taken(Krum(2), W), W[best[0]])
    assert_close(taken(Krum(2, keep=3), W), W[best[:3]].mean(0), rtol=0, atol=1e-14)
    assert torch.equal(taken(Krum(2), W[:1]), W[0])  # all others have failed


@pytest.mark.parametrize("size", [1e2, 1e9, 1e18])
@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=repr)
def test_a_few_attackers_move_nothing_far(aggregator, size):
    """Breakdown: with f = 2 of 10 arbitrary rows the result stays within the honest numbers; with 8
    it cannot."""
    W = normal(10, 400)
    W[[1, 6]] = size
    W[6, ::2] *= -1
    honest = W[[0, 2, 3, 4, 5, 7, 8, 9]]
    out = taken(aggregator, W)
    assert (out >= honest.min(0).values).all() and (out <= honest.max(0).values).all()
    plain = taken(Aggregator(), W)
    assert not ((plain >= honest.min(0).values) & (plain <= honest.max(0).values)).all()
    W[2:] = size  # eight of ten are of one mind, and no defence can know
    lost = taken(aggregator, W)
    assert float(lost.abs().max()) > size / 11


def uploaded(run, make_client, aggregator):
    """The server, after one round in which every client has uploaded a model of its own, with the
    transforms' say."""
    begin(run)
    server = Server(run, 1, range(run.clients), aggregator)
    for c in server.cohort:
        client = make_client(run, c)
        client["model"].add_(normal(client.layout.size, seed=c))
        run.states[c].received["model"].copy_(sent(run, client).vector)
    server.collect(server.cohort, {})
    run.method.aggregate(server)
    return server


def sent(run, client):
    """What arrives of the client's model."""
    payload = run.method.upload(client, client.payload)
    for callback in run.callbacks:
        if not isinstance(callback, Aggregator):
            callback.on_upload(client, payload)
    return payload


@pytest.mark.parametrize("aggregator", [TrimmedMean(0.25), Median(), Krum(0, keep=2)], ids=repr)
@pytest.mark.parametrize("method", SHARED, ids=repr)
def test_it_replaces_the_mean_and_nothing_else(make_run, make_client, method, aggregator):
    """The shared columns are those that the uploads give; what is personal stays."""
    run = make_run(method, net="norm", callbacks=[aggregator])
    server = uploaded(run, make_client, aggregator)
    [group] = run.groups
    for s in group.layout.segments(group.down_mask):
        W = torch.stack([run.states[c].vectors["model"][s.start : s.stop] for c in range(4)])
        if not isinstance(aggregator, Krum):
            assert torch.equal(
                server["model"][s.start : s.stop], aggregator.combine(W, torch.ones(4) / 4)
            )
    shared = group.layout.mask(lambda b: method.scope(b) == "shared")
    for block, travels in zip(group.layout.blocks, shared, strict=True):
        own = slice(block.start, block.stop)
        assert torch.equal(server["model"][own], group.initial[own]) is not travels


def begin(run):
    for callback in run.callbacks:
        callback.on_fit_start(run)


@pytest.mark.parametrize(
    "method, callbacks, said",
    [
        (KAPC(), [Median()], "callbacks.median='kapc'.* one global model, such as fedavg"),
        (
            FedAvg(),
            [Median(), TrimmedMean(0.2)],
            "callbacks.trimmedmean: a run has one aggregator, and callbacks.median is it",
        ),
        (
            FedAvg(),
            [Krum(1)],
            "callbacks.krum.attackers=1.*cohorts of 4 clients tolerate at most 0",
        ),
        (FedAvg(), [Krum(0, keep=5)], "callbacks.krum.keep=5.*at most 4"),
        (FedAvg(), [Attack("noise", clients=[4])], r"callbacks.attack.clients=\[4\].*\[0, 3\]"),
        (
            FedAvg(),
            [Attack("noise", share=0.1)],
            r"callbacks.attack.share=0.1.*that is no attacker",
        ),
        (
            FedAvg(),
            [Quantize(), Attack("noise", share=0.5)],
            "callbacks.attack: .*before quantize",
        ),
    ],
)
def test_what_cannot_be(make_run, method, callbacks, said):
    run = make_run(method, callbacks=callbacks)
    with refuses(said):
        begin(run)


@pytest.mark.parametrize("callback", [NormBound(1e-9), Quantize(), TopK()])
def test_where_no_model_is_sent_a_line_says_that_there_is_nothing_to_change(
    make_run, callback, capsys
):
    for method, idle in ((FedProto(), True), (FedAvg(), False)):
        begin(make_run(method, callbacks=[callback]))
        assert ("sends none" in capsys.readouterr().err) is idle


@pytest.mark.parametrize(
    "make",
    [
        lambda: TrimmedMean(0.5),
        lambda: Krum(-1),
        lambda: Krum(1, keep=0),
        lambda: NormBound(math.nan),
        lambda: Attack("noise"),
        lambda: Attack("noise", clients=[1], share=0.1),
        lambda: Attack("noise", share=0.1, scale=-1.0),
        lambda: Attack("bribe", share=0.1),
    ],
)
def test_bad_arguments_are_named(make):
    with refuses(r"^callbacks\.\w+\.\w+="):
        make()


# ---------------------------------------------------------------- the norm bound


@dataclass(frozen=True)
class Own(FedAvg):
    """Clients go on from their own models."""

    traits = Traits(starts="own")


@pytest.mark.parametrize("method", [FedAvg(), Own()], ids=["from the server", "from its own"])
def test_a_change_is_clipped_to_the_bound(make_run, make_client, method):
    """Counted from what was received where a client starts from that, and from its last upload
    where it does not."""
    for bound in (0.1, 1e9):
        run = make_run(method, callbacks=[NormBound(bound)])
        client = make_client(run, 0)
        last = client.state.received["model"].add_(normal(client.layout.size, seed=1)).clone()
        client.payload.vector = client.payload.vector + normal(client.layout.size, seed=2)
        known = last if isinstance(method, Own) else client.payload.vector
        # what lies between the blocks is no number
        for s in client.layout.segments(client.group.up_mask):
            client["model"][s.start : s.stop] = (known + normal(client.layout.size, seed=3))[
                s.start : s.stop
            ]
        upload = sent(run, client)
        assert client.flops == 3 * int(client.layout.sizes.sum())
        if bound > 1:
            assert upload.vector is client["model"]
            continue
        pieces = client.layout.segments(upload.sent)
        change, honest = (
            torch.cat([(v - known)[s.start : s.stop] for s in pieces])
            for v in (upload.vector, client["model"])
        )
        assert float(change.norm()) == pytest.approx(0.1, rel=1e-5)
        assert float(torch.nn.functional.cosine_similarity(change, honest, dim=0)) == pytest.approx(
            1, abs=1e-5
        )


def test_only_what_is_sent_counts(make_run, make_client):
    client = make_client(make_run(FedPer(), callbacks=[NormBound(1e-3, "refuse")]), 0)
    (head,) = client.layout.segments(client.layout.mask(lambda b: b.head))
    client["model"][head.start : head.stop] += 5.0
    assert sent(client.run, client).vector is client["model"]
    client["model"][0] += 5.0
    with pytest.raises(
        ValueError, match=r"its upload changes by 5, more than callbacks.normbound.bound = 0.001"
    ):
        sent(client.run, client)


def test_a_refused_upload_is_a_failure(fit):
    attack = "--callbacks attack --callbacks.attack.kind sign_flip --callbacks.attack.clients [1]"
    bound = (
        "--callbacks normbound --callbacks.normbound.bound 20 --callbacks.normbound.action refuse"
    )
    folder = fit(
        "a",
        "--method fedavg",
        attack,
        "--callbacks.attack.scale 50",
        bound,
        "--federation.on_bad_client skip",
    )
    with (folder / "failures.csv").open(newline="") as file:
        failures = list(csv.DictReader(file))
    assert [(f["round"], f["client"], f["stage"], f["outcome"]) for f in failures] == [
        (str(t), "1", "upload", "skipped") for t in (1, 2, 3)
    ]
    assert "more than callbacks.normbound.bound = 20" in failures[0]["reason"]


# ---------------------------------------------------------------- the attackers


@pytest.mark.parametrize("method", [FedAvg(), Own()], ids=["from the server", "from its own"])
def test_sign_flippers_upload_the_opposite(make_run, make_client, method):
    run = make_run(method, callbacks=[Attack("sign_flip", clients=[2], scale=3.0)])
    begin(run)
    for c in range(4):
        client = make_client(run, c)
        client.state.received["model"].add_(1.0)
        client["model"].add_(normal(client.layout.size, seed=c))
        start, own = client.reference, client["model"]
        assert torch.equal(start, client.state.received["model"]) is isinstance(method, Own)
        wanted = start - 3 * (own - start) if c == 2 else own
        assert_close(sent(run, client).vector, wanted, rtol=0, atol=1e-6)


def test_noise_has_the_length_it_says_and_is_drawn_from_the_seed(make_run, make_client):
    made = []
    for seed, round in ((0, 1), (0, 1), (1, 1), (0, 2)):
        run = make_run(FedAvg(), callbacks=[Attack("noise", clients=[2], scale=3.0)], seed=seed)
        begin(run)
        client = make_client(run, 2, round)
        client["model"].add_(normal(client.layout.size))
        made.append(sent(run, client).vector - client.reference)
        honest = client["model"] - client.reference
        assert float(made[-1].norm()) == pytest.approx(3 * float(honest.norm()), rel=0.1)
        assert abs(float(torch.nn.functional.cosine_similarity(made[-1], honest, dim=0))) < 0.15
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2]) and not torch.equal(made[0], made[3])


@pytest.mark.parametrize("resident", ["always", "never"])
def test_label_flippers_train_on_turned_labels_and_are_judged_on_true_ones(make_run, resident):
    data = DataConfig(resident=resident, augment="flip")
    run = make_run(
        FedAvg(), callbacks=[Attack("label_flip", clients=[2])], data=prepare(data, 4, 0)
    )
    plain = make_run(FedAvg(), data=prepare(data, 4, 0))
    plain_labels = [y for c in range(4) for _, y in batch(plain.data, c)]
    begin(run)
    labels = [y for c in range(4) for _, y in batch(run.data, c)]
    assert [torch.equal(a, b) for a, b in zip(labels, plain_labels, strict=True)] == [
        True,
        True,
        False,
        True,
    ]
    assert torch.equal(labels[2], 9 - plain_labels[2])
    for x, y in zip(batch(run.data, 2), batch(plain.data, 2), strict=True):
        assert torch.equal(x[0], y[0])
    part = run.data.client(2).test, plain.data.client(2).test
    assert torch.equal(*(next(iter(p.batches(500)))[1] for p in part))
    assert run.data.client(2).train.augmented


def test_label_flippers_leave_positions_without_a_target_alone(make_run):
    run = make_run(FedAvg(), callbacks=[Attack("label_flip", clients=[1])])
    true = torch.cat([y for _, y in batch(run.data, 1)])
    without = int(true[0])
    run.data._train.labels[run.data._train.labels == without] = NO_TARGET
    begin(run)
    [(_, flipped)] = batch(run.data, 1)
    assert torch.equal(flipped, torch.where(true == without, NO_TARGET, 9 - true))


def batch(data, client):
    """A client's training samples in their order."""
    return list(data.client(client).train.batches(10_000))
