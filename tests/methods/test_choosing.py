"""FedFomo (card 1.23), whose clients choose among models of others, and LG-FedAvg (1.25)."""

import numpy as np
import pytest
import torch
from reckoning import scores_at
from refusals import refuses
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from watching import Watch, client_of, server_of

from fl_lightning.callbacks.compression import Quantize
from fl_lightning.methods.fedfomo import (
    FedFomo,
    epsilon_greedy,
    first_order_gains,
    positive_shares,
)

VALIDATION = {"data": {"validation": 0.2}}
NUMBERS = 64 * 16 + 16 + 160 + 10


def validation_loss(client, vector):
    """By hand."""
    [(x, y)] = client.data.validation.batches(10_000)
    return float(cross_entropy(scores_at(client, vector, x), y))


# ---------------------------------------------------------------- FedFomo


def test_gains_are_first_order_and_shares_positive(federation):
    """INV1 of the formula: by hand, in float64; equal models and losses that are not finite gain
    nothing."""
    fed = federation(FedFomo(), precision="64-true", **VALIDATION)
    client = client_of(fed, 0)
    start = client["model"].clone()
    used = client.columns(lambda b: True)
    others = [start + 0.1 * used * torch.randn_like(start) for _ in range(4)]
    candidates = [*others, start.clone(), torch.full_like(start, torch.nan)]
    gains = first_order_gains(client, client.data.validation, start, candidates)
    base = validation_loss(client, start)
    for gain, model in zip(gains[:4].tolist(), others, strict=True):
        assert gain == pytest.approx(
            (base - validation_loss(client, model)) / float((model - start).norm()), rel=1e-9
        )
    assert gains[4:].tolist() == [0.0, 0.0]
    absolutes = first_order_gains(client, client.data.validation, start, candidates, 1)
    for k, model in enumerate(others):
        ratio = float((model - start).norm() / (model - start).abs().sum())
        assert float(absolutes[k]) == pytest.approx(float(gains[k]) * ratio, rel=1e-9)
    shares = positive_shares(
        torch.tensor([[1.0, -5.0, 3.0], [-1.0, 0.0, -2.0]], dtype=torch.float64)
    )
    assert shares.tolist() == [[0.25, 0.0, 0.75], [0.0, 0.0, 0.0]]


def test_the_best_are_fetched_first():
    """Without exploring: in the order of their scores, ties drawn; with it: all alike, nobody
    twice."""
    scores, rng = torch.tensor([9.0, 1.0, 3.0, 3.0, 2.0]), np.random.default_rng(0)
    found = [epsilon_greedy(scores, [1, 2, 3, 4], 3, 0.0, rng) for _ in range(20)]
    assert {tuple(f) for f in found} == {(2, 3, 4), (3, 2, 4)}
    explored = [epsilon_greedy(scores, [1, 2, 3, 4], 2, 1.0, rng) for _ in range(400)]
    assert all(len(set(f)) == 2 for f in explored)
    counts = np.bincount([f[0] for f in explored], minlength=5)
    assert counts[0] == 0 and counts[1:].min() > 70
    assert epsilon_greedy(scores, [1, 2], 5, 0.0, rng) == [2, 1]


def test_exploring_begins_at_epsilon_and_decays_to_0(federation, monkeypatch):
    """In round 1 nothing is taken off it yet."""
    epsilons = []

    def noted(scores, among, count, epsilon, rng):
        epsilons.append(epsilon)
        return epsilon_greedy(scores, among, count, epsilon, rng)

    monkeypatch.setattr("fl_lightning.methods.fedfomo.epsilon_greedy", noted)
    fed = federation(FedFomo(epsilon=0.3, epsilon_decay=0.2), clients=2, **VALIDATION)
    for t in (1, 2, 3):
        fed.round(t)
    assert epsilons[::2] == pytest.approx([0.3, 0.1, 0.0])


def test_fedfomos_sums_by_the_authors_code(federation):
    """A round's gains over the absolute value of their sum, one's own model's among them; what is
    mixed is the same."""
    told = {0: [3.0, -1.0, 2.0], 1: [-4.0, 1.0, 1.0]}  # of two others, then of one's own
    for gains in ("paper", "code"):
        fed = federation(FedFomo(gains=gains), clients=3, **VALIDATION)
        fed.round(1)
        server, before = server_of(fed), fed.run.server.memory["affinity"].clone()
        of = {0: [1, 2, 0], 1: [0, 2, 1]}
        server.collect(
            [0, 1],
            {
                c: {
                    "candidates": torch.tensor(of[c], dtype=torch.int32),
                    "gains": torch.tensor(g, dtype=torch.float64),
                }
                for c, g in told.items()
            },
        )
        fed.run.method.aggregate(server)
        # |3 - 1 + 2|, |-4 + 1 + 1|
        scale = 1.0 if gains == "paper" else torch.tensor([[4.0], [2.0], [1.0]])
        want = (
            torch.tensor([[0, 3.0, -1.0], [-4.0, 0, 1.0], [0, 0, 0]], dtype=torch.float64) / scale
        )
        assert_close(server.memory["affinity"] - before, want)
        rows = server.relation_view().rows[:, 0]
        np.testing.assert_allclose(rows, [[0.4, 0.6, 0], [0, 0.5, 0.5]], atol=1e-7)


def test_transforms_see_every_model_that_travels(federation):
    """Quantised candidates take fewer bytes, and are other numbers."""
    watch = Watch()
    fed = federation(
        FedFomo(models=2), callbacks=[Quantize(direction="download"), watch], **VALIDATION
    )
    fed.round(1)
    w = dict(watch.models)
    record = fed.round(2)
    assert record.metrics["download_bytes"] == 4 * 2 * (NUMBERS + 4 * 4)
    further = [v for _, v, sent in watch.downloads[4:] if sent.any()]
    assert len(further) == 8
    assert not any(torch.equal(v, own) for v in further for own in w.values())


def test_fedfomo_wants_validation_data(federation):
    with refuses(r"^data\.validation=0\.0.*fedfomo weighs models"):
        federation(FedFomo()).prepare()
    federation(FedFomo(), **VALIDATION).prepare()
