"""Own losses in stacked passes: where they are stacked they come to what the loop does, else the
loop trains."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fl_lightning.core import Module, Objective, Phase, PureLoss, Tensors
from fl_lightning.core.phase import Batch
from fl_lightning.methods import Method, Traits
from fl_lightning.training.executors import own
from tests.training.test_together import models, vmapped, whole

Loss = Callable[[Tensors, Module, Batch], Tensor]


def weighted(tensors, module, batch):
    """Classes weigh what the client says, and a batch what it has of samples: no mean over
    samples."""
    x, y = batch
    return cross_entropy(module.model(x), y, weight=tensors["weights"]) * (1 + len(y) / 100)


def of_the_head(tensors, module, batch):
    """It reaches the classifier alone."""
    return (module.head.weight - tensors["weights"][:, None]).square().sum()


def random(tensors, module, batch):
    return module.task_loss(batch) * torch.rand(())


def branching(tensors, module, batch):
    loss = module.task_loss(batch)
    return loss if loss > 2.3 else 2 * loss


def choosing(tensors, module, batch):
    x, y = batch
    return module.task_loss((x[y > 4], y[y > 4])) if (y > 4).any() else module.task_loss(batch)


COUNTED = [1.0]


def counting(tensors, module, batch):
    """It is another one at each call."""
    COUNTED[0] += 1
    return module.task_loss(batch) * COUNTED[0]


@dataclass(frozen=True)
class Own(Method):
    """FedAvg with a loss."""

    loss: Loss = weighted
    traits = Traits(judge="after")

    def phases(self, client, payload):
        weights = torch.linspace(0.5, 1.5 + client.id, 10, dtype=client.run.dtype)
        return [Phase(objective=Objective(loss=PureLoss(self.loss, {"weights": weights})))]


@pytest.fixture
def stacked(monkeypatch):
    """The jobs that go through stacked passes with losses of their own."""
    seen = []
    original_init = own.LossPass.__init__

    def init(self, losses, jobs):
        seen.extend(jobs)
        original_init(self, losses, jobs)

    monkeypatch.setattr(own.LossPass, "__init__", init)
    return seen


def both(federation, method, **changes):
    """Every client's results and models, by the loop and stacked."""
    settings = {"precision": "64-true", "batch_size": 24, "local_epochs": 2} | changes
    found = []
    for prepared in (lambda fed: fed, vmapped):
        fed = prepared(federation(method, **settings))
        clients = whole(fed)
        found.append([*clients, *models(fed)])
    return found[0], found[1]


def compare(loop, vmap):
    for ours, theirs in zip(vmap, loop, strict=True):
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
        else:
            assert ours == pytest.approx(theirs, abs=1e-10)


@pytest.mark.sampled("weighted-optimizer1")
@pytest.mark.parametrize(
    "optimizer", [{}, {"momentum": 0.9, "weight_decay": 0.1, "keep_state": True}]
)
@pytest.mark.parametrize("loss", [weighted, of_the_head])
def test_a_pure_loss_is_stacked(federation, stacked, loss, optimizer):
    """Of any batch, whole or not; operations too. What a loss does not reach does not decay
    either."""
    compare(*both(federation, Own(loss), optimizer=optimizer))
    assert len(stacked) == 8
    assert any(len(job.part) % 24 for job in stacked)


@pytest.mark.parametrize(
    "loss, why",
    [
        (random, "draws random numbers"),
        (branching, "data-dependent"),
        (choosing, "data-dependent"),
        (counting, "gradients differ"),
    ],
)
def test_what_torch_func_cannot_run_trains_in_the_loop(federation, stacked, loss, why, capsys):
    """A line says why; the numbers are the loop's to the bit."""
    COUNTED[0] = 1.0
    method = Own(loss)
    fed = vmapped(federation(method))
    [first] = {trainer.group.index for trainer in fed.worker.trainers}
    fed.prepare()
    COUNTED[0] = 1.0
    jobs = []
    train = fed.worker.trainers[first].loop.train
    fed.worker.trainers[first].loop.train = lambda some: jobs.extend(some) or train(some)
    fed.round(1)
    assert len(jobs) == 4
    assert not stacked
    lines = [line for line in capsys.readouterr().err.splitlines() if "trains in the loop" in line]
    assert lines
    assert all(loss.__name__ in line for line in lines)
    assert why in lines[0]


def test_a_loss_that_is_made_for_each_client_is_refused():
    factor = 2.0

    def closure(tensors, module, batch):
        return factor * module.task_loss(batch)

    with pytest.raises(ValueError, match="not a closure"):
        PureLoss(closure)
