"""Which batches a stretch of training takes: steps and epochs are two ways to cut one sequence."""

import zlib

import numpy as np
import pytest
import torch
from refusals import refuses
from torch import nn
from watching import run_all

from fl_lightning.configuration.config import FederationConfig
from fl_lightning.engine.build import federation as build
from fl_lightning.engine.trainer import choose_executors
from fl_lightning.foundation.rng import FEW, key, keys
from fl_lightning.methods.local import Local


def test_one_of_the_two_is_set():
    assert FederationConfig().local_epochs == 5
    assert FederationConfig(local_steps=3).local_epochs is None
    both = FederationConfig(local_epochs=2, local_steps=3)
    with refuses(r"local_steps.*local_epochs is 2: one of them must be null"):
        both.validate()
    with refuses("local_steps"):
        FederationConfig(local_steps=-1).validate()


# ---------------------------------------------------------------- in a federation


def run(fed, name):
    fed.run.config.fabric.executor = name
    choose_executors(fed.run, fed.worker.trainers)
    run_all(fed)
    return fed


def models_of(fed, name):
    states = run(fed, name).run.states
    return [states[c].vectors["model"] for c in range(fed.run.clients)]


EVEN = {"data": {"partition": "iid", "fraction": 0.5}, "precision": "64-true"}


@pytest.mark.parametrize("name", ["loop", "vmap"])
def test_the_steps_of_an_epoch_are_an_epoch(federation, name):
    """Bit for bit; and any cut of the steps into rounds gives a client that hears nobody the same
    model."""
    one = federation(Local(), local_epochs=1, rounds=3, **EVEN)
    steps = {-(-n // 32) for n in one.run.data.train_sizes}
    assert len(steps) == 1  # all clients have as many
    [per_epoch] = steps
    want = models_of(one, name)
    for count, rounds in ((per_epoch, 3), (1, 3 * per_epoch), (3 * per_epoch, 1)):
        fed = federation(Local(), local_epochs=None, local_steps=count, rounds=rounds, **EVEN)
        assert all(map(torch.equal, want, models_of(fed, name))), count


def test_a_part_of_an_epoch(federation):
    """Half of the batches, rounded, and at least one: the operations say how many samples went
    through."""
    fed = federation(Local(), local_epochs=0.5, rounds=1)
    fed.prepare()
    sizes = fed.run.data.train_sizes
    taken = [max(1, round(np.ceil(n / 32) / 2)) for n in sizes]
    assert any(steps > 1 for steps in taken)
    forward = 2 * (64 * 16 + 16 * 10)
    want = [forward * min(n, 32 * steps) for n, steps in zip(sizes, taken, strict=True)]
    assert [row["flops_forward"] for row in fed.round(1).clients] == want


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))

    def forward(self, x):
        return self.out(x)


def test_dropout_does_not_depend_on_the_cut(federation):
    found = []
    for count, rounds in ((6, 1), (2, 3), (1, 6)):
        made = federation(Local(), local_epochs=None, local_steps=count, rounds=rounds, **EVEN)
        torch.manual_seed(0)
        model = Drops().double()
        fabric = made.worker.trainers[0].fabric
        fed = build(fabric, made.run.config, made.run.data, [model], Local(), [], made.run.folder)
        found.append(models_of(fed, "loop"))
    one, *others = found
    assert all(all(map(torch.equal, one, other)) for other in others)


@pytest.mark.parametrize("odd", [0, 2**32 - 1, 2**32, 2**70])
def test_many_keys_are_those_one_by_one(odd):
    draws = np.random.default_rng(0)
    for count in (0, 1, FEW, 40):
        rows = [(odd, "train order", *draws.integers(2**32, size=2).tolist()) for _ in range(count)]
        assert keys(rows) == [key(seed, purpose, *ids) for seed, purpose, *ids in rows]
    entropy = np.random.SeedSequence([3, zlib.crc32(b"x"), odd, 0])
    assert key(3, "x", odd, 0) == int(entropy.generate_state(1, np.uint64)[0] >> 1)
