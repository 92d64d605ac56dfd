"""What a hook changes on the way arrives, whoever brings the hook; a change that was not declared
is an error."""

from dataclasses import dataclass, replace

import pytest
import torch
from classes import KAPC, SCAFFOLD, FedAvg, Local
from refusals import refuses
from watching import global_model

from fl_lightning.callbacks.base import Transform
from fl_lightning.core import Objective, Phase, Slot
from fl_lightning.methods import Method, Traits


class Zeros(Transform):
    """Lets clients upload zeros."""

    changes_upload = True

    def on_upload(self, client, payload):
        payload.vector = torch.zeros_like(payload.vector)


class Undeclared(Zeros):
    changes_upload = False


@dataclass(frozen=True)
class SendsZeros(FedAvg):
    """FedAvg whose clients upload zeros."""

    traits = Traits(changes_upload=True)

    def upload(self, client, payload):
        sent = super().upload(client, payload)
        return replace(sent, vector=torch.zeros_like(sent.vector))


@dataclass(frozen=True)
class SendsLess(FedAvg):
    """FedAvg whose clients leave a block out, and do not say so."""

    def upload(self, client, payload):
        sent = super().upload(client, payload)
        sent.sent[0] = False
        return sent


@pytest.mark.parametrize(
    "method, callbacks", [(FedAvg(), [Zeros()]), (SendsZeros(), [])], ids=["hook", "method"]
)
def test_what_a_hook_or_a_method_uploads_arrives(federation, method, callbacks):
    fed = federation(method, callbacks=callbacks)
    fed.round(1)
    assert not global_model(fed).any()
    assert fed.run.policy.keeps_clients
    states = fed.run.states.values()
    assert all(s.vectors["model"].any() and not s.received["model"].any() for s in states)


def test_a_change_that_is_not_declared_is_an_error(federation):
    with refuses(r"Undeclared.changes_upload=False.* its on_upload changes the sent tensors"):
        federation(FedAvg(), callbacks=[Undeclared()]).round(1)
    with refuses(r"SendsLess.traits.changes_upload=False.* its upload changes the sent tensors"):
        federation(SendsLess()).round(1)

    class Less(Transform):
        def on_download(self, client, payload):
            payload.sent[0] = False

    with refuses(r"Less.changes_download=False.* its on_download changes the sent tensors"):
        federation(FedAvg(), callbacks=[Less()]).round(1)


def test_a_broadcast_that_leaves_blocks_out_says_so(federation):
    """Where clients own nothing, their memory is used again: what was left out would be another
    client's."""

    @dataclass(frozen=True)
    class Withholds(FedAvg):
        def broadcast(self, server):
            sent = super().broadcast(server)
            for payload in sent.values():
                payload.sent[0] = False
            return sent

    @dataclass(frozen=True)
    class Declared(Withholds):
        traits = Traits(changes_download=True)

    with refuses(
        r"Withholds.traits.changes_download=False.* its broadcast changes the sent tensors"
    ):
        federation(Withholds()).round(1)
    fed = federation(Declared(), optimizer={"lr": 0.0})
    fed.round(1), fed.round(2)
    assert torch.equal(global_model(fed), fed.run.groups[0].initial)


@pytest.mark.parametrize("asks", ["hook", "budget"])
def test_rounds_of_a_client_that_is_not_kept_are_no_silent_zero(federation, asks):
    seen = []

    @dataclass(frozen=True)
    class Counts(FedAvg):
        def phases(self, client, payload):
            if asks == "hook":
                seen.append(client.rounds)
            return [Phase(budget=1.0 if asks == "budget" else None)]

    @dataclass(frozen=True)
    class Declared(Counts):
        traits = Traits(client_memory=True)

    with refuses(r"Counts.traits.client_memory=False.* no client states are kept: set it to True"):
        federation(Counts()).round(1)
    fed = federation(Declared())
    losses = [fed.round(t).metrics.get("train_loss") for t in (1, 2)]
    assert losses[0] and (losses[1] is None if asks == "budget" else seen == [0] * 4 + [1] * 4)


@pytest.mark.parametrize("name", ["judge", "statistics", "newcomers"])
def test_a_trait_as_a_class_variable_is_refused(name):
    with pytest.raises(TypeError, match=rf"Own\.{name}: write traits = Traits\({name}=\.\.\.\)"):
        type("Own", (FedAvg,), {name: True})
    argument = {"__annotations__": {name: "int"}, name: 3}
    assert dataclass(frozen=True)(type("Own", (FedAvg,), argument))() is not None


def test_memory_that_is_not_declared_is_an_error(federation):
    """It would not be saved, where the run keeps no clients."""

    class Remembers(Transform):
        def init_client(self, run):
            return {"seen": torch.zeros(1)}

    with refuses(r"Remembers.client_memory=False.* its init_client returns tensors"):
        federation(FedAvg(), callbacks=[Remembers()]).round(1)


