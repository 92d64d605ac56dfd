"""Own steps side by side: what one client's step does, or fails to do, is nobody else's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning.core import Batch, Client, Payload, Phase
from fl_lightning.engine.federation import Federation
from fl_lightning.errors import BadInput
from fl_lightning.methods import Method
from fl_lightning.training.executors.gradients import OwnSteps
from fl_lightning.training.executors.vmap import Vmap

Make = Callable[..., Federation]


@dataclass(frozen=True)
class Noisy(Method):
    """Steps down the gradient and by draws of its own; client `fails` fails in its third step. It may bind. `whole`:
    the gradient is that of all the client's data."""

    fails: int | None = None
    binds: bool = False
    whole: bool = False
    judge = "after"

    def phases(self, client: Client, payload: Payload) -> Iterable[Phase]:
        return [Phase(step=partial(self.step, client.generator("noise"), []), by_gradient=True)]

    def step(self, draws: torch.Generator, taken: list[int], client: Client, batch: Batch) -> Tensor:
        w, columns = client["model"], client.layout.parameters
        taken.append(1)
        if client.id == self.fails and len(taken) == 3:
            raise RuntimeError("it cannot go on")
        if self.binds:
            client.bind()
        with torch.no_grad():
            loss, gradient = client.gradient(w, client.data.train.tensors if self.whole else batch)
        assert torch.is_grad_enabled()
        w[columns] -= client.lr * gradient[columns] + 0.001 * torch.randn(w[columns].shape, generator=draws)
        return loss


def ran(federation: Make, method: Method, executor: str = "vmap", **settings: Any) -> Federation:
    fed = federation(method, local_epochs=2, batch_size=16, fabric={"executor": executor}, **settings)
    fed.prepare()
    assert isinstance(fed.worker.trainers[0].executor, Vmap) == (executor == "vmap")
    fed.round(1)
    return fed


def test_who_fails_does_so_alone(federation: Make) -> None:
    """The others are trained once: their draws and vectors have gone on."""
    whole, without = ran(federation, Noisy()), ran(federation, Noisy(fails=2), on_bad_client="skip")
    for c in (0, 1, 3):
        assert torch.equal(whole.run.states[c].vectors["model"], without.run.states[c].vectors["model"]), c
    assert 2 in whole.run.states and 2 not in without.run.states


@pytest.mark.parametrize("whole", [False, True])
def test_they_come_to_what_the_loop_does(federation: Make, whole: bool) -> None:
    """Gradients of more samples than a batch has are found one by one."""
    stacked, loop = (ran(federation, Noisy(whole=whole), name) for name in ("vmap", "loop"))
    for c, state in loop.run.states.items():
        torch.testing.assert_close(stacked.run.states[c].vectors, state.vectors, rtol=0, atol=1e-5)


def test_a_step_that_binds_is_refused(federation: Make) -> None:
    with pytest.raises(BadInput, match=r"Phase\.by_gradient.*binds the client's model"):
        ran(federation, Noisy(binds=True))


def test_a_pass_that_fails_is_everybodys(federation: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """No client is trained again from where its step has got to."""
    pools = []

    def fail(self: OwnSteps, some: list) -> list:
        pools.append(len(some))
        raise MemoryError("no room")

    monkeypatch.setattr(OwnSteps, "_gradients", fail)
    with pytest.raises(Exception, match="no room"):
        ran(federation, Noisy())
    assert pools == [4]
