"""Executors train alike: the same batches and draws, the same numbers but for rounding, whoever
trains beside whom."""

import random
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from classes import KAPC, FedAvg, FedProx, Local
from every import BESIDE, NAMES, method_of
from reckoning import seeded
from refusals import refuses
from torch import nn
from torch.testing import assert_close

from fl_lightning.callbacks.base import Transform
from fl_lightning.configuration.config import DataConfig
from fl_lightning.core.payload import Payload
from fl_lightning.core.phase import Phase
from fl_lightning.data import prepare
from fl_lightning.data.part import ResidentPart
from fl_lightning.engine.build import federation as build
from fl_lightning.engine.phases import schedule_of
from fl_lightning.engine.trainer import choose_executors
from fl_lightning.foundation.errors import BadClient
from fl_lightning.foundation.log import logged_to, write_waiting
from fl_lightning.methods import Traits
from fl_lightning.models.cnn import CNN
from fl_lightning.storage.state import ClientState
from fl_lightning.training.executors import choice, vmap
from fl_lightning.training.executors.base import ExecutorSpec, LocalJob, Loop
from fl_lightning.training.executors.choice import make
from fl_lightning.training.executors.vmap import Vmap
from fl_lightning.training.schedule import Length


def convolutions():
    """Two of them, with pooling between."""
    return CNN((1, 8, 8), 10, channels=(4, 6), hidden=(8,), padding=2)


def first(fed):
    """Of the first architecture."""
    return fed.worker.trainers[0]


def spec_of(fed):
    run = fed.run
    return ExecutorSpec(
        run.config.optimizer,
        run.data.input_shape,
        run.data.num_classes,
        run.dtype,
        run.config.federation.batch_size,
        run.data.train_sizes,
        run.cohort_size,
        run.groups[0].whole_last,
    )


def parts_of(fed):
    """What every executor is made of."""
    trainer = first(fed)
    return trainer.fabric, trainer.module, trainer.optimizer


def loop_of(fed):
    return Loop(*parts_of(fed))


def made(fed, name):
    return make(name, *parts_of(fed), spec_of(fed))


def jobs_of(fed, clients=None, lr=0.05):
    """Two epochs for some clients, each from a model of its own, pulled (as the method says)
    towards another."""
    run, group = fed.run, fed.run.groups[0]
    layout, found = group.layout, []
    for c in range(run.clients) if clients is None else clients:
        draws = seeded(c)
        noise = torch.randn(2, layout.size, generator=draws, dtype=run.dtype) * 0.05
        for a, b in pairwise(layout.blocks):
            noise[:, a.stop : b.start] = 0  # what lies between tensors
        noise[:, layout.blocks[-1].stop :] = 0
        received = Payload(layout, group.initial + noise[0], group.down_mask.copy())
        received.sent[: c % 3] = False  # they do not receive the same tensors
        buffers = [b.clone() for b in group.initial_buffers]
        state = ClientState(c, {"model": group.initial + noise[1]}, buffers, {})
        client = fed.evaluator.client(c, state)
        method = run.method
        if isinstance(method, FedProx):
            method = replace(method, mu=method.mu * (0.5 + c))
        [phase] = method.phases(client, received)
        schedule = schedule_of(run, group, c, 1, "train", Length(epochs=2))
        job = LocalJob(
            client["model"], buffers, client.data.train, schedule, lr * (1 + c), phase.objective
        )
        job.keep, job.place = run.config.optimizer.keep_state, c
        found.append(job)
    return found


def trained(kind, jobs):
    results = []
    for job in jobs:
        job.place %= kind.at_once
    for k in range(0, len(jobs), kind.at_once):
        results += kind.train(jobs[k : k + kind.at_once])
    return jobs, results


def stacked(fed):
    return Vmap(*parts_of(fed), spec_of(fed))


SETTINGS = {
    "plain": {},
    "momentum": {"momentum": 0.9, "keep_state": True},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "clipped": {"clip_norm": 0.3, "weight_decay": 0.01},
    "clipped momentum": {"clip_norm": 0.3, "momentum": 0.5, "keep_state": True},
}


