"""Parameters that do not train: once on every rank, in no vector, upload or row, and in the run
folder once."""

from dataclasses import dataclass

import pytest
import torch
from classes import FedAvg, FedCP
from refusals import refuses
from safetensors.torch import load_file
from torch import nn

from fl_lightning.callbacks.checkpoint import Checkpoint, restore
from fl_lightning.core.layout import Layout
from fl_lightning.core.phase import Phase
from fl_lightning.engine.build import _check_same_start
from fl_lightning.engine.build import federation as build
from fl_lightning.foundation.errors import BadInput
from fl_lightning.models import frozen_in


class Backbone(nn.Module):
    """A body with every kind of normalisation, which is frozen, and a classifier that trains."""

    head = "out"

    def __init__(self, frozen: bool = True):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.BatchNorm2d(4, affine=False),
            nn.Flatten(),
        )
        self.norm = nn.BatchNorm1d(36)
        self.out = nn.Linear(36, 10)
        self.body.requires_grad_(not frozen)

    def forward(self, x):
        return self.out(self.norm(self.body(x)))


class Two(nn.Module):
    """Two linear layers without normalisation."""

    def __init__(self, frozen: bool):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.out = nn.Linear(16, 10)
        self.body.requires_grad_(not frozen)

    def forward(self, x):
        return self.out(self.body(x))


@pytest.fixture
def around(federation):
    """A federation around a model of one's own, drawn from `seed`."""

    def make(
        model,
        method=None,
        callbacks=(),
        seed=0,
        **changes,
    ):
        fed = federation(method, **changes)
        run, fabric = fed.run, fed.worker.trainers[0].fabric
        torch.manual_seed(seed)
        return build(
            fabric, run.config, run.data, [model().to(run.dtype)], run.method, callbacks, run.folder
        )

    return make


def kept(fed):
    return {name: t.detach().clone() for name, t in fed.run.groups[0].frozen.items()}


def test_what_is_frozen_is_no_block():
    model = Backbone()
    layout = Layout(model, "out", frozen_in(model))
    assert [b.name for b in layout.blocks] == [
        "norm.weight",
        "norm.bias",
        "out.weight",
        "out.bias",
        "norm.running_mean",
        "norm.running_var",
    ]
    assert layout.layers == ["out"] and layout.own_names == ["norm.num_batches_tracked"]
    assert layout.still == ["body.1", "body.3"]
    statistics = [
        f"body.{k}.{n}"
        for k in (1, 3)
        for n in ("running_mean", "running_var", "num_batches_tracked")
    ]
    assert layout.frozen == [
        "body.0.weight",
        "body.0.bias",
        "body.1.weight",
        "body.1.bias",
        *statistics,
    ]
    whole = Layout(model, "out")  # as ever, where nobody says what is frozen
    assert whole.frozen == [] and "body.0.weight" in [b.name for b in whole.blocks]


def test_a_normalisation_without_weights_in_a_body_that_trains_is_as_ever():
    model = Backbone(frozen=False)
    model.body[1].requires_grad_(False)  # type: ignore[operator]
    layout = Layout(model, "out", frozen_in(model))
    assert layout.still == ["body.1"]
    assert "body.3.running_mean" in [b.name for b in layout.blocks]


@dataclass(frozen=True)
class HeadAlone(FedAvg):
    """What a frozen body comes to, with the body in everybody's vectors."""

    def phases(self, client, payload):
        return [Phase(trains=client.mask(lambda b: b.head))]


def test_it_is_the_training_of_the_classifier_alone(around):
    """The same numbers as where the body lies in all vectors and no phase trains it; and fewer
    bytes."""
    whole, parts = around(lambda: Two(frozen=False), HeadAlone()), around(lambda: Two(frozen=True))
    rows = []
    for fed in (whole, parts):
        rows.append(fed.round(1).metrics)
        fed.round(2)
    group, other = whole.run.groups[0], parts.run.groups[0]
    head = {b.name: group.vectors["model"][b.start : b.stop] for b in group.layout.blocks if b.head}
    for block in other.layout.blocks:
        assert torch.equal(other.vectors["model"][block.start : block.stop], head[block.name])
    assert rows[0]["mean_accuracy"] == rows[1]["mean_accuracy"]
    assert rows[1]["upload_bytes"] == 4 * 4 * (16 * 10 + 10)
    assert rows[0]["upload_bytes"] == rows[1]["upload_bytes"] + 4 * 4 * (64 * 16 + 16)


