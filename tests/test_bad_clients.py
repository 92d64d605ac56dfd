"""A client that fails: named and fatal, or left as it was and left out, or tried again; never
half-received."""

import copy
import weakref
from dataclasses import replace

import pytest
import torch
from classes import APFL, KAPC, FedAlign, FedAvg, FedPer
from every import NAMES, method_of

from fl_lightning.callbacks.base import Transform
from fl_lightning.callbacks.compression import Quantize, TopK
from fl_lightning.callbacks.selection import LayerSelection
from fl_lightning.foundation.errors import BadClient, RunFailed

METHODS = [method_of(name) for name in NAMES if name != "partialpooling"]
"""That takes no images."""
PUBLIC = {"data": {"public": "held_back"}}
"""Data for any method: some distil on public ones."""


def name(method):
    return type(method).__name__


class Fault(Transform):
    """Client `client` does harm in the rounds of `at`, at most `times` times in each."""

    changes_upload = True

    def __init__(self, what, at, client=1, times=9):
        self.what, self.at, self.client, self.times = what, at, client, times
        self.count = {}

    def on_upload(self, client, payload):
        t = client.round
        self.count[t] = self.count.get(t, 0) + (client.id == self.client)
        if client.id == self.client and t in self.at and self.count[t] <= self.times:
            self.what(client, payload)


def breaks(client, payload):
    raise OSError("the line is dead\nand gone")


def turns_nan(client, payload):
    payload.vector = payload.vector.clone()
    payload.vector[3] = torch.nan


def loses_numbers(client, payload):
    payload.vector = payload.vector[:5]


def explodes(client, payload):
    client["model"].mul_(1e30).mul_(1e30)


FAULTS = {
    breaks: ("upload", "OSError: the line is dead (traceback in failure.txt)"),
    turns_nan: ("upload", "its upload is not finite; lower optimizer.lr"),
    loses_numbers: (
        "upload",
        "ValueError: its upload is torch.float32 of shape (5,), not torch.float32 of shape",
    ),
    explodes: ("training", "its model is not finite; lower optimizer.lr"),
}


def state(fed, client):
    return copy.deepcopy(fed.run.states.get(client))


def module(fed):
    """What clients are bound to."""
    return fed.worker.trainers[0].module


def models(fed):
    """The server's."""
    return list(fed.run.groups[0].vectors.values())


def same(a, b):
    """Whether two states agree bit for bit, in every field."""
    if a is None or b is None:
        return a is b
    tensors = list(zip(a.buffers, b.buffers, strict=True))
    for x, y in ((a.vectors, b.vectors), (a.received, b.received), (a.memory, b.memory)):
        if x.keys() != y.keys():
            return False
        tensors += [(x[k], y[k]) for k in x]
    return a.rounds == b.rounds and all(torch.equal(x, y) for x, y in tensors)


def numbers(metrics):
    return {k: v for k, v in metrics.items() if not k.startswith(("seconds", "memory"))}


# ---------------------------------------------------------------- stop


@pytest.mark.parametrize("what", FAULTS, ids=lambda f: f.__name__)
def test_stop_names_client_round_and_stage(federation, what):
    fed = federation(FedAvg(), callbacks=[Fault(what, {2})])
    fed.round(1)
    stage, reason = FAULTS[what]
    with pytest.raises(BadClient) as caught:
        fed.round(2)
    assert str(caught.value).startswith(f"client 1 failed in round 2, stage {stage}: {reason}")
    assert "\n" not in str(caught.value)
    if "traceback" in reason:
        assert "and gone" in (fed.run.folder / "failure.txt").read_text()


def test_the_stage_is_the_one_in_which_it_failed(federation, monkeypatch):
    def at(stage, **changes):
        with pytest.raises(
            BadClient, match=rf"client [01] failed in round 1, stage {stage}: "
        ) as caught:
            fed.round(1)
        assert caught.value.stage == stage

    fed = federation(FedAvg())
    module(fed).training_step = lambda batch, k: 1 / 0
    at("training")
    for asked in (None, ["global"]):
        fed = federation(FedAvg(), evaluation={"models": asked})
        with monkeypatch.context() as broken:
            broken.setattr(FedAvg, "outputs", lambda *_: 1 / 0)
            at("evaluation")
    fed = federation(FedAvg())
    monkeypatch.setattr(fed.run.data, "client", lambda *_: 1 / 0)
    at("data")
    fault = Fault(breaks, {1})
    fault.on_download = fault.on_upload  # type: ignore[method-assign]
    fed = federation(FedAvg(), callbacks=[fault])
    at("download")
    fed = federation(FedAvg())
    fed.run.data.client(0, "cpu", torch.float32).train.x.fill_(torch.nan)
    at("training")


