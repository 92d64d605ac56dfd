"""Users' models that keep state of their own in buffers, and LightningModules that do more than a
training step."""

import pytest
import torch
from classes import FedAvg, FedDF, FedPer
from lightning import LightningModule
from nets import Small
from refusals import refuses
from torch import nn


class Keeping(Small, nn.Module):
    """Notes the mean of what it sees in a buffer of its own, in evaluation too."""

    anew, gone = False, False

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        mean = x.mean().detach()
        if self.gone:
            del self.seen
            return super().forward(x)
        if self.anew:
            self.seen = self.seen + mean
        else:
            self.seen += mean
        return super().forward(x * torch.ones_like(self.seen))


class Anew(Keeping):
    """Puts a new tensor into its place."""

    anew = True


class Gone(Keeping):
    """Removes it."""

    gone = True


class Lit(Small, LightningModule):
    """A LightningModule with a training step that takes a batch and its number."""

    def training_step(self, batch, batch_idx):
        return 2 * nn.functional.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("net", [Anew, Gone])
def test_a_buffer_that_is_assigned_anew_is_refused(federation, net, executor, clients):
    """It would pass from client to client, and no checkpoint would have it."""
    with refuses(r"^model='seen': the model assigns this buffer anew or removes it"):
        fed = federation(FedAvg(), net, clients=clients, fabric={"executor": executor})
        fed.prepare()
        fed.round(1)
        fed.round(2)


@pytest.mark.parametrize("method", [FedPer(), FedDF(samples=50, steps=2)], ids=["fedper", "feddf"])
def test_evaluation_leaves_the_first_buffers(federation, method):
    """Buffers of clients that have not yet trained, and of the global model, are copies."""
    data = {"public": "held_back"} if isinstance(method, FedDF) else {}
    fed = federation(
        method,
        Keeping,
        participation=0.5,
        data=data,
        evaluation={"models": ["before", "after", "global"]},
    )
    fed.prepare()
    fed.round(1)
    fed.evaluator.everyone()
    group = fed.run.groups[0]
    assert [float(b) for b in group.initial_buffers] == [0.0]
    kept = {c: float(state.buffers[0]) for c, state in fed.run.states.items()}
    # it begins from the server's model
    assert any(value > 0 for value in kept.values()) or isinstance(method, FedDF)
    fed.evaluator.everyone()
    assert kept == {c: float(state.buffers[0]) for c, state in fed.run.states.items()}


def test_a_model_with_a_float_buffer_trains_in_another_precision(federation):
    fed = federation(FedAvg(), Keeping, precision="bf16-true")
    fed.prepare()
    assert fed.round(1).metrics["train_loss"] > 0


HOOKS = {
    "on_train_batch_end": lambda self, outputs, batch, batch_idx: None,
    "optimizer_step": lambda self, *args: None,
    "on_after_batch_transfer": lambda self, batch, dataloader_idx: batch,
}


@pytest.mark.parametrize(
    "names", [["on_train_batch_end"], ["on_after_batch_transfer", "optimizer_step"]]
)
def test_hooks_that_would_not_be_called_are_refused(federation, names):
    hooked = type("Hooked", (Lit,), {name: HOOKS[name] for name in names})
    with refuses(rf"^model='Hooked': its {', '.join(names)} would not be called"):
        federation(FedAvg(), hooked)
    federation(FedAvg(), type("Judged", (Lit,), {"on_validation_epoch_end": lambda self: None}))


def test_manual_optimisation_is_refused(federation):
    class Manual(Lit):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with refuses(r"^model='Manual': its automatic_optimization is False"):
        federation(FedAvg(), Manual)


def test_a_step_may_go_without_the_batchs_number(federation):
    class Short(Lit):
        def training_step(self, batch):
            return super().training_step(batch, 0)

    losses = []
    for net in (Lit, Short):
        fed = federation(FedAvg(), net)
        fed.prepare()
        losses.append(fed.round(1).metrics["train_loss"])
    assert losses[0] == losses[1] > 0