def test_statistics_of_a_frozen_body_stay(around):
    """It is a function of the sample alone, in training too; the normalisation that trains is as
    ever."""
    fed = around(Backbone)
    before = kept(fed)
    fed.fit()
    model = fed.worker.trainers[0].module.model
    assert all(torch.equal(t, before[name]) for name, t in fed.run.groups[0].frozen.items())
    assert not model.train().body[1].training and model.norm.training
    x = torch.randn(5, 1, 8, 8)
    assert torch.equal(model.body(x)[:2], model.body(x[:2]))
    assert not torch.equal(fed.run.groups[0].vectors["model"], fed.run.groups[0].initial)


def test_batches_of_one_sample_suit_a_body_that_stands_still(around):
    class Frozen(Two):
        def __init__(self):
            super().__init__(frozen=True)
            self.body.append(nn.BatchNorm1d(16).requires_grad_(False))

    fed = around(Frozen, batch_size=1, rounds=1)
    assert not fed.run.groups[0].whole_last
    fed.fit()


def test_numbers_are_as_wide_as_those_of_vectors(around):
    fed = around(Backbone, precision="64-true", rounds=1)
    assert {t.dtype for t in fed.run.groups[0].frozen.values()} == {torch.float64, torch.int64}


def test_what_a_method_freezes_in_what_it_builds_is_every_clients(around):
    """FedCP's frozen classifier is received: it lies in vectors, whatever the user has frozen."""
    layout = around(lambda: Two(frozen=True), FedCP()).run.groups[0].layout
    assert "model.out.received.weight" in [b.name for b in layout.blocks]
    assert layout.frozen == ["model.body.1.weight", "model.body.1.bias"]


def test_the_run_folder_has_it_once(around, tmp_path):
    """A run that is taken up goes on with what was saved, not with what is drawn or read then."""
    fed = around(Backbone, callbacks=[Checkpoint(seconds=0)])
    before = kept(fed)
    fed.fit()
    folder = tmp_path / "checkpoints"
    initial = load_file(folder / "initial.safetensors")
    assert {name for name in initial if "frozen" in name} == {f"0.frozen.{name}" for name in before}
    rest = [f for f in folder.rglob("*.safetensors") if f.name != "initial.safetensors"]
    assert rest and not any("frozen" in name for f in rest for name in load_file(f))
    again = around(Backbone, seed=1)
    assert not torch.equal(kept(again)["body.0.weight"], before["body.0.weight"])
    restore(again.run, folder)
    assert all(torch.equal(t, before[name]) for name, t in again.run.groups[0].frozen.items())
    assert torch.equal(again.run.groups[0].initial, fed.run.groups[0].initial)


def test_a_checkpoint_of_another_frozen_part_is_refused(around, tmp_path):
    around(Backbone, callbacks=[Checkpoint(seconds=0)], rounds=1).fit()
    other = around(lambda: Backbone(frozen=False), rounds=1)
    with refuses("another model"):
        restore(other.run, tmp_path / "checkpoints")


def test_processes_with_other_weights_are_refused(around, monkeypatch):
    fed, digests = around(Backbone), []

    class Processes:
        size = 2

        def gather_objects(self, mine):
            digests.append(mine)
            return ["other" if len(digests) > 1 else mine, mine]

    monkeypatch.setattr(fed.run, "processes", Processes())
    _check_same_start(fed.run)
    with refuses(r"model='backbone'.*rank 1 has other weights than rank 0"):
        _check_same_start(fed.run)
    fed.run.groups[0].frozen["body.0.bias"].data += 1
    with pytest.raises(BadInput):
        _check_same_start(fed.run)
    assert digests[0] == digests[1] != digests[2]