# ---------------------------------------------------------------- skip


def vector_turns_nan(client, payload):
    client["personal"][3] = torch.nan


def memory_turns_nan(client, payload):
    client.memory["alpha"] = torch.tensor(torch.nan, dtype=torch.float64)


@pytest.mark.parametrize("what", [vector_turns_nan, memory_turns_nan], ids=lambda f: f.__name__)
def test_whatever_the_method_keeps_must_be_finite(federation, what):
    """Vectors and numbers that stay with the client would spoil its next rounds, and are in no
    upload."""
    fed = federation(APFL(), on_bad_client="skip", callbacks=[Fault(what, {2})])
    fed.round(1)
    before = state(fed, 1)
    [failure] = fed.round(2).failures
    assert (failure["client"], failure["stage"]) == (1, "training")
    assert failure["reason"] == "what else it keeps is not finite; lower optimizer.lr"
    assert same(before, state(fed, 1))


@pytest.mark.sampled("[FedAvg-breaks1")
@pytest.mark.parametrize(
    "method, what",
    [(FedAvg(), what) for what in FAULTS]
    + [(m, breaks) for m in METHODS if m.relation().is_global],
    ids=lambda x: getattr(x, "__name__", None) or name(x),
)
def test_a_skipped_client_is_as_if_it_had_not_been_drawn(federation, method, what):
    """With one shared model nothing but what it receives passes between clients: bit for bit, and
    in every figure."""
    if isinstance(method, FedAlign):
        # of this net's last block no channels can be taken
        method = replace(method, block="body.1")
    fed = federation(
        method, **PUBLIC, rounds=3, on_bad_client="skip", callbacks=[Fault(what, {1, 3})]
    )
    other = federation(method, **PUBLIC, rounds=3, callbacks=[Fault(breaks, set())])
    everyone = other.cohort(1)
    for t in (1, 2, 3):
        got, wanted = fed.round(t), other.round(t, [0, 2, 3] if t in (1, 3) else None)
        assert got.cohort == everyone
        assert numbers(got.metrics) == {"clients_failed": int(t != 2), **numbers(wanted.metrics)}
        assert got.clients == wanted.clients
        assert (
            got.traffic == wanted.traffic
        ).all() and got.relation.sources == wanted.relation.sources
        assert all(map(torch.equal, models(fed), models(other)))
        assert fed.run.states.keys() == other.run.states.keys()
        assert all(same(fed.run.states[c], other.run.states[c]) for c in fed.run.states)
    assert fed.run.server.uploaded == other.run.server.uploaded


@pytest.mark.sampled("explodes-KAPC")
@pytest.mark.sampled(
    "breaks-FedAvg",
    "explodes-KAPC",
    "breaks-Ditto",
    "breaks-FedRep",
    "explodes-KTPFL",
    "explodes-FedHKD",
)
@pytest.mark.parametrize("method", METHODS, ids=name)
@pytest.mark.parametrize("what", [breaks, explodes], ids=lambda f: f.__name__)
def test_a_skipped_client_keeps_its_last_good_state(federation, method, what):
    """Its own model, the server's copy, its buffers, what callbacks and the optimiser keep for
    it."""
    hung = [LayerSelection()] if method.relation().per_layer else [TopK(0.2)]
    optimizer = {"momentum": 0.9, "keep_state": True}
    fed = federation(
        method,
        **PUBLIC,
        net="norm",
        rounds=3,
        on_bad_client="skip",
        optimizer=optimizer,
        callbacks=[*hung, Fault(what, {2})],
    )
    for t in (1, 2, 3):
        before, bystander = state(fed, 1), state(fed, 0)
        record = fed.round(t)
        assert same(before, state(fed, 1)) == (t == 2)
        assert not same(bystander, state(fed, 0))
        failed = [(f["client"], f["outcome"]) for f in record.failures]
        assert failed == ([(1, "skipped")] if t == 2 else [])
        assert [row["client"] for row in record.clients] == ([0, 2, 3] if t == 2 else [0, 1, 2, 3])
        assert record.metrics["clients_failed"] == len(failed)


def test_a_client_that_never_works_has_no_state(federation, capsys):
    fed = federation(KAPC(), on_bad_client="skip")
    whole = fed.run.data.client

    def client(i, *args):
        return whole(i, *args) if i != 1 else 1 / 0

    fed.run.data.client = client  # type: ignore[method-assign]
    summary = fed.fit()
    assert 1 not in fed.run.states and fed.run.server.uploaded == {0, 2, 3}
    accuracies = summary["final_accuracies"]
    assert [c for c in range(4) if accuracies[c] != accuracies[c]] == [1]
    rest = [accuracies[c] for c in (0, 2, 3)]
    assert summary["final_mean_accuracy"] == pytest.approx(sum(rest) / 3)
    err = capsys.readouterr().err
    assert err.count("client 1 failed in round 2, stage data: ZeroDivisionError") == 1
    assert "stage evaluation: ZeroDivisionError" in err