def check_agree(fed, make_jobs):
    """The loop and a stack come to the same, but for rounding, in two stretches: what was kept is
    taken up. Returns jobs and fits of the loop's first."""
    loop, stack = loop_of(fed), stacked(fed)
    want, found = make_jobs(), make_jobs()
    for stretch in range(2):
        fits, results = trained(loop, want)[1], trained(stack, found)[1]
        for a, b, x, y in zip(want, found, fits, results, strict=True):
            assert_close(b.vector, a.vector, rtol=0, atol=1e-10)
            assert float(y.loss) == pytest.approx(float(x.loss), abs=1e-10)
            assert float(y.coaching) == pytest.approx(float(x.coaching), abs=1e-10)
            assert (x.steps, x.samples) == (y.steps, y.samples)
            assert a.proximal_numbers == b.proximal_numbers
            assert a.kept.keys() == b.kept.keys()
            for key in a.kept:
                assert_close(b.kept[key], a.kept[key], rtol=0, atol=1e-10)
        if not stretch:
            first_stretch = [
                (replace(a, vector=a.vector.clone()), x) for a, x in zip(want, fits, strict=True)
            ]
    return first_stretch


def test_numbers_do_not_depend_on_who_trains_beside(federation):
    """Bit for bit: groups of other sizes and members, as other numbers of ranks make them."""
    for net in (None, convolutions()):
        fed = federation(FedProx(mu=0.1), clients=7, optimizer={"momentum": 0.9})
        if net is not None:
            fed = with_model(fed, net)
        stacked = Vmap(*parts_of(fed), spec_of(fed))
        vectors = [job.vector for job in trained(stacked, jobs_of(fed))[0]]
        for members in ([6], [3, 1], [5, 4, 2, 0], [6, 5, 4, 3, 2, 1, 0]):
            for c, job in zip(members, trained(stacked, jobs_of(fed, members))[0], strict=True):
                assert torch.equal(job.vector, vectors[c])


def with_model(fed, model):
    """The same federation with another model."""
    run = fed.run
    return build(
        first(fed).fabric, run.config, run.data, [model.to(run.dtype)], run.method, [], run.folder
    )


@pytest.mark.slow
def test_they_agree_on_convolutions_and_a_frozen_parameter(federation):
    optimizer = {"weight_decay": 0.1, "momentum": 0.5}
    plain = federation(FedProx(mu=0.5), precision="64-true", optimizer=optimizer)
    fed = with_model(plain, convolutions())
    check_agree(fed, partial(jobs_of, fed))
    model = first(plain).module.model
    model.body[1].bias.requires_grad_(False)
    fed = with_model(plain, model)
    assert "body.1.bias" not in [b.name for b in fed.run.groups[0].layout.blocks]
    before = model.body[1].bias.clone()
    check_agree(fed, partial(jobs_of, fed))
    assert torch.equal(model.body[1].bias, before)


# ---------------------------------------------------------------- which models and runs are fit


class Odd(nn.Module):
    """A small network with something odd in it."""

    def __init__(self, odd):
        super().__init__()
        self.odd = odd
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())
        self.spare = nn.Linear(2, 2)
        self.classifier = nn.Linear(8, 10)
        self.register_buffer("calls", torch.zeros(()))
        self.steps = 0

    def forward(self, x):
        out = self.body(x)
        if self.odd == "dropout":
            out = nn.functional.dropout(out, 0.5, self.training)
        if self.odd == "keeps":
            self.steps += 1
        if self.odd == "draws":
            out = out * float(np.random.rand())
        if self.odd == "draws in Python":
            out = out * random.random()
        if self.odd == "mixes":
            out = out - out.mean(0)
        if self.odd == "counts":
            self.calls += 1
        if self.odd == "asks" and float(out.detach().sum()) > 1e9:
            out = -out
        return self.classifier(out) + (
            0 if self.odd == "spare" else self.spare.weight.sum() + self.spare.bias.sum()
        )


REASONS = {
    "dropout": "draws random numbers",
    "mixes": "does not treat",
    "counts": "writes to its buffers",
    "asks": "torch.func cannot",
    "keeps": "changes its steps",
    "draws": "draws random numbers",
    "draws in Python": "draws random numbers",
}