def test_hooks_that_only_look_cost_no_memory(federation):
    """The client's vector is the server's copy, and with FedAvg no vector outlives its round."""
    seen = []

    class Looks(Transform):
        def on_upload(self, client, payload):
            seen.append(client.id)

    fed = federation(KAPC(), callbacks=[Looks()])
    fed.round(1)
    assert all(s.received["model"] is s.vectors["model"] for s in fed.run.states.values())
    fed = federation(FedAvg(), callbacks=[Looks()])
    fed.round(1)
    assert not fed.run.states and not fed.run.policy.keeps_clients and seen == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("knows", [False, True])
def test_who_changes_the_model_alone_is_refused_beside_further_vectors(federation, knows):
    class Halves(Zeros):
        further_vectors = knows

    fed = federation(SCAFFOLD(), callbacks=[Halves()])
    if knows:
        fed.prepare()
        return
    with refuses(r"method='scaffold': .* callbacks\.halves changes the model alone"):
        fed.prepare()


@pytest.mark.parametrize(
    "name, hook",
    {"recieve": "receive", "phase": "phases", "agregate": "aggregate", "uplaod": "upload"}.items(),
)
def test_a_misspelt_hook_is_refused(name, hook):
    with pytest.raises(
        TypeError, match=rf"Own\.{name} would never be called: rename it to {hook},"
    ):
        type("Own", (FedAvg,), {name: lambda *args: None})
    base = type(
        "Own",
        (Method,),
        {f"_{name}": lambda *args: None, "similarity": lambda *args: None, name: 1.0},
    )
    type("Further", (base,), {name: lambda *args: None})  # its base knows it


def test_statistics_that_are_not_gathered_are_no_empty_dict(federation):
    @dataclass(frozen=True)
    class Told(FedAvg):
        def upload(self, client, payload):
            sent = super().upload(client, payload)
            sent.statistics["loss"] = client.fits[-1].loss
            return sent

        def aggregate(self, server):
            super().aggregate(server)
            assert list(server.statistics) == server.answered

    @dataclass(frozen=True)
    class Declared(Told):
        traits = Traits(statistics=True)

    with refuses(r"Told\.traits\.statistics=False.* use server\.statistics: set it to True"):
        federation(Told()).round(1)
    federation(Declared()).round(1)


@pytest.mark.parametrize("slots", [{}, {"own": Slot()}], ids=["unknown", "not exchanged"])
def test_a_vector_that_is_not_exchanged_is_not_uploaded(federation, slots):
    @dataclass(frozen=True)
    class Sends(FedAvg):
        def slots(self):
            return slots

        def upload(self, client, payload):
            return replace(super().upload(client, payload), vectors={"own": client["model"]})

    with refuses(r"Sends\.slots='own'.* its upload holds this vector: .* Slot\(exchanged=True\)"):
        federation(Sends(), on_bad_client="skip").round(1)


def test_memory_of_a_client_that_is_not_kept_is_not_written(federation):
    @dataclass(frozen=True)
    class Writes(FedAvg):
        def phases(self, client, payload):
            client.memory["seen"] = torch.ones(1)
            return [Phase()]

    class Notes(Transform):
        def on_upload(self, client, payload):
            client.memory["seen"] = torch.ones(1)

    @dataclass(frozen=True)
    class Declared(Writes):
        traits = Traits(client_memory=True)

    for who, fed in (
        ("Writes.traits", federation(Writes())),
        ("Notes", federation(FedAvg(), callbacks=[Notes()])),
    ):
        with refuses(rf"{who}\.client_memory=False.* client\.memory\['seen'\], which would be"):
            fed.round(1)
    fed = federation(Declared())
    fed.round(1)
    assert all("seen" in state.memory for state in fed.run.states.values())


def test_features_that_are_not_kept_are_not_looked_at(federation):
    def loss(module, batch):
        return module.model(batch[0]).square().mean() + module.features.square().mean()

    @dataclass(frozen=True)
    class Sees(FedAvg):
        def phases(self, client, payload):
            return [Phase(objective=Objective(loss=loss))]

    @dataclass(frozen=True)
    class Declared(Sees):
        traits = Traits(features=True)

    with refuses(r"Sees\.traits\.features=False.* uses module\.features: set it to True"):
        federation(Sees()).round(1)
    federation(Declared()).round(1)


@pytest.mark.parametrize("asks", ["item", "only"])
def test_the_only_group_of_several_is_asked_for(federation, asks):
    @dataclass(frozen=True)
    class Lone(Local):
        def aggregate(self, server):
            assert len(server["model"] if asks == "item" else server.only.initial)

    with refuses(r"model=\['plainnet', 'normnet'\].* Lone .* set Traits\(several=False\)"):
        federation(Lone(), net={"plain": 2, "norm": 2}).round(1)
    federation(Lone()).round(1)