def test_a_score_that_fails_after_aggregation_costs_the_score(federation):
    fed = federation(FedAvg(), on_bad_client="skip", evaluation={"models": ["global"]})
    plain = federation(FedAvg(), evaluation={"models": ["global"]})
    fed.run.data.client(1, "cpu", torch.float32).test.batches = lambda size: 1 / 0  # type: ignore[method-assign]
    record = fed.round(1)
    plain.round(1)
    assert [f["outcome"] for f in record.failures] == ["not judged"]
    assert record.metrics["clients_failed"] == 0 and "accuracy_global" not in record.clients[1]
    assert all(map(torch.equal, models(fed), models(plain)))


@pytest.mark.parametrize("policy", ["skip", "retry"])
def test_a_round_in_which_all_fail_ends_the_run(federation, policy):
    fed = federation(FedAvg(), on_bad_client=policy)
    fed.round(1)
    module(fed).training_step = lambda batch, k: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(
        RunFailed,
        match="every client of round 2 failed; the first: client 0 failed in round 2, stage",
    ):
        fed.round(2)


# ---------------------------------------------------------------- retry


@pytest.mark.sampled("breaks-KAPC")
@pytest.mark.parametrize("method", METHODS, ids=name)
@pytest.mark.parametrize("what", [breaks, explodes], ids=lambda f: f.__name__)
def test_a_fault_that_passes_leaves_no_trace(federation, method, what):
    """The second attempt begins where the first began and draws what it drew."""
    settings = {
        "net": "norm",
        "rounds": 3,
        "optimizer": {"momentum": 0.9, "keep_state": True},
    }
    hung = [LayerSelection()] if method.relation().per_layer else [Quantize()]
    fed = federation(
        method,
        **PUBLIC,
        on_bad_client="retry",
        callbacks=[*hung, Fault(what, {1, 2}, times=1)],
        **settings,
    )
    plain = federation(method, **PUBLIC, callbacks=[*hung, Fault(what, set())], **settings)
    for t in (1, 2, 3):
        got, wanted = fed.round(t), plain.round(t)
        assert [f["outcome"] for f in got.failures] == (["retried"] if t < 3 else [])
        assert numbers(got.metrics) == {"clients_failed": 0, **numbers(wanted.metrics)}
        assert all(same(fed.run.states[c], plain.run.states[c]) for c in range(4))


def test_a_fault_that_stays_is_skipped(federation):
    fault = Fault(turns_nan, {2})
    fed = federation(FedPer(), on_bad_client="retry", callbacks=[fault])
    skipping = federation(FedPer(), on_bad_client="skip", callbacks=[Fault(turns_nan, {2})])
    for t in (1, 2):
        record = fed.round(t)
        skipping.round(t)
    assert fault.count == {1: 1, 2: 2}
    assert [f["outcome"] for f in record.failures] == ["retried", "skipped"]
    assert record.metrics["clients_failed"] == 1
    assert all(map(torch.equal, models(fed), models(skipping)))


def test_a_second_attempt_has_the_memory_of_the_first(federation):
    """What the failed visit had made is gone when the next begins, or a full GPU would be full
    again."""
    leftovers = []

    def fills_the_memory(client, payload):
        large = torch.zeros(9)
        leftovers.append(weakref.ref(large))
        raise MemoryError

    def looks(client, payload):
        if client.id == 1 and leftovers:
            assert leftovers[0]() is None

    fault = Fault(fills_the_memory, {1}, times=1)
    fault.on_download = looks  # type: ignore[method-assign]
    fed = federation(FedAvg(), on_bad_client="retry", callbacks=[fault])
    assert [f["outcome"] for f in fed.round(1).failures] == ["retried"]
    assert len(leftovers) == 1


# ---------------------------------------------------------------- cost and precision


def test_a_second_attempt_is_sent_what_the_first_was(federation):
    """A transform has put another vector in the payload of the first."""
    fed, undisturbed = (
        federation(FedAvg(), on_bad_client="retry", callbacks=[Halves(n)]) for n in (1, 0)
    )
    assert [f["outcome"] for f in fed.round(1).failures] == ["retried"]
    assert not undisturbed.round(1).failures
    assert all(map(torch.equal, models(fed), models(undisturbed)))


class Halves(Fault):
    """Clients receive half of each number; client 1 breaks `times` times."""

    changes_download = True

    def __init__(self, times):
        super().__init__(breaks, {1}, times=times)

    def on_download(self, client, payload):
        payload.vector = payload.vector / 2