@pytest.mark.parametrize("odd", REASONS)
def test_a_model_that_is_not_fit_is_left_to_the_loop(federation, odd):
    fed = with_model(federation(FedAvg()), Odd(odd))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    found, reason = made(fed, "vmap")
    assert isinstance(found, Loop)
    assert REASONS[odd] in (reason or "")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_parameter_that_the_loss_does_not_reach_stays(federation):
    """As in the loop, where it has no gradient: neither decay nor momentum moves it."""
    fed = federation(
        FedAvg(), precision="64-true", optimizer={"weight_decay": 0.1, "momentum": 0.5}
    )
    fed = with_model(fed, Odd("spare"))
    stacked, reason = made(fed, "vmap")
    assert isinstance(stacked, Vmap), reason
    spare = [b for b in fed.run.groups[0].layout.blocks if b.name.startswith("spare")]
    before, looped = jobs_of(fed), trained(loop_of(fed), jobs_of(fed))[0]
    assert len(spare) == 2
    for start, one, other in zip(before, looped, trained(stacked, jobs_of(fed))[0], strict=True):
        assert_close(other.vector, one.vector, rtol=0, atol=1e-10)
        assert all(
            torch.equal(other.vector[b.start : b.stop], start.vector[b.start : b.stop])
            for b in spare
        )
        assert not torch.equal(other.vector, start.vector)


def test_an_optimiser_that_is_not_fit(federation):
    executor, reason = made(federation(FedAvg(), optimizer={"name": "adam"}), "vmap")
    assert isinstance(executor, Loop) and "adam" in (reason or "")


# ---------------------------------------------------------------- in a federation


def run(fed):
    fed.prepare()
    return [fed.round(t) for t in range(1, fed.run.rounds + 1)]


def model_of(fed, client):
    return fed.run.states[client].vectors["model"]


def choose(fed):
    choose_executors(fed.run, fed.worker.trainers)


def named(fed, name):
    fed.run.config.fabric.executor = name
    return fed


def every_method():
    return [method_of(name, **BESIDE.get(name, {})) for name in NAMES]


PLAIN_STEPS = ("APFL", "FLAYER", "FedNova", "PFedMe", "PerFedAvg", "SCAFFOLD")
"""Methods that refuse an optimiser whose memory goes on from round to round."""


@pytest.mark.sampled("KAPC-0.5", "FedRep-0.5", "Ditto-1.0", "FedHKD-0.5")
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("method", every_method(), ids=lambda method: type(method).__name__)
def test_every_method_agrees_with_the_loop(federation, method, participation):
    """Fine-tuning, judging and what clients are left with between rounds included."""
    memory = {"momentum": 0.9, "keep_state": True}
    settings = {
        "precision": "64-true",
        "participation": participation,
        "data": prepare(DataConfig(validation=0.1, public="held_back"), 4, 0),
        "optimizer": {} if type(method).__name__ in PLAIN_STEPS else memory,
        "rounds": 3,
    }
    feds = [named(federation(method, **settings), name) for name in ("loop", "vmap")]
    loop, stacked = (run(fed) for fed in feds)
    assert first(feds[1]).executor.name == "vmap"
    for a, b in zip(loop, stacked, strict=True):
        assert (a.cohort, a.metrics.keys()) == (b.cohort, b.metrics.keys())
        for name in a.metrics:
            if "seconds" not in name and "memory" not in name:
                assert b.metrics[name] == pytest.approx(a.metrics[name], abs=1e-10, nan_ok=True), (
                    name
                )
        np.testing.assert_allclose(b.relation.rows, a.relation.rows, rtol=0, atol=1e-6)
    ours, theirs = (fed.run.states for fed in feds)
    assert ours.keys() == theirs.keys()
    for c, state in ours.items():
        assert_close(theirs[c].vectors, state.vectors, rtol=0, atol=1e-10)
        assert_close(theirs[c].received, state.received, rtol=0, atol=1e-10)
        assert_close(theirs[c].memory, state.memory, rtol=0, atol=1e-10, equal_nan=True)


def test_each_architecture_has_its_own(federation, capsys):
    fed = named(federation(Local(), net={"plain": 3, "norm": 2}, clients=5), "vmap")
    assert len(run(fed)[-1].clients) == 5
    assert [trainer.executor.name for trainer in fed.worker.trainers] == ["vmap", "loop"]
    assert "normnet trains in the loop" in capsys.readouterr().err


