"""What a user's LightningModule reads of Lightning's state counts its client's training, or is
refused by name."""

import copy
import io

import pytest
import torch
from classes import FedAvg, PerFedAvg
from lightning import LightningModule
from nets import Small
from refusals import refuses
from torch import nn

from fl_lightning.training.module import Skipped
from fl_lightning.training.optimizers import FastSGD


class Lit(Small, LightningModule):
    """A network with a loss of its own, which `then` may change."""

    head = "out"

    def training_step(self, batch, batch_idx):
        return self.then(nn.functional.cross_entropy(self(batch[0]), batch[1]), batch_idx)

    def then(self, loss, batch_idx):
        return loss


class Forward(Lit):
    """Its forward pass depends on the epoch while it trains."""

    training_step = LightningModule.training_step

    def forward(self, x):
        factor = 1 + self.current_epoch if self.training else 1
        return super().forward(x) * factor


class Around(nn.Module):
    """A LightningModule within a plain network."""

    head = "net.out"

    def __init__(self):
        super().__init__()
        self.net = Forward()

    def forward(self, x):
        return self.net(x)


@pytest.fixture
def made(federation):
    """As `federation`, of a network class; or of `Lit` with what becomes of its loss."""

    def make(net, method=None, **changes):
        cls = net if isinstance(net, type) else type("Then", (Lit,), {"then": net})
        return federation(method or FedAvg(), cls, **changes)

    return make


def watching(seen, *names):
    """Notes the attributes `names` at each step."""

    def then(self, loss, batch_idx):
        values = []
        for name in names:
            value = self
            for part in name.split("."):
                value = getattr(value, part)
            values.append(value)
        seen.append(tuple(values))
        return loss

    return then


