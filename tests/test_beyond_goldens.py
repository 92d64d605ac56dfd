"""What golden runs of one architecture with every client at hand would not see."""

from dataclasses import dataclass, replace

import pytest
import torch
from classes import APFL, CFL, SCAFFOLD, Ditto, FedALA, FedAvg, FedBN, FedRep, FedRoD, PFedMe
from refusals import refuses
from watching import global_model

from fl_lightning.callbacks.compression import Quantize
from fl_lightning.callbacks.robust import Krum
from fl_lightning.core import Objective, Phase
from fl_lightning.engine.joining import join


def last(fed, rounds=1):
    """What the clients of the last of so many rounds came to."""
    fed.prepare()
    for t in range(1, rounds + 1):
        record = fed.round(t)
    return record.clients


def test_a_global_model_is_one_of_every_architecture(federation):
    with refuses("keeps no global model"):
        federation(FedBN(), net={"plain": 2, "norm": 2}, evaluation={"judge": "global"})
    rows = last(federation(FedBN(), net={"plain": 2, "norm": 2}))
    assert not any("accuracy_global" in row for row in rows)


@pytest.mark.parametrize("method, kind", [(FedAvg(), "global"), (CFL(0.5, 0.0, 1), "personal")])
def test_models_of_clusters_are_not_called_the_global_model(federation, method, kind):
    fed = federation(replace(method, eps1=100.0) if isinstance(method, CFL) else method)
    last(fed, 2)
    assert fed.evaluator.everyone()["final_model"] == kind


@pytest.mark.parametrize("method", [Ditto(), PFedMe(), APFL()], ids=lambda m: type(m).__name__)
def test_who_joins_begins_with_what_is_received_in_every_vector(federation, method):
    fed = federation(method)
    last(fed)
    model, _, scores = join(
        fed.worker, fed.run.data.client(0, fed.run.device, fed.run.dtype), False, 0
    )
    assert torch.equal(model, global_model(fed))
    assert set(scores) == {"accuracy_received", "loss"}


@pytest.mark.parametrize("method", [SCAFFOLD(), FedRoD(), Ditto()], ids=lambda m: type(m).__name__)
def test_who_joins_trains_as_the_method_says(federation, method):
    fed = federation(method)
    last(fed)
    before = [state.vectors["model"].clone() for state in fed.run.states.values()]
    model, *_ = join(fed.worker, fed.run.data.client(0, fed.run.device, fed.run.dtype), True, 1)
    assert model.isfinite().all() and not torch.equal(model, global_model(fed))
    assert all(
        torch.equal(a, s.vectors["model"])
        for a, s in zip(before, fed.run.states.values(), strict=True)
    )


def test_who_never_took_part_would_begin_with_the_global_model(federation):
    fed = federation(FedALA(), participation=0.5)
    last(fed)
    away = next(c for c in range(4) if c not in fed.run.states)
    kind, model, _ = fed.evaluator.final_model(away)
    assert kind == "before" and torch.equal(model, global_model(fed))


def test_a_change_counts_from_what_was_received(federation):
    grams = {}

    class Watched(CFL):
        def aggregate(self, server):
            group = server.only
            grams[server.run.config.federation.on_bad_client] = group.gram(
                server.answered, group.group.down_mask, "sent"
            ).full
            super().aggregate(server)

    for way in ("stop", "retry"):
        last(
            federation(Watched(), callbacks=[Quantize(direction="download")], on_bad_client=way), 2
        )
    assert torch.equal(grams["stop"], grams["retry"])


class OwnMean(FedAvg):
    """Its means are its own."""

    def aggregate(self, server):
        weights = torch.full((len(server.answered),), 1 / len(server.answered), dtype=torch.float64)
        server["model"] = server.only.mean(weights, server.answered, like=server["model"])


def test_a_robust_aggregator_that_is_passed_by_is_no_defence(federation):
    with refuses(r"method='ownmean': it does not use callbacks\.krum"):
        last(federation(OwnMean(), callbacks=[Krum(attackers=0)]))
    last(federation(OwnMean()))


def test_a_frozen_body_is_not_gone_back_through(federation):
    whole, parts, more = (
        last(federation(m))[0] for m in (FedAvg(), FedRep(head_epochs=1), FedRep(head_epochs=2))
    )
    assert parts["flops_forward"] == 2 * whole["flops_forward"]
    head = more["flops_backward"] - parts["flops_backward"]  # of one epoch of the classifier alone
    assert 0 < head < whole["flops_backward"] / 2
    assert parts["flops_backward"] <= whole["flops_backward"] + head


@dataclass(frozen=True)
class Passes(FedAvg):
    """A loss of its own, with so many passes."""

    count: int = 1

    def phases(self, client, payload):
        def loss(module, batch):
            return torch.stack([module.task_loss(batch) for _ in range(self.count)]).mean()

        return [Phase(objective=Objective(loss=loss))]


def test_every_pass_of_an_own_loss_counts(federation):
    plain, one, three = (last(federation(m))[0] for m in (FedAvg(), Passes(), Passes(3)))
    assert {k: one[k] for k in one if k.startswith("flops")} == {
        k: plain[k] for k in plain if k.startswith("flops")
    }
    assert three["flops_extra"] == pytest.approx(
        2 * (plain["flops_forward"] + plain["flops_backward"]), abs=2
    )


def test_the_loss_is_that_of_the_last_phase_that_took_a_step(federation):
    ditto, fedavg = (last(federation(m))[0] for m in (Ditto(personal_epochs=0), FedAvg()))
    assert ditto["train_loss"] == fedavg["train_loss"]
