"""What the cards say of methods whose own test files leave it open: scores of copies, payloads,
bytes that add up."""

import pytest
import torch
from classes import FedAvg, FedProto, PFedMe
from every import method_of
from lightning import LightningModule
from nets import Small
from reckoning import batch_of
from refusals import refuses
from torch import nn
from watching import client_of

from fl_lightning.callbacks.base import Transform

# ---------------------------------------------------------------- HeurFedAMP, FedBN, pFedMe, FedPer


# ---------------------------------------------------------------- a user's own training step


class Counting(Small, LightningModule):
    """Notes by which numbers of batches its loss was asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def training_step(self, batch, batch_idx):
        self.asked.append(batch_idx)
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize(
    "method",
    [FedAvg(), FedProto(lam=1.0), PFedMe(inner_steps=1)],
    ids=["plain", "own loss", "own step"],
)
def test_it_is_told_which_batch_it_is(federation, method):
    """Under a loss and a step of the method's own, too; outside of training it is 0."""
    fed = federation(
        method,
        Counting,
        clients=2,
        rounds=2,
        batch_size=64,
        data={"fraction": 0.3},
        evaluation={"models": []},
    )
    model = fed.worker.trainers[0].module.model
    batches = [-(-n // 64) for n in fed.run.data.train_sizes]
    assert max(batches) > 1
    for t in (1, 2):
        model.asked.clear()
        fed.round(t)
        assert model.asked == [k for count in batches for k in range(count)]
    client = client_of(fed, 0)
    client.gradient(client["model"], batch_of(client, 8))
    assert model.asked[-1] == 0


@pytest.mark.parametrize("name", ["fedrod", "fedem", "dbe", "fedcp", "gpfl"])
def test_a_step_that_would_be_passed_by_is_refused(name):
    with refuses(rf"^model='Counting'.*{name} .* training_step"):
        method_of(name).build(Counting(), 10)
    method_of(name).build(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 10)


# ---------------------------------------------------------------- names of a client's memory


class Keeps(Transform):
    """Keeps a tensor by `name`."""

    client_memory = True

    def __init__(self, name: str):
        self.name = name

    def init_client(self, run):
        return {self.name: torch.zeros(1)}

    def on_upload(self, client, payload):
        client.memory[self.name] = client.memory[self.name] + 1


@pytest.mark.parametrize("names", [["optimizer.mine"], ["received.0"], ["a.b", "a.b"]])
def test_a_name_that_is_anothers_is_refused(federation, names):
    fed = federation(FedAvg(), callbacks=[Keeps(name) for name in names])
    with refuses(rf"^Keeps\.init_client='{names[0]}'"):
        fed.round(1)
    fed = federation(FedAvg(), callbacks=[Keeps("a.b"), Keeps("a")])
    fed.round(1)
    assert float(fed.run.states[0].memory["a.b"]) == float(fed.run.states[0].memory["a"]) == 1
