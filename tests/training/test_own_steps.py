"""Own steps side by side: what one client's step does, or fails to do, is nobody else's."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from refusals import refuses

from fl_lightning.core import Phase
from fl_lightning.methods import Method, Traits
from fl_lightning.training.executors.gradients import GradientSteps
from fl_lightning.training.executors.vmap import Vmap


@dataclass(frozen=True)
class Noisy(Method):
    """Steps down the gradient and by draws of its own; client `fails` fails in its third step. It
    may bind. `whole`: the gradient is that of all the client's data."""

    fails: int | None = None
    binds: bool = False
    whole: bool = False
    evaluating: bool = False
    traits = Traits(judge="after")

    def phases(self, client, payload):
        return [Phase(step=partial(self.step, client.generator("noise"), []), by_gradient=True)]

    def step(self, draws, taken, client, batch):
        w, columns = client["model"], client.layout.parameters
        taken.append(1)
        if client.id == self.fails and len(taken) == 3:
            raise RuntimeError("it cannot go on")
        if self.binds:
            client.bind()
        with torch.no_grad():
            samples = client.data.train.tensors if self.whole else batch
            loss, gradient = client.gradient(w, samples, training=not self.evaluating)
        assert torch.is_grad_enabled()
        w[columns] -= client.lr * gradient[columns] + 0.001 * torch.randn(
            w[columns].shape, generator=draws
        )
        return loss


def ran(federation, method, executor="vmap", **settings):
    fed = federation(
        method, local_epochs=2, batch_size=16, fabric={"executor": executor}, **settings
    )
    fed.prepare()
    assert isinstance(fed.worker.trainers[0].executor, Vmap) == (executor == "vmap")
    fed.round(1)
    return fed


def test_who_fails_does_so_alone(federation):
    """The others are trained once: their draws and vectors have gone on."""
    whole, without = ran(federation, Noisy()), ran(federation, Noisy(fails=2), on_bad_client="skip")
    for c in (0, 1, 3):
        assert torch.equal(
            whole.run.states[c].vectors["model"], without.run.states[c].vectors["model"]
        ), c
    assert 2 in whole.run.states and 2 not in without.run.states


@pytest.mark.parametrize("whole", [False, True])
def test_they_come_to_what_the_loop_does(federation, whole):
    """Gradients of more samples than a batch has are found one by one."""
    stacked, loop = (ran(federation, Noisy(whole=whole), name) for name in ("vmap", "loop"))
    for c, state in loop.run.states.items():
        torch.testing.assert_close(stacked.run.states[c].vectors, state.vectors, rtol=0, atol=1e-5)


def test_a_step_that_binds_is_refused(federation):
    with refuses(r"Phase\.by_gradient.*uses the client's model"):
        ran(federation, Noisy(binds=True))


def test_a_pass_that_fails_is_repeated_client_by_client(federation, monkeypatch):
    """Whose request it is that fails shows then, and the others go on."""
    pools, gradients_of = [], GradientSteps._gradients

    def fail(self, requests):
        pools.append(len(requests))
        if any(one.job.schedule.client == 2 for one in requests):
            raise MemoryError("no room")
        return gradients_of(self, requests)

    whole = ran(federation, Noisy())
    monkeypatch.setattr(GradientSteps, "_gradients", fail)
    without = ran(federation, Noisy(), on_bad_client="skip")
    assert pools[:5] == [4, 1, 1, 1, 1] and max(pools[5:]) == 3
    assert sorted(without.run.states) == [0, 1, 3]
    for c, state in without.run.states.items():
        assert torch.equal(state.vectors["model"], whole.run.states[c].vectors["model"])


@pytest.mark.parametrize("evaluating", [False, True])
def test_passes_hold_samples_alone_and_train(federation, monkeypatch, evaluating):
    """Smaller batches are filled up with their first sample: a model need not be defined at 0. What
    is asked for in evaluation mode goes through no pass."""
    rows = []
    original_init = GradientSteps.__init__

    def init(self, stack, size, gradients):
        def seen(width, x, y, weight):
            rows.extend(x[weight.any(dim=1)].flatten(2).unbind())
            return gradients(width, x, y, weight)

        original_init(self, stack, size, seen)

    monkeypatch.setattr(GradientSteps, "__init__", init)
    ran(federation, Noisy(evaluating=evaluating))
    assert bool(rows) != evaluating and all(bool((slot != 0).any(dim=1).all()) for slot in rows)
