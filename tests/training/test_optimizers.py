"""The learning rate; and the loss scaling of 16-mixed, which is a client's, whoever trained before
it on the rank."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from fl_lightning.configuration.config import OptimizerConfig
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.training.optimizers import AnyOptimizer


@pytest.fixture
def scaled():
    """An optimiser with the scaler of 16-mixed, on the CPU."""
    fabric = Fabric(accelerator="cpu", devices=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def step(optimizer, **_):
        scaler.step(optimizer)
        scaler.update()

    precision = SimpleNamespace(
        scaler=scaler, unscale_gradients=scaler.unscale_, precision="16-mixed"
    )
    strategy = SimpleNamespace(precision=precision, optimizer_step=step)
    fabric = SimpleNamespace(strategy=strategy, backward=lambda loss: scaler.scale(loss).backward())
    model = nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = AnyOptimizer(
        fabric, adam, list(model.parameters()), OptimizerConfig(name="adam", lr=0.1)
    )
    return optimizer, lambda: optimizer.step(model(torch.ones(1, 2)).sum())


@pytest.mark.parametrize("clip", [None, 1e9])
def test_a_step_that_failed_leaves_the_next_client_nothing_of_its_scaling(
    scaled, clip, monkeypatch
):
    """Out of memory in the optimiser's step, with `retry` or `skip`: the next step would not be
    unscaled."""
    optimizer, step = scaled
    optimizer.config = OptimizerConfig(name="adam", lr=0.1, clip_norm=clip)
    first = [p.detach().clone() for p in optimizer._parameters()]
    step()
    good = [p.grad.clone() for p in optimizer._parameters()]

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as broken, pytest.raises(torch.OutOfMemoryError):
        broken.setattr(optimizer.optimizer, "step", full)
        step()
    optimizer.reset()
    with torch.no_grad():
        for p, value in zip(optimizer._parameters(), first, strict=True):
            p.copy_(value)
    step()
    assert all(torch.equal(p.grad, g) for p, g in zip(optimizer._parameters(), good, strict=True))


def test_the_learning_rate_decays_from_round_to_round(federation):
    """A single step of the second round, from the same model, is half as long."""
    moved = []
    for decay in (1.0, 0.5):
        fed = federation(
            FedAvg(), local_epochs=None, local_steps=1, optimizer={"lr": 0.1, "lr_decay": decay}
        )
        models = [fed.run.groups[0].initial]
        for t in (1, 2):
            fed.round(t)
            models.append(fed.run.groups[0].vectors["model"])
        moved.append([b - a for a, b in pairwise(models)])
    plain, decayed = moved
    assert torch.equal(plain[0], decayed[0])
    torch.testing.assert_close(decayed[1], plain[1] / 2, rtol=1e-3, atol=1e-6)
    assert float(plain[1].norm()) > 1e-3
