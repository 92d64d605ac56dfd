"""Scores that depend on who is in the batch, or on chance."""

import random

import numpy as np
import pytest
import torch
from classes import FedAvg, FedPer
from lightning import LightningModule
from refusals import refuses
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    """Two layers and something between them."""

    head = "out"

    def __init__(self):
        super().__init__()
        self.hidden, self.between = nn.Linear(64, 16), self.make()
        self.out = nn.Linear(16, 10)

    def make(self):
        return nn.Identity()

    def forward(self, x):
        return self.out(self.middle(self.hidden(x.flatten(1))).relu())

    def middle(self, z):
        return self.between(z)


class NoStatistics(Net):
    """As in HeteroFL."""

    def make(self):
        return nn.BatchNorm1d(16, track_running_stats=False)


class Kept(Net):
    """Its BatchNorm never leaves training."""

    def make(self):
        return nn.BatchNorm1d(16)

    def train(self, mode=True):
        super().train(mode)
        self.between.train()
        return self


class Functional(Net):
    """Normalises by a function."""

    def middle(self, z):
        return functional.batch_norm(z, None, None, training=True)


class Centred(Net):
    """Takes the batch's mean away; its classifier begins with zeros, and would hide it."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.out.weight)

    def middle(self, z):
        return z - z.mean(0)


class Drops(Net):
    """Dropout that is always on, and draws of numpy's and Python's."""

    def middle(self, z):
        return functional.dropout(z) * float(np.random.uniform(0.5, 1)) + random.gauss(0, 0.1)


class DropsByBatch(Drops, NoStatistics):
    """Both."""

    def middle(self, z):
        return self.between(super().middle(z))


class Whole(Net):
    """Normalises each sample by itself, in several ways."""

    def make(self):
        return nn.Sequential(
            nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4), nn.GroupNorm(2, 4), nn.Flatten()
        )


class Counts(Net):
    """Counts its passes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def middle(self, z):
        self.passes += 1
        return z


class Mixing(LightningModule):
    """Mixes samples by numpy's and Python's generators."""

    head = "net.out"

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return functional.cross_entropy(
            self(x * np.random.uniform(0.5, 1) + random.gauss(0, 0.1)), y
        )


@pytest.mark.parametrize(
    "net, layer",
    [
        (NoStatistics, "between"),
        (Kept, "between"),
        (Functional, "its forward pass"),
        (Centred, "its forward pass"),
        (DropsByBatch, "between"),
    ],
)
def test_a_score_that_depends_on_the_batch_is_refused(federation, net, layer):
    with refuses(rf"^model=.*: (layer )?{layer} normalises by the scored batch; (set|treat)"):
        federation(FedAvg(), net).prepare()


@pytest.mark.parametrize("net", [Net, Whole])
def test_samples_by_themselves_pass_without_a_word(federation, net, capsys):
    federation(FedAvg(), net).prepare()
    assert capsys.readouterr().err == ""


def test_draws_in_evaluation_are_told(federation, capsys):
    fed = federation(FedAvg(), Drops, fabric={"executor": "vmap"})
    fed.prepare()
    lines = capsys.readouterr().err
    assert "model drops: it draws random numbers when it is scored" in lines
    assert fed.worker.trainers[0].executor.name == "loop"


def test_a_buffer_that_moves_is_told(federation, capsys):
    fed = federation(FedAvg(), Counts)
    fed.prepare()
    assert "its buffers passes change in training and are not averaged" in capsys.readouterr().err
    assert not fed.evaluator.cache.enabled
    federation(FedPer(), Counts).prepare()
    assert "a client keeps its own" in capsys.readouterr().err


def scores_of(fed, rounds):
    """What some rounds come to."""
    fed.prepare()
    names = (
        "mean_accuracy",
        "train_loss",
        "validation_accuracy",
        "mean_accuracy_before",
        "mean_accuracy_after",
    )
    return [[fed.round(t).metrics.get(name) for name in names] for t in range(1, rounds + 1)]


@pytest.mark.sampled("Drops")
@pytest.mark.parametrize("net", [Drops, Mixing])
def test_equal_seeds_equal_scores(federation, net):
    kinds = {"models": ["before", "after", "global"]}
    runs = []
    for process in (1, 2):
        torch.manual_seed(process)
        np.random.seed(process)
        random.seed(process)
        runs.append(scores_of(federation(FedAvg(), net, evaluation=kinds), 2))
    assert runs[0] == runs[1]
    other = scores_of(federation(FedAvg(), net, evaluation=kinds, seed=1), 2)
    assert runs[0] != other


def test_hooks_draw_what_follows_from_client_and_round(federation):
    """Whatever was trained or scored in between, and in whatever order."""
    seen = []

    class Drawing(FedAvg):
        def upload(self, client, payload):
            seen[-1][client.id] = float(np.random.rand()) + random.random() + float(torch.rand(()))
            return super().upload(client, payload)

    for kinds, order in (([], [0, 1, 2]), (["before", "after"], [2, 0])):
        seen.append({})
        fed = federation(Drawing(), Net, evaluation={"models": kinds})
        fed.prepare()
        fed.round(1, order)
    assert len(set(seen[0].values())) == 3
    assert all(seen[1][c] == seen[0][c] for c in (0, 2))
