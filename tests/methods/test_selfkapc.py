"""selfkapc: rows by Mallows' Cp, the measured noise, and what becomes of it from round to round."""

import numpy as np
import pytest
import torch
from classes import Local, SelfKAPC
from numpy.testing import assert_allclose
from reckoning import by_supports, seeded, uploads
from torch.testing import assert_close
from watching import models, run_all, same, server_of

from fl_lightning.callbacks.measured import RIDGE, measured_rows
from fl_lightning.callbacks.simplex import simplex_rows
from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import prepare
from fl_lightning.foundation.errors import BadClient


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


@pytest.mark.parametrize("seed", range(40))
def test_rows_from_products_of_32_bits(seed):
    """They are symmetric, and not negative, only but for rounding; of fewer numbers than clients
    they are singular."""
    generator = seeded(seed)
    n, D = (
        int(torch.randint(low, high, (1,), generator=generator)) for low, high in ((2, 30), (1, 12))
    )
    W = torch.randn(n, D, generator=generator)
    W -= W.mean(0)
    G = (W @ W.T).double()
    scale = float(G.diagonal().mean())
    G += 1e-7 * scale * torch.rand(n, n, generator=generator).double()
    Sigma = torch.diag(scale * 10 ** (8 * torch.rand(n, generator=generator).double() - 6))
    rows = measured_rows(G[None], Sigma[None], torch.arange(n), 1.5)[0]
    assert float(rows.min()) >= 0 and torch.allclose(rows.sum(1), torch.ones(n).double())
    slope = (rows @ G - G + 1.5 * Sigma) / scale  # equal where a row is positive, and least there
    excess = (rows * (slope - slope.min(1, keepdim=True).values)).sum(1) / (1 + slope.abs().max())
    assert float(excess.max()) < 1e-5


@pytest.mark.sampled("60-20", "40-8")
@pytest.mark.parametrize("n, D", [(40, 8), (60, 20), (100, 1), (100, 40)])
def test_rows_of_more_clients_than_numbers(n, D):
    """As in a small layer, such as PReLU's one number: the conditions of Karush, Kuhn and Tucker
    hold."""
    W = draw(n, D)
    H, q = (
        (W @ W.T) / D + 1e-7 * torch.eye(n).double(),
        W @ W.T / D - torch.diag(0.2 + draw(n, seed=1).abs()),
    )
    rows = simplex_rows(H, q)
    assert float(rows.min()) >= 0 and torch.allclose(rows.sum(1), torch.ones(n).double())
    slope = rows @ H - q
    assert float((slope - (slope * rows).sum(1, keepdim=True)).min()) > -1e-6


@pytest.mark.parametrize("noise", [0.0, 0.1, 1.0, 30.0])
def test_measured_rows_minimise_the_criterion(noise):
    W, S = draw(5, 8), draw(5, 5, seed=1)
    Sigma, D = noise * S @ S.T, W - W.mean(0)
    C = (D @ D.T)[None]
    rows = measured_rows(C, Sigma[None], torch.arange(5), 1.5)[0]
    scale = float(C[0].diagonal().mean())
    H = (C[0] / scale + RIDGE * torch.eye(5)).numpy()
    for i, row in enumerate(rows):
        expected = by_supports(H, ((C[0] - 1.5 * Sigma)[i] / scale).numpy())
        # without noise the ridge alone decides
        assert_allclose(row, expected, atol=1e-8 if noise else 1e-7)
    if noise == 0:
        assert_allclose(rows, np.eye(5), atol=1e-6)


def test_a_client_does_not_take_its_own_noise_back_through_others():
    """Targets are equal. Upload 1 was mixed of upload 0's: it is the nearest to it, and has the
    least to give."""
    e = draw(4, 2000)
    e /= e.norm(dim=1, keepdim=True)
    A = torch.eye(4, dtype=torch.float64)
    A[1, 0] = 0.5
    W = A @ e
    D = W - W.mean(0)
    C, first = (D @ D.T)[None], torch.tensor([0])
    row = measured_rows(C, (A @ A.T)[None], first, 1.5)[0, 0]
    unaware = measured_rows(C, torch.diag((A @ A.T).diagonal())[None], first, 1.5)[0, 0]
    assert unaware[1] > unaware[2:].max() + 0.2
    assert row[1] < row[2:].min()


# ---------------------------------------------------------------- in a federation


def test_noise_is_a_quarter_of_the_squared_distance_of_halves(federation):
    """Measured in the first round alone, by layer; the upload is the mean of both."""
    fed = federation(SelfKAPC(), precision="64-true", rounds=2)
    seen = {}
    method = fed.run.method
    upload = type(method).upload
    halves = {}
    phases = type(method).phases

    def spied(self, client, payload):
        for phase in phases(self, client, payload):
            yield phase
            halves.setdefault(client.id, []).append(client["model"].clone())

    def sent(self, client, payload):
        found = upload(self, client, payload)
        seen.setdefault(client.id, []).append(dict(found.statistics))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(method), "phases", spied)
        patch.setattr(type(method), "upload", sent)
        first = fed.round(1)
        after = uploads(fed)
        fed.round(2)
    layout = fed.run.groups[0].layout
    for c, w in enumerate(after):
        a, b = halves[c][:2]
        assert_close(w, (a + b) / 2)
        expected = [
            sum(
                float((a - b)[k.start : k.stop].square().sum())
                for k in layout.blocks
                if k.layer == layer
            )
            / 4
            for layer in range(len(layout.layers))
        ]
        assert_allclose(seen[c][0]["noise"], expected, rtol=1e-5)
        assert [sorted(s) for s in seen[c]] == [["noise", "step"], ["step"]]
    assert {f"noise_share_{name}" for name in fed.run.layer_names} <= first.metrics.keys()


