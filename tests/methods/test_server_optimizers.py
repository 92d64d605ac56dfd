"""Methods whose server takes a step of its own, or makes up for local steps: FedOpt's, FedNova,
FedDyn."""

import pytest
import torch
from classes import FedAvg, FedAvgM, FedDyn, FedNova
from reckoning import ROUNDING, WHOLE, batch_of, slope, uploads
from refusals import refuses
from torch.testing import assert_close
from watching import Watch, client_of, global_model

from fl_lightning.methods.fedopt import FedAdagrad, FedAdam, FedYogi

EXACT = {"precision": "64-true", "rounds": 3}


def changes(make, method, **settings):
    """Uploaded models less the global one, round by round (4, D), and the global models (first:
    initial)."""
    fed = make(method, callbacks=[watch := Watch()], **(EXACT | settings))
    models, moved = [global_model(fed).clone()], []
    for t in range(1, fed.run.rounds + 1):
        watch.models.clear()
        fed.round(t)
        moved.append(
            torch.stack([model for _, model in sorted(watch.models, key=lambda m: m[0])])
            - models[-1]
        )
        models.append(global_model(fed).clone())
    return moved, models


def shares(make):
    """Of the training samples, float64 (4,)."""
    sizes = torch.tensor(make(FedAvg()).run.data.train_sizes, dtype=torch.float64)
    return sizes / sizes.sum()


def mean_changes(make, method):
    """The mean change of each round (D,), and the global models."""
    moved, models = changes(make, method)
    return [shares(make) @ those for those in moved], models


def test_momentum_by_hand(federation):
    means, models = mean_changes(federation, FedAvgM(server_lr=0.5, momentum=0.8))
    v = torch.zeros_like(models[0])
    for change, old, new in zip(means, models, models[1:], strict=False):
        v = 0.8 * v + change
        assert_close(new, old + 0.5 * v, **ROUNDING)


@pytest.mark.parametrize("update, begins", [("paper", 1e-4), ("code", 0.0)])
def test_adagrad_is_torchs(federation, update, begins):
    means, models = mean_changes(federation, FedAdagrad(server_lr=0.2, tau=0.01, update=update))
    w = models[0].clone().requires_grad_()
    theirs = torch.optim.Adagrad([w], lr=0.2, initial_accumulator_value=begins, eps=0.01)
    for change, new in zip(means, models[1:], strict=True):
        w.grad = -change
        theirs.step()
        assert_close(new, w.detach(), **ROUNDING)


def test_the_codes_adam_is_torchs(federation):
    """Accumulators from 0; torch adds eps to sqrt(v / (1 - beta2^t)), so eps is chosen anew in each
    step."""
    means, models = mean_changes(federation, FedAdam(server_lr=0.2, tau=0.01, update="code"))
    w = models[0].clone().requires_grad_()
    theirs = torch.optim.Adam([w], lr=0.2, betas=(0.9, 0.999))
    for t, (change, new) in enumerate(zip(means, models[1:], strict=True), 1):
        theirs.param_groups[0]["eps"] = 0.01 / (1 - 0.999**t) ** 0.5
        w.grad = -change
        theirs.step()
        assert_close(new, w.detach(), **ROUNDING)


def test_the_codes_yogi_by_hand(federation):
    means, models = mean_changes(federation, FedYogi(server_lr=0.2, tau=0.01, update="code"))
    m, v = torch.zeros_like(models[0]), torch.zeros_like(models[0])
    for t, (change, old, new) in enumerate(zip(means, models, models[1:], strict=False), 1):
        m, square = 0.9 * m + 0.1 * change, change**2
        v = v + 0.001 * square * torch.sign(square - v)
        rate = 0.2 * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t)
        assert_close(new, old + rate * m / (v.sqrt() + 0.01), **ROUNDING)