class Bursts(Transform):
    """Client `who` cannot receive, train or upload: in its first attempt, or always."""

    def __init__(self, who, hook, always):
        self.who, self.hook, self.always, self.done = who, hook, always, False

    def on_download(self, client, payload):
        if self.hook == "on_training" and client.id == self.who and (self.always or not self.done):
            client["model"].fill_(torch.nan)
            self.done = True
        self.burst("on_download", client)

    def on_upload(self, client, payload):
        self.burst("on_upload", client)

    def burst(self, hook, client):
        if hook == self.hook and client.id == self.who and (self.always or not self.done):
            self.done = True
            raise ArithmeticError("it burst")


@pytest.mark.parametrize("hook", ["on_download", "on_training", "on_upload"])
def test_one_that_fails_fails_alone(federation, hook):
    settings = {"clients": 5, "on_bad_client": "retry", "optimizer": {"momentum": 0.9}}
    fine = named(federation(Local(), **settings), "vmap")
    run(fine)
    for always in (False, True):
        fed = named(federation(Local(), callbacks=[Bursts(2, hook, always)], **settings), "vmap")
        record = run(fed)[0]
        assert [f["client"] for f in record.failures] == [2, 2][: 1 + always]
        assert [f["outcome"] for f in record.failures] == ["retried", "skipped"][: 1 + always]
        for c in range(5):
            if c != 2 or not always:
                assert torch.equal(model_of(fed, c), model_of(fine, c))
    fed = named(federation(Local(), callbacks=[Bursts(2, hook, True)], clients=5), "vmap")
    with pytest.raises(BadClient, match="client 2"):
        run(fed)


def test_a_batch_that_fails_is_trained_one_by_one_and_logged(federation, monkeypatch, tmp_path):
    fine, fed = (
        named(federation(Local(), clients=5, on_bad_client="skip"), "vmap") for _ in range(2)
    )
    run(fine)
    original = vmap.Feed

    def burst(job, size):
        if job.schedule.client == 3:
            raise ArithmeticError("it burst")
        return original(job, size)

    fed.prepare()
    monkeypatch.setattr(vmap, "Feed", burst)
    with logged_to(tmp_path / "log.txt"):
        record = fed.round(1)
        fed.round(2)
        write_waiting()
    assert "5 clients failed together" in (tmp_path / "log.txt").read_text()
    assert [(f["client"], f["stage"], f["outcome"]) for f in record.failures] == [
        (3, "training", "skipped")
    ]
    assert [torch.equal(model_of(fed, c), model_of(fine, c)) for c in (0, 1, 2, 4)] == [True] * 4


@pytest.mark.parametrize("fastest", ["loop", "vmap"])
def test_auto_changes_no_number_and_is_remembered(federation, monkeypatch, capsys, fastest):
    measured = choice.seconds_by_client

    def rigged(executors, jobs):
        found = measured(executors, jobs, repeats=1)
        return {name: 0.001 if name == fastest else 1.0 for name in found}

    monkeypatch.setattr(choice, "seconds_by_client", rigged)
    asked, auto, again = (federation(KAPC(), optimizer={"momentum": 0.9}) for _ in range(3))
    run(named(asked, fastest))
    run(named(auto, "auto"))
    assert first(auto).executor.name == fastest
    assert all(torch.equal(model_of(auto, c), model_of(asked, c)) for c in range(4))
    assert (
        f"fabric.executor auto: {fastest} for plainnet (a client: loop" in capsys.readouterr().err
    )
    monkeypatch.setattr(choice, "seconds_by_client", lambda *_: pytest.fail("it has been measured"))
    again.run.resumed_from = 1
    choose(named(again, "auto"))
    assert first(again).executor.name == fastest
    for damage in ("{", '{"executors": ["fast"]}'):
        (again.run.folder / "executor.json").write_text(damage)
        with refuses("damaged"):
            choose(again)