def test_noise_follows_the_mixes_and_is_its_client_s_again(federation):
    """A <- keep T A + diag(sqrt(v)), T the rows of those who answered, v = s^2 / n_i ||step||^2."""
    fed = federation(SelfKAPC(keep=0.5), precision="64-true", rounds=3, clients=5)
    fed.round(1)
    memory = {k: v.clone() for k, v in fed.run.server.memory.items()}
    A = memory["noise.loadings"]
    assert torch.equal(A, torch.diag_embed(A.diagonal(dim1=1, dim2=2))) and bool(
        (A.diagonal(dim1=1, dim2=2) > 0).all()
    )
    before = [s.received["model"].clone() for _, s in sorted(fed.run.states.items())]
    server = server_of(fed, [1, 3])
    sent = {c: p.vector.clone() for c, p in fed.run.method.broadcast(server).items()}
    rows = server.only.weighed.weights
    fed.round(2, [1, 3])
    layout, shares = (
        fed.run.groups[0].layout,
        memory["noise.measured"][0] / memory["noise.measured"][1],
    )
    n = fed.run.data.train_sizes
    for layer in range(len(layout.layers)):
        expected = A[layer].clone()
        expected[[1, 3]] = 0.5 * rows[layer] @ A[layer]
        for c in (1, 3):
            moved = fed.run.states[c].received["model"] - sent[c]
            step = float(layout.squared_norms(moved)[layer])
            expected[c, c] += (min(float(shares[layer]) / n[c], 1) * step) ** 0.5
        assert_close(
            fed.run.server.memory["noise.loadings"][layer], expected, rtol=1e-5, atol=1e-12
        )
    assert same(
        [s.received["model"] for c, s in sorted(fed.run.states.items()) if c in (0, 2, 4)],
        before[::2],
    )


def test_one_sample_a_client(federation, capsys):
    """No halves: local training as everybody's, all of a step counts as noise, and a line says
    so."""
    few = prepare(DataConfig(source="digits", partition="iid"), 4, 0)
    train, *others = few._shares
    few._shares, few.train_sizes = ([index[:1] for index in train], *others), [1, 1, 1, 1]
    fed, alone = (federation(m, rounds=3, data=few) for m in (SelfKAPC(), Local()))
    fed.round(1)
    alone.round(1)
    assert same(models(fed), models(alone))
    for t in (2, 3):
        fed.round(t)
    assert "no client has enough samples" in capsys.readouterr().err
    assert all(w.isfinite().all() for w in models(fed))


@pytest.mark.sampled("[8]")
@pytest.mark.parametrize("batch_size", [1, 5, 8])
def test_halves_train_on_no_more_samples(federation, batch_size):
    """Also where a round's length is given in steps, of batches that cannot be halved."""
    few = {"fraction": 0.1}
    for length in ({"local_steps": 1}, {"local_steps": 6}, {"local_epochs": 2}):
        counts = []
        for method in (SelfKAPC(), Local()):
            changes = {"local_epochs": None} | length
            fed = federation(method, rounds=1, data=few, batch_size=batch_size, **changes)
            fed.prepare()
            row = fed.round(1).metrics
            counts.append(row["flops_forward"] + row["flops_extra"])
        assert 0.75 * counts[1] < counts[0] <= counts[1]


@pytest.mark.parametrize("noise", [3e38, float("inf")])
def test_a_client_whose_noise_has_no_bound(federation, monkeypatch, noise):
    """All of a step counts as noise, for everybody, since noise is pooled; an infinite one is a
    client's failure."""
    upload = SelfKAPC.upload

    def sent(self, client, payload):
        made = upload(self, client, payload)
        if client.id == 0 and "noise" in made.statistics:
            made.statistics["noise"] = torch.full_like(made.statistics["noise"], noise)
        return made

    monkeypatch.setattr(SelfKAPC, "upload", sent)
    fed = federation(SelfKAPC(), rounds=3)
    if noise == float("inf"):
        with pytest.raises(
            BadClient, match=r"client 0 failed in round 1, stage upload: .* is not finite"
        ):
            fed.round(1)
        return
    last = [fed.round(t) for t in (1, 2, 3)][-1]
    assert {last.metrics[f"noise_share_{name}"] for name in fed.run.layer_names} == {1.0}
    assert_allclose(last.relation.rows.sum(-1), 1, rtol=1e-5)
    assert (last.relation.rows[range(4), :, range(4)] < 0.1).all() and all(
        w.isfinite().all() for w in models(fed)
    )


def test_steps_too_small_to_see_leave_the_own_model(federation, capsys):
    """All models are equal: no noise, no line about it."""
    fed = run_all(federation(SelfKAPC(), rounds=2, optimizer={"lr": 1e-30}))
    assert same(models(fed), models(fed)[:1] * 4)
    np.testing.assert_array_equal(
        fed.round(3).relation.rows, np.eye(4)[:, None] + np.zeros((1, 2, 1))
    )
    assert "samples to measure" not in capsys.readouterr().err