@pytest.mark.parametrize(
    "method", [FedAdam(server_lr=0.2, tau=0.01), FedYogi(server_lr=0.2, tau=0.01)]
)
def test_adam_and_yogi_by_hand(federation, method):
    means, models = mean_changes(federation, method)
    m, v = torch.zeros_like(models[0]), torch.full_like(models[0], 1e-4)
    for change, old, new in zip(means, models, models[1:], strict=False):
        m, square = 0.9 * m + 0.1 * change, change**2
        down = square * torch.sign(v - square) if isinstance(method, FedYogi) else v - square
        v = v - 0.01 * down
        assert_close(new, old + 0.2 * m / (v.sqrt() + 0.01), **ROUNDING)


def test_normalised_by_steps(federation):
    """With momentum, so that what steps come to is not their number, and clients of unlike
    sizes."""
    settings = {"optimizer": {"momentum": 0.5}, "rounds": 1}
    [moved], [old, new] = changes(federation, FedNova(), **settings)
    run = federation(FedNova(), **(EXACT | settings)).run
    batch, epochs = run.config.federation.batch_size, run.config.federation.local_epochs
    steps = [-(-n // batch) * epochs for n in run.data.train_sizes]
    assert len(set(steps)) > 1
    a = torch.tensor(
        [sum((1 - 0.5**k) / 0.5 for k in range(1, n + 1)) for n in steps], dtype=torch.float64
    )
    p = shares(federation)
    assert_close(new, old + (p @ a) * ((p / a) @ moved), **ROUNDING)
    assert (new - old - p @ moved).norm() > 1e-3


@pytest.mark.parametrize("alphas", ["equal", "samples"])
def test_dynamic_steps_by_hand(federation, alphas):
    """Of one step: w_i = w - lr (grad - g_i), and w = mean w_i - h / alpha."""
    settings = WHOLE | {"rounds": 2, "local_epochs": 1, "optimizer": {"momentum": 0.0}}
    fed = federation(FedDyn(alpha=0.1, alphas=alphas), **settings)
    sizes = torch.tensor(fed.run.data.train_sizes, dtype=torch.float64)
    alpha = torch.full((4,), 0.1) if alphas == "equal" else 0.1 * sizes.mean() / sizes
    assert len(set(sizes.tolist())) > 1
    lr, g = fed.run.config.optimizer.lr, [torch.zeros_like(global_model(fed))] * 4
    h = torch.zeros_like(g[0])
    for t in (1, 2):
        w = global_model(fed).clone()
        fed.round(t)
        clients = [client_of(fed, c) for c in range(4)]
        own = [
            w - lr * (slope(one, w, batch_of(one)) - g_i)
            for one, g_i in zip(clients, g, strict=True)
        ]
        g = [g_i - a * (w_i - w) for g_i, w_i, a in zip(g, own, alpha.tolist(), strict=True)]
        h = h - 0.1 * (torch.stack(own) - w).mean(0)
        assert_close(global_model(fed), torch.stack(own).mean(0) - h / 0.1, **ROUNDING)


def test_the_mean_of_uploads_is_scored_and_the_servers_model_is_sent(federation):
    """With `scored mean`, the rounds are the same, and the global model is one for all."""
    fed, plain = (
        federation(FedDyn(alpha=0.1, scored=scored), **EXACT) for scored in ("mean", "server")
    )
    for t in (1, 2):
        record, other = fed.round(t), plain.round(t)
        assert torch.equal(global_model(fed), global_model(plain))
        mean = torch.stack(uploads(fed, "model")).mean(0)
        scored = [fed.evaluator.global_model(c) for c in range(4)]
        assert scored[0] is not None and all(model is scored[0] for model in scored)
        assert_close(scored[0], mean, **ROUNDING)
        assert record.metrics["train_loss"] == other.metrics["train_loss"]
    assert not torch.equal(global_model(fed), scored[0])
    with refuses(r"^method\.scored='mean'.*evaluation\.judge before"):
        federation(FedDyn(scored="mean"), evaluation={"judge": "before"}).prepare()