@pytest.mark.parametrize(
    "loop, vmap, best", [(1.0, 2.1, "loop"), (1.0, 0.95, "loop"), (1.0, 0.85, "vmap")]
)
def test_auto_takes_nothing_that_it_has_measured_to_be_slower(
    federation, monkeypatch, loop, vmap, best
):
    monkeypatch.setattr(choice, "_measured", lambda contest: {"loop": loop, "vmap": vmap})
    fed = named(federation(FedAvg()), "auto")
    choose(fed)
    assert first(fed).executor.name == best


# ----------------------------------------------- phases: masks, own rates, linear terms, own losses


def head_only(fed):
    return fed.run.groups[0].layout.mask(lambda b: b.name.startswith("out"))


def phase_jobs(fed, *, masks, keep=False, linear=True):
    """As `jobs_of`, each with what a phase of a method may ask for."""
    jobs = jobs_of(fed)
    for k, job in enumerate(jobs):
        draws = seeded(50 + k)
        slope = 0.1 * torch.randn(
            fed.run.groups[0].layout.size, generator=draws, dtype=fed.run.dtype
        )
        if linear:
            job.objective = replace(job.objective, linear=slope)
        job.keep = keep
        if masks == "alike" or (masks == "mixed" and k % 2):
            job.trains = head_only(fed)
    return jobs


@pytest.mark.sampled("mixed-", "none-plain")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("masks", ["none", "alike", "mixed"])
def test_phases_agree_with_the_loop(federation, masks, settings):
    """Pull, linear term, masks and own learning rates, all at once."""
    fed = federation(FedProx(mu=0.7), precision="64-true", optimizer=settings)
    keep = settings.get("keep_state", False)
    make_jobs = partial(phase_jobs, fed, masks=masks, keep=keep)
    fixed = fed.run.groups[0].layout.segments(~head_only(fed))
    for k, ((job, _), before) in enumerate(
        zip(check_agree(fed, make_jobs), make_jobs(), strict=True)
    ):
        masked = masks == "alike" or (masks == "mixed" and k % 2 == 1)
        pairs = [(job.vector[s.start : s.stop], before.vector[s.start : s.stop]) for s in fixed]
        assert all(torch.equal(*pair) for pair in pairs) == masked
        assert not torch.equal(job.vector, before.vector)
    assert all(p.requires_grad for p in first(fed).module.binding.parameters)


def test_momentum_of_what_does_not_train_waits(federation):
    """A stretch of everything, one of the head, one of everything: the body's momentum is taken up
    again."""
    fed = federation(FedAvg(), precision="64-true", optimizer={"momentum": 0.9, "keep_state": True})
    kinds = {"loop": loop_of(fed), "vmap": stacked(fed)}
    vectors = {}
    for name, kind in kinds.items():
        jobs = jobs_of(fed)
        trained(kind, jobs)
        body = [
            {k: v.clone() for k, v in job.kept.items() if k in ("momentum.0", "momentum.1")}
            for job in jobs
        ]
        for job in jobs:
            job.trains = head_only(fed)
        trained(kind, jobs)
        for job, before in zip(jobs, body, strict=True):
            assert all(torch.equal(job.kept[k], v) for k, v in before.items())
            job.trains = None
        vectors[name] = [job.vector for job in trained(kind, jobs)[0]]
    for a, b in zip(vectors["loop"], vectors["vmap"], strict=True):
        assert_close(b, a, rtol=0, atol=1e-10)


@pytest.mark.parametrize("other", [False, True], ids=["batches", "data"])
def test_batches_larger_than_the_federations_are_left_to_the_loop(federation, other):
    """Of a phase that asks for them, and of data with more samples than any client has."""

    @dataclass(frozen=True)
    class Larger(FedAvg):
        traits = Traits(client_memory=True)  # so that the clients' own models stay

        def phases(self, client, payload):
            own = client.data.train
            many = ResidentPart(torch.cat([own.x] * 9), torch.cat([own.y] * 9), None)
            return [Phase(part=many) if other else Phase(batch_size=48)]

    def after(name):
        fed = named(federation(Larger(), batch_size=4096 if other else 8), name)
        run(fed)
        assert first(fed).executor.name == name
        return [model_of(fed, c) for c in range(4)]

    assert all(map(torch.equal, after("vmap"), after("loop")))
