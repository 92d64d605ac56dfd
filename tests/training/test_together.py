"""Runs that train together: the same bits as alone, and failures that stay each run's own."""

from functools import partial

import numpy as np
import pytest
import torch
from classes import KAPC, SCAFFOLD, Ditto, FedAvg, FedPer, FedProto, FedProx, Local
from torch import nn

from fl_lightning.foundation.errors import BadClient
from fl_lightning.training.executors.replay import record
from fl_lightning.training.executors.together import Shared, Together


def vmapped(fed, together=None):
    fed.run.config.fabric.executor = "vmap"
    for trainer in fed.worker.trainers:
        trainer.together = together
    return fed


def whole(fed):
    """All rounds; what each client came to."""
    fed.prepare()
    return [client for t in range(1, fed.run.rounds + 1) for client in fed.round(t).clients]


def models(fed):
    return [fed.run.states[c].vectors["model"].clone() for c in sorted(fed.run.states)]


def drive(together, works):
    """What each work returns, or the exception that it raises."""

    def caught(work):
        try:
            return work()
        except Exception as error:
            return error

    left = [(k, lambda work=work: caught(work)) for k, work in enumerate(works)]
    return dict(together.drive(lambda waits: left.pop(0) if left else None))


COMPANY = [
    lambda: FedProx(mu=0.5),
    Local,
    FedAvg,
    Ditto,
    lambda: KAPC(solver="exact"),
    SCAFFOLD,
    FedPer,
    FedProto,
    FedAvg,
]


@pytest.mark.parametrize(
    "number",
    [3, pytest.param(10, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.slow)],
)
def test_a_run_has_the_same_bits_alone_and_among_others(federation, number):
    """In each place, beside runs of other methods, seeds and sizes of clients; its scores and
    losses too."""
    changes = {"clients": 5, "optimizer": {"momentum": 0.5}}
    alone = vmapped(federation(FedProx(mu=0.5), **changes))
    scores = whole(alone)
    together = Together()
    others = [
        vmapped(federation(COMPANY[k % len(COMPANY)](), seed=k, **changes), together)
        for k in range(1, number + 1)
    ]
    ours = vmapped(federation(FedProx(mu=0.5), **changes), together)
    feds = [*others[: number // 2], ours, *others[number // 2 :]]
    ended = drive(together, [lambda fed=fed: whole(fed) for fed in feds])
    ours_among = ended[number // 2]
    assert isinstance(ours.worker.trainers[0].executor, Shared)
    assert all(map(torch.equal, models(alone), models(ours)))
    assert repr(ours_among) == repr(scores)
    assert not any(isinstance(result, Exception) for result in ended.values())


class Scaled(nn.Module):
    """A plain attribute, no buffer, or a frozen parameter is a factor of what the body gives."""

    def __init__(self, factor):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.factor, self.layers = factor, [self.body]
        self.out = nn.Linear(16, 10)

    def forward(self, x):
        factor = self.factor() if callable(self.factor) else self.factor
        return self.out(self.body(x) * (factor[0] if isinstance(factor, tuple) else factor))


FACTORS = {
    "number": lambda x: x,
    "tuple": lambda x: (x, 0),
    "tensor": lambda x: torch.tensor(x),
    "array": lambda x: np.float32(x),
    "frozen": lambda x: nn.Parameter(torch.tensor([x]), requires_grad=False),
    "function": lambda x: lambda: x,
}


@pytest.mark.sampled("number")
@pytest.mark.parametrize("kind", FACTORS)
def test_models_with_other_constants_train_beside_them(federation, kind):
    """By a difference that no test of gradients could see."""

    def made(seed, factor, together=None):
        net = partial(Scaled, FACTORS[kind](factor))
        return vmapped(federation(FedPer(), net, seed=seed), together)

    runs, together = [(0, 1.0), (1, 1.0003), (2, 1.0003)], Together()
    want = [repr(whole(made(*run))) for run in runs]
    feds = [made(*run, together) for run in runs]
    ended = drive(together, [lambda fed=fed: whole(fed) for fed in feds])
    assert [repr(ended[k]) for k in range(3)] == want
    executors = {fed.worker.trainers[0].executor.executor for fed in feds}
    assert len(executors) == (3 if kind == "function" else 2)


def test_a_run_that_fails_ends_alone(federation):
    """One diverges, one cannot read its data, one fails between two rounds; the others end as they
    would have."""
    want = whole(vmapped(federation(Local(), seed=7)))
    together = Together()
    diverges, unreadable, fails, fine = (
        vmapped(federation(Local(), seed=k), together) for k in (1, 2, 3, 7)
    )
    vectors = diverges.run.groups[0].initial
    vectors.fill_(torch.nan)

    def refuse(*args):
        raise OSError("No space left on device")

    def unread():
        unreadable.prepare()
        for c in range(unreadable.run.clients):
            data = unreadable.run.data.client(c, unreadable.run.device, unreadable.run.dtype)
            data.train.x = data.train.x[:1]  # its order asks for what is not there
        return [unreadable.round(t) for t in (1, 2)]

    fails.notify = refuse
    works = [lambda: whole(diverges), unread, lambda: whole(fails), lambda: whole(fine)]
    ended = drive(together, works)
    assert isinstance(ended[0], BadClient)
    assert "not finite" in str(ended[0])
    assert isinstance(ended[1], BadClient)
    assert "stage training" in str(ended[1])
    assert "No space left" in str(ended[2])
    assert repr(ended[3]) == repr(want)


def test_ctrl_c_ends_all_of_them(federation):
    together, closed = Together(), []

    def run(fed):
        try:
            whole(fed)
        finally:
            closed.append(fed)

    first, second = (vmapped(federation(Local(), seed=k), together) for k in range(2))

    def interrupt(*args):
        raise KeyboardInterrupt

    second.evaluator.after_aggregation = interrupt
    with pytest.raises(KeyboardInterrupt):
        drive(together, [lambda: run(first), lambda: run(second)])
    assert closed == [second, first]


@pytest.mark.parametrize("writes", [False, True])
def test_what_follows_from_shapes_is_made_once_where_nothing_writes(writes):
    """What is returned is new at every call: it may be written to."""

    def function(x):
        zeros, spare, inner = torch.zeros_like(x), torch.ones_like(x), torch.ones_like(x)
        if writes:
            spare.mul_(x)
            inner.mul_(x)
        turned = x.transpose(0, 1)
        again, twice = turned.transpose(1, 0), (turned * 2).transpose(0, 1).transpose(0, 1)
        onwards = x[None].transpose(0, 1).transpose(1, 2)
        return [
            zeros,
            torch.where(x > 0, x, 0.5),
            inner * 3,
            again @ turned,
            twice,
            spare,
            onwards + 1,
        ]

    replay = record(function, [torch.randn(3, 4)])
    for _ in range(3):
        x = torch.randn(3, 4)
        ours, theirs = replay(x), function(x)
        assert all(map(torch.equal, ours, theirs))
        for tensor in ours:
            tensor.fill_(7)