def test_epochs_and_steps_count_through_the_rounds(made):
    """Also where a round is the first that is seen: after a resume, and for a client that joins in
    late."""
    names = ("current_epoch", "global_step", "trainer.current_epoch", "trainer.global_step")
    seen = []
    fed = made(watching(seen, *names), clients=1, local_epochs=2, batch_size=512)
    fed.prepare()
    seen.clear()
    fed.round(1)
    per_epoch = len(seen) // 2
    assert per_epoch > 1
    fed.round(2)
    steps = range(4 * per_epoch)
    assert seen == [(step // per_epoch, step, step // per_epoch, step) for step in steps]
    late = []
    fed = made(watching(late, *names), clients=1, local_epochs=2, batch_size=512)
    fed.prepare()
    late.clear()
    fed.round(2)
    assert late == seen[2 * per_epoch :]


@pytest.mark.parametrize(
    "length, of_a_round, epochs",
    [
        ({"local_epochs": 2}, 6, 4),
        ({"local_epochs": 0.5}, 2, 2),
        ({"local_epochs": None, "local_steps": 5}, 5, 4),
    ],
)
def test_the_trainers_limits_are_those_of_the_run(made, length, of_a_round, epochs):
    names = (
        "max_steps",
        "estimated_stepping_batches",
        "num_training_batches",
        "max_epochs",
        "training",
    )
    seen = []
    fed = made(
        watching(seen, *(f"trainer.{name}" for name in names)), clients=1, batch_size=512, **length
    )
    fed.prepare()
    fed.round(1)
    total = 2 * of_a_round
    assert seen[-1] == (total, total, 3, epochs, True)


def test_a_client_trains_in_one_process(made):
    seen = []
    names = (
        "global_rank",
        "trainer.world_size",
        "trainer.is_global_zero",
        "device",
        "dtype",
        "fabric",
    )
    fed = made(watching(seen, *names), precision="64-true")
    fed.prepare()
    fed.round(1)
    assert set(seen) == {(0, 1, True, torch.device("cpu"), torch.float64, None)}


@pytest.mark.parametrize(
    "read, name",
    [
        (lambda self: self.optimizers(), r"self\.optimizers\(\)"),
        (lambda self: self.lr_schedulers(), r"self\.lr_schedulers\(\)"),
        (lambda self: self.manual_backward(torch.zeros(())), r"self\.manual_backward\(\)"),
        (lambda self: self.all_gather(torch.zeros(())), r"self\.all_gather\(\)"),
        (lambda self: self.local_rank, r"self\.trainer\.local_rank.*use self\.device"),
        (
            lambda self: self.trainer.strategy,
            r"self\.trainer\.strategy.*: self\.trainer has only .*max_epochs",
        ),
        (lambda self: self.trainer.callback_metrics, r"self\.trainer\.callback_metrics"),
        (lambda self: setattr(self.trainer, "should_stop", True), r"self\.trainer\.should_stop"),
    ],
)
def test_what_there_is_not_is_refused_by_name(made, read, name):
    def then(self, loss, batch_idx):
        read(self)
        return loss

    fed = made(then)
    fed.prepare()
    with refuses(rf"^model='Then': it reads {name}"):
        fed.round(1)


def test_counts_are_refused_outside_of_local_steps(made):
    class Evaluated(Lit):
        def forward(self, x):
            return super().forward(x) * (1 + self.current_epoch)

    fed = made(Evaluated)
    fed.prepare()
    with refuses(r"'Evaluated': it reads self\.current_epoch outside of local"):
        fed.round(1)


@pytest.mark.parametrize("net", [Forward, Around])
def test_a_forward_pass_that_reads_them_is_not_stacked(made, net, capsys):
    """And its numbers do not depend on the executor."""
    losses = []
    for executor in ("vmap", "loop"):
        fed = made(net, fabric={"executor": executor})
        fed.prepare()
        losses.append([fed.round(t).metrics["train_loss"] for t in (1, 2)])
    assert losses[0] == losses[1]
    assert "the model reads self.current_epoch" in capsys.readouterr().err


def test_none_takes_no_step(made, monkeypatch, capsys):
    steps = []
    step = FastSGD.step
    monkeypatch.setattr(
        FastSGD, "step", lambda *values: steps.append(values[1].detach()) or step(*values)
    )
    fed = made(
        lambda self, loss, batch_idx: loss if batch_idx == 1 else None, clients=1, batch_size=512
    )
    fed.prepare()
    metrics = fed.round(1).metrics
    assert len(steps) == 1 and metrics["train_loss"] == pytest.approx(float(steps[0]))
    assert (
        capsys.readouterr().err.count("the training_step of Then returned None: no step is taken")
        == 1
    )
    fed = made(lambda self, loss, batch_idx: None, clients=1)
    fed.prepare()
    fed.round(1)
    assert torch.equal(fed.run.groups[0].vectors["model"], fed.run.groups[0].initial)


def test_none_is_refused_where_the_loss_is_needed(made):
    fed = made(lambda self, loss, batch_idx: None, PerFedAvg())
    fed.prepare()
    with pytest.raises(Skipped, match=r"'Then': its training_step returned None.* PerFedAvg needs"):
        fed.round(1)


def test_a_loss_may_be_in_a_dict(made):
    losses = []
    for then in (
        Lit.then,
        lambda self, loss, k: {"loss": loss, "more": k},
        lambda self, loss, k: loss[None],
    ):
        fed = made(then)
        fed.prepare()
        losses.append(fed.round(1).metrics["train_loss"])
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize(
    "then, returned",
    [
        (lambda self, loss, k: {"out": loss}, "a dict without a loss"),
        (lambda self, loss, k: {"loss": None}, "a dict without a loss"),
        (lambda self, loss, k: (loss, loss), "tuple"),
        (lambda self, loss, k: loss.item(), "float"),
        (lambda self, loss, k: torch.zeros(()), "a loss that depends on no"),
        (lambda self, loss, k: torch.stack([loss, loss]), r"numbers of shape \(2,\)"),
    ],
)
def test_what_is_no_loss_is_refused(made, then, returned):
    fed = made(then)
    fed.prepare()
    with refuses(f"^model='Then': its training_step returned {returned}"):
        fed.round(1)


def test_hooks_that_are_not_called_are_named(made, capsys):
    class Whole(Lit):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

        def train_dataloader(self):
            return []

    made(Whole).prepare()
    loaders, optimizer = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("model:")
    ]
    assert loaders == "model: train_dataloader of Whole: not called, data come from data.source"
    assert optimizer.startswith(
        "model: configure_optimizers of Whole: not called, optimizer.name is sgd"
    )
    made(Whole, optimizer={"name": "module"}).prepare()
    assert "configure_optimizers" not in capsys.readouterr().err


def test_a_model_can_still_be_copied_and_pickled(made):
    model = made(Forward).worker.trainers[0].module.model
    twin = copy.deepcopy(model).eval()
    torch.save(model, io.BytesIO())
    assert torch.equal(twin(torch.ones(2, 1, 8, 8)), model.eval()(torch.ones(2, 1, 8, 8)))
