"""Final scores are of the kind of model that the judge names, for every method; clients that have
none are named."""

import pytest
import torch
from classes import (
    APFL,
    CFL,
    FEDORA,
    KAPC,
    SCAFFOLD,
    Ditto,
    FedALA,
    FedAMP,
    FedAvg,
    FedBN,
    FedHKD,
    FedPer,
    FedProto,
    FedProx,
    FedRep,
    FedRoD,
    KTPFLModels,
    Local,
    PFedHN,
    PFedMe,
)
from refusals import refuses

from fl_lightning.callbacks.base import Observer
from fl_lightning.callbacks.checkpoint import Checkpoint, restore

SHARED = (
    FedAvg(),
    FedProx(mu=0.5),
    FedHKD(sigma=0.0, nu=0.0),
    SCAFFOLD(),
    CFL(first_round=0),
    PFedHN(),
)
"""They have a global model, or one for each client."""
BESIDE = (APFL(), Ditto(), FedRoD(), PFedMe())
"""Beside a global model, each client has one of its own."""
PARTS = (FedPer(), FedBN(), FedRep(head_epochs=1))
"""The server has one model for all, which is not all of a client's."""
OWN = (Local(), FedProto(predict="classifier"), FedAMP(), KAPC(start="own"), FEDORA())
"""A client begins with what it has."""
MIXES = (KAPC(start="server"), KTPFLModels(), FedALA())
"""A client begins with a mix of its own, which is made in the round."""

# Which column of the last round the final score of this kind equals: nobody has trained since, all
# have taken part.
SAME = [
    *(
        (method, judge, f"accuracy_{judge}")
        for method in SHARED + BESIDE
        for judge in ("after", "global", "finetuned")
    ),
    *(
        (method, judge, f"accuracy_{judge}")
        for method in PARTS + OWN + MIXES
        for judge in ("after", "finetuned")
    ),
    # Before training: a mix of its own is made in a round only: the last one that it began with
    # stands. What others would begin with is tested below.
    *((method, "before", "accuracy_before") for method in MIXES),
]


def judged(make, method, judge, **changes):
    net = "norm" if isinstance(method, FedBN | FedAvg | FedHKD) else "plain"
    data = {"validation": 0.2} if isinstance(method, FEDORA) else {}
    return make(method, net, data=data, evaluation={"judge": judge}, **changes)


@pytest.mark.sampled("KAPC")
@pytest.mark.parametrize(
    "method, judge, column", SAME, ids=lambda v: v if isinstance(v, str) else repr(v)
)
def test_final_scores_are_those_of_the_kind_that_the_judge_names(federation, method, judge, column):
    fed = judged(federation, method, judge)
    records = [fed.round(t) for t in (1, 2)]
    found = fed.evaluator.everyone()
    assert found["final_accuracies"] == pytest.approx(
        [row[column] for row in records[-1].clients], abs=1e-12
    )
    assert found["final_kinds"] == {judge: 4}
    assert found["final_models"] == [judge] * 4
    assert found["judge"] == judge


@pytest.mark.sampled
# prototypes move on
@pytest.mark.parametrize("method", [*SHARED, *BESIDE, *PARTS, *OWN, FedProto()], ids=repr)
def test_before_at_the_end_is_what_the_next_round_would_begin_with(federation, method):
    fed = judged(federation, method, "before")
    for t in (1, 2):
        fed.round(t)
    found = fed.evaluator.everyone()["final_accuracies"]
    further = fed.round(3)
    assert found == pytest.approx([row["accuracy_before"] for row in further.clients], abs=1e-12)


class Uploads(Observer):
    """A copy of every client's model as it was when its training had ended."""

    def __init__(self):
        self.models = {}

    def on_client_end(self, run, client):
        self.models[client] = run.states[client].vectors["model"].clone()


