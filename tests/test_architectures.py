"""Several architectures in one federation: models are mixed within each, knowledge among all."""

import numpy as np
import pytest
import torch
from classes import KAPC, SCAFFOLD, FedAMP, FedAvg, FedProto, Local
from refusals import refuses

from fl_lightning.callbacks.base import Observer
from fl_lightning.callbacks.checkpoint import Checkpoint, restore

BOTH = {"plain": 2, "norm": 2}


def model(fed, client):
    """A client's own model."""
    return fed.run.states[client].vectors["model"]


def test_alone_each_trains_as_in_a_federation_of_its_own_architecture(federation):
    mixed, plain, norm = (federation(Local(), net=net) for net in (BOTH, "plain", "norm"))
    for fed in (mixed, plain, norm):
        fed.fit()
    assert all(torch.equal(model(mixed, c), model(plain, c)) for c in (0, 1))
    assert all(torch.equal(model(mixed, c), model(norm, c)) for c in (2, 3))
    assert model(mixed, 0).shape != model(mixed, 2).shape


def test_fedavg_averages_within_each_architecture(federation):
    uploads = {}

    class Watch(Observer):
        def on_client_end(self, run, client):
            uploads[client] = run.states[client].vectors["model"].double().clone()

    fed = federation(FedAvg(), net=BOTH, rounds=1, callbacks=[Watch()])
    record = fed.round(1)
    sizes = fed.run.data.train_sizes
    for group, members in zip(fed.run.groups, ((0, 1), (2, 3)), strict=True):
        total = sum(sizes[c] for c in members)
        mean = sum(sizes[c] / total * uploads[c] for c in members)
        torch.testing.assert_close(group.vectors["model"].double(), mean, rtol=0, atol=1e-6)
    weights = record.relation.rows[:, 0]
    assert record.relation.layers == ["model"] and weights.shape == (4, 4)
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-6)
    assert not weights[:2, 2:].any() and not weights[2:, :2].any() and (weights[:2, :2] > 0).all()


def test_prototypes_join_them_all(federation):
    fed = federation(FedProto(), net=BOTH, rounds=1)
    fed.round(1)
    told = fed.run.server.memory["means.known"]
    assert told.all()
    alone = federation(FedProto(), net={"plain": 4}, rounds=1)
    alone.round(1)
    assert not torch.equal(
        fed.run.server.memory["means.features"], alone.run.server.memory["means.features"]
    )


@pytest.mark.parametrize("method", [KAPC(), SCAFFOLD()], ids=["relation", "method"])
def test_what_mixes_everybody_wants_one_architecture(federation, method):
    with refuses(r"model=.*plainnet.*normnet.*one architecture"):
        federation(method, net=BOTH)


@pytest.mark.sampled("0.5-method2")
@pytest.mark.parametrize("method", [FedAvg(), Local(), FedProto(), FedAMP(alpha=0.5)])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_checkpoint_has_them_all(federation, tmp_path, method, participation):
    settings = {"net": BOTH, "participation": participation}
    whole = federation(method, rounds=3, **settings)
    whole.fit()
    begun = federation(method, rounds=1, callbacks=[Checkpoint()], **settings)
    begun.run.folder = tmp_path / "begun"
    begun.fit()
    resumed = federation(method, rounds=3, **settings)
    resumed.run.folder = begun.run.folder
    assert restore(resumed.run, begun.run.folder / "checkpoints") == 1
    resumed.fit()
    assert whole.run.states.keys() == resumed.run.states.keys()
    assert all(torch.equal(model(whole, c), model(resumed, c)) for c in whole.run.states)
    for one, other in zip(whole.run.groups, resumed.run.groups, strict=True):
        assert torch.equal(one.vectors["model"], other.vectors["model"])
    strange = federation(method, rounds=3, **{**settings, "net": {"plain": 1, "norm": 3}})
    with refuses("another model"):
        restore(strange.run, begun.run.folder / "checkpoints")
