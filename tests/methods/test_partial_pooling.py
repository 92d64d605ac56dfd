"""Partial pooling against the joint fit: shared weights and each client's penalised deviation."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fl_lightning.methods import partialpooling as module
from fl_lightning.methods.partialpooling import CANDIDATES, FOLDS, ClientFits, PartialPooling


def client_of(x, y, id):
    part = SimpleNamespace(batches=lambda size: iter([(torch.tensor(x), torch.tensor(y))]))
    data = SimpleNamespace(
        num_classes=1 if y.dtype.kind == "f" else int(y.max()) + 1,
        unit_ids=lambda c: (np.arange(len(y)) // 2, np.arange(0)),
    )
    run = SimpleNamespace(config=SimpleNamespace(seed=0), data=data)
    return SimpleNamespace(run=run, id=id, data=SimpleNamespace(train=part))


def clients(regression, apart, count=6, n=60):
    rng, shared, made = np.random.default_rng(0), np.array([1.0, -1.0, 0.5]), []
    for id in range(count):
        x = rng.normal(size=(n, 3))
        signal = x @ (shared + apart * rng.normal(size=3)) + apart * rng.normal()
        y = (
            signal + 0.5 * rng.normal(size=n)
            if regression
            else (signal + rng.logistic(size=n) > 0).astype(np.int64)
        )
        made.append(client_of(x, y, id))
    return made


def fitted(everyone, rounds):
    """The fits of all clients, the shared weights, own weights and the chosen candidate."""
    fits = [ClientFits(client) for client in everyone]
    classes = everyone[0].run.data.num_classes
    run = SimpleNamespace(
        data=SimpleNamespace(input_shape=(3,), num_classes=classes), relation=None
    )
    method = PartialPooling()
    server = SimpleNamespace(memory=method.init_server(run), groups=[], answered=[])
    server.run = SimpleNamespace(relation=SimpleNamespace(learn=lambda server: None))
    own = [method.init_client(run)["pooling.own"] for _ in everyone]
    for _ in range(rounds):
        own = [
            fit.step(v, server.memory["pooling.shared"]) for fit, v in zip(fits, own, strict=True)
        ]
        server.statistics = {
            c: fit.uploaded(v) for c, (fit, v) in enumerate(zip(fits, own, strict=True))
        }
        server.answered = [*server.statistics]
        method.aggregate(server)
    shared = server.memory["pooling.shared"]
    own = [fit.step(v, shared) for fit, v in zip(fits, own, strict=True)]
    return fits, shared, own, int(server.memory["pooling.best"])


@pytest.mark.sampled("True-2")
@pytest.mark.parametrize("regression, rounds", [(True, 2), (False, 400)])
def test_it_is_the_joint_fit(regression, rounds):
    """The summed loss with all penalties has no slope left: in w, and in each v_i = w + d_i. A
    regression comes to it in two rounds."""
    fits, shared, own, _ = fitted(clients(regression, 0.3), rounds)
    pull = torch.zeros_like(shared)
    for fit, v in zip(fits, own, strict=True):
        residuals = fit._residuals(v)[0] * (~fit.left_out)[..., None]
        towards = fit.penalty * (v - shared)
        slope = residuals.mT @ fit.x + towards
        assert slope.abs().max() < 1e-4 * fit.penalty.max()
        pull = pull + towards
    flat = torch.full_like(shared, module.SHARED)
    flat[..., -1] = 1e-6
    few = [place for place, (slope, _) in enumerate(CANDIDATES) if slope < 1e3]
    assert (pull - flat * shared)[few].abs().max() < 1e-2


@pytest.mark.parametrize("regression", [True, False])
def test_the_penalty_is_chosen_by_how_far_clients_differ(regression):
    alike, apart = (fitted(clients(regression, far), 30)[3] for far in (0.0, 3.0))
    assert CANDIDATES[alike][0] > CANDIDATES[apart][0]


def test_units_stay_in_one_part():
    fits = ClientFits(clients(True, 0.1, count=1)[0])
    fold = fits.left_out[:FOLDS].int().argmax(0)
    assert (fold.view(-1, 2)[:, 0] == fold.view(-1, 2)[:, 1]).all()
    assert not fits.left_out[FOLDS].any() and len(set(fold.tolist())) == FOLDS