@pytest.mark.parametrize("judge", ["global", "after", "finetuned"])
def test_the_judge_changes_no_training_and_models_are_kept_for_after_alone(federation, judge):
    seen, plain = Uploads(), Uploads()
    changes = {"participation": 0.5, "rounds": 3}
    fed = judged(federation, FedAvg(), judge, callbacks=[seen], **changes)
    other = federation(FedAvg(), "norm", callbacks=[plain], **changes)
    pairs = [(fed.round(t), other.round(t)) for t in (1, 2, 3)]
    assert all(torch.equal(seen.models[c], model) for c, model in plain.models.items())
    assert all(a.metrics["memory_server_mib"] == b.metrics["memory_server_mib"] for a, b in pairs)
    assert fed.run.states.keys() == (seen.models.keys() if judge == "after" else set())
    for client, state in fed.run.states.items():
        assert torch.equal(state.vectors["model"], seen.models[client])


@pytest.mark.parametrize("method", [FedAvg(), FedPer(), KAPC(start="server")], ids=repr)
def test_a_client_that_never_took_part_is_scored_as_it_would_begin_and_named(federation, method):
    fed = judged(federation, method, "after", clients=8, participation=0.25, rounds=1)
    record = fed.round(1)
    found = fed.evaluator.everyone()
    assert [c for c, kind in enumerate(found["final_models"]) if kind == "after"] == record.cohort
    assert found["final_kinds"] == {"after": 2, "before": 6}
    known, initial = fed.run.groups[0].vectors["model"], fed.run.groups[0].initial
    layout = fed.run.groups[0].layout
    for client in set(range(8)) - set(record.cohort):
        kind, model, _ = fed.evaluator.final_model(client)
        assert kind == "before"
        if isinstance(method, FedAvg):
            assert torch.equal(model, known)
            assert not torch.equal(model, initial)
        if isinstance(method, KAPC):
            assert torch.equal(model, initial)
        if isinstance(method, FedPer):  # the shared body, and a head of the first model
            assert not torch.equal(model, initial)
            head = layout.segments(layout.mask(lambda block: block.head))
            assert all(
                torch.equal(model[s.start : s.stop], initial[s.start : s.stop]) for s in head
            )


@pytest.mark.parametrize(
    "method, judge", [(FedAvg(), "after"), (KAPC(start="server"), "before")], ids=repr
)
def test_what_the_judge_asks_for_survives_a_checkpoint_and_is_missed_where_it_was_not_kept(
    federation, method, judge
):
    fed = judged(federation, method, judge, callbacks=[saver := Checkpoint()])
    for t in (1, 2):
        saver.on_round_end(fed.run, fed.round(t))
    again = judged(federation, method, judge)
    restore(again.run, again.run.folder / "checkpoints")
    assert again.evaluator.everyone() == fed.evaluator.everyone()

    # by the method's own judge
    other = federation(method, fed_net(method), callbacks=[saver := Checkpoint()])
    for t in (1, 2):
        saver.on_round_end(other.run, other.round(t))
    asked = judged(federation, method, judge)
    restore(asked.run, asked.run.folder / "checkpoints")
    with refuses(r"evaluation\.judge.*has stored no such model"):
        asked.evaluator.everyone()


def fed_net(method):
    return "norm" if isinstance(method, FedAvg) else "plain"


def test_fine_tuning_begins_with_the_global_model_whatever_the_judge(federation):
    by = {}
    for judge in ("global", "after", "finetuned"):
        fed = federation(
            FedAvg(), evaluation={"judge": judge, "models": ["after", "global", "finetuned"]}
        )
        records = [fed.round(t) for t in (1, 2)]
        by[judge] = [row["accuracy_finetuned"] for row in records[-1].clients]
    assert by["global"] == by["after"] == by["finetuned"]


def test_fine_tuning_takes_the_learning_rate_of_the_round(federation):
    fed = judged(federation, FedAvg(), "finetuned", optimizer={"lr": 0.1, "lr_decay": 0.5})
    fed.round(1)
    seen = []
    fed.evaluator.trainers[0].loop.train = lambda jobs: seen.extend(job.lr for job in jobs) or []  # type: ignore
    fed.evaluator.finetune(2, 0)
    assert seen == [0.05]
