"""`optimizer.privacy`: no sample moves a step beyond its clip, epsilon counts the steps, the rest
is refused."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from classes import Ditto, FedAvg
from every import FEW, NAMES, method_of
from reckoning import seeded
from refusals import refuses
from torch import nn
from torch.testing import assert_close

from fl_lightning.callbacks.base import Transform
from fl_lightning.callbacks.privacy import INPUTS
from fl_lightning.callbacks.robust import NormBound
from fl_lightning.callbacks.stepprivacy import STEPS, StepPrivacy, most_steps, why_uncovered
from fl_lightning.core import Phase
from fl_lightning.privacy.accounting import Mechanism, epsilon, sampling_rate
from fl_lightning.privacy.steps import clipped_sum, noised, sampled
from fl_lightning.results.folder import RunFolder

COVERED = [name for name in NAMES if why_uncovered(method_of(name)) is None]
SERVER_ADAM = ("feddf", "pfeddf")
"""Their servers distil by Adam, which makes whole steps of differences in a gradient's last bits:
what clients receive in round 2 follows from round 1's uploads alone, but by how much the uploads
differed cannot be read off it."""
PRIVATE = {"clip": 1e-6, "noise": 1.0}
FLAGS = "--optimizer.privacy.clip 1 --optimizer.privacy.noise 1"


class Leaves(Transform):
    """Keeps all numbers that leave a client, or stay with it."""

    def __init__(self):
        self.numbers = {}

    def on_upload(self, client, payload):
        tensors = [
            payload.vector,
            *payload.vectors.values(),
            *payload.statistics.values(),
            *payload.extra.values(),
        ]
        tensors += [*client.state.vectors.values(), *client.memory.values()]
        kept = self.numbers.setdefault(client.id, [])
        kept.append(torch.cat([x.detach().double().flatten() for x in tensors]))


def settings(name):
    return {"validation": 0.1} | ({"public": "held_back"} if "samples" in FEW.get(name, {}) else {})


def private(federation, method, *more, given=PRIVATE, **keys):
    keys["optimizer"] = {"lr": 0.05, "privacy": given} | keys.get("optimizer", {})
    evaluation = {"judge": "before"} if method.traits.judge == "finetuned" else {}
    fed = federation(method, callbacks=[StepPrivacy(), *more], evaluation=evaluation, **keys)
    for transform in more:  # it only looks
        fed.run.callbacks.remove(transform)
    return fed


# ---------------------------------------------------------------- which methods


def test_as_many_are_covered_as_readme_says():
    assert len(COVERED) == 31


@pytest.mark.slow
@pytest.mark.parametrize("name", COVERED)
def test_nothing_of_a_client_tells_of_a_sample_beyond_its_clip(federation, name):
    """Another sample in one's place moves nothing that leaves or stays by more than the steps'
    clips allow."""
    seen, counted = [], []
    for change in (False, True):
        leaves = Leaves()
        fed = private(federation, method_of(name), leaves, data=settings(name), rounds=2)
        x, y = fed.run.data.client(0, fed.run.device, fed.run.dtype).train.tensors or ()
        if change:
            x[:4] = 30 * torch.randn(x[:4].shape, generator=seeded())
            y[:4] = (y[:4] + 1) % 10
        fed.fit()
        seen.append(torch.stack(leaves.numbers[0]))
        counted.append(int(fed.run.states[0].memory[STEPS]))
        phases, n = fed.run.method.private_phases(), len(y)
        assert not isinstance(phases, str)
        assert counted[-1] == 2 * most_steps(fed.run.config, phases, n)
    assert counted[0] == counted[1] > 0
    rounds = 1 if name in SERVER_ADAM else 2
    assert 0 < float((seen[0] - seen[1])[:rounds].abs().max()) < 1e-4


@pytest.mark.slow
def test_a_class_of_ones_own_must_say_what_it_makes_of_samples(federation):
    @dataclass(frozen=True)
    class Mine(FedAvg):
        pass

    @dataclass(frozen=True)
    class Says(FedAvg):
        def private_phases(self):
            return (None,)

    @dataclass(frozen=True)
    class Understates(Says):
        def phases(self, client, payload):
            return [Phase(), Phase()]

    @dataclass(frozen=True)
    class Halves(Says):
        def phases(self, client, payload):
            return [Phase(part=client.data.train.subset(torch.arange(5)))]

    private(federation, Says(), rounds=1).fit()
    for method, says in (
        (Mine(), "class of your own"),
        (Understates(), "allows .+ steps in a round"),
        (Halves(), "its own part"),
    ):
        with refuses(says):
            private(federation, method, rounds=1).fit()


# ---------------------------------------------------------------- a step


def test_the_sum_is_that_of_a_loop_over_samples(federation):
    fed = federation(FedAvg())
    module, data = (
        fed.run.groups[0].module,
        fed.run.data.client(0, fed.run.device, fed.run.dtype).train,
    )
    x, y = next(iter(data.batches(12)))
    x[0], x[1] = 50 * x[0], torch.nan
    trained, clip = list(module.binding.parameters), 1.5
    wanted, norms = [torch.zeros_like(p) for p in trained], []
    for k in range(len(y)):
        loss = nn.functional.cross_entropy(module.model(x[k : k + 1]), y[k : k + 1])
        parts = torch.autograd.grad(loss, trained)
        norms.append(float(torch.cat([g.flatten() for g in parts]).norm()))
        if np.isfinite(norms[-1]):
            wanted = [
                w + g * min(1.0, clip / norms[-1]) for w, g in zip(wanted, parts, strict=True)
            ]
    assert min(norms) < clip < np.nanmax(norms)
    sums, _ = clipped_sum(module, (x, y), clip)
    assert_close(sums, wanted, rtol=1e-4, atol=1e-6)
    alone, _ = clipped_sum(module, (x[:1], y[:1]), clip)
    assert float(torch.cat([g.flatten() for g in alone]).norm()) <= clip * (1 + 1e-6)


def test_next_to_no_noise_and_no_clip_are_the_plain_optimiser(federation):
    """On the same batches, all samples here; with momentum, weight decay, and a proximal term."""
    whole = {"batch_size": 10_000, "local_epochs": 3, "rounds": 2, "data": {"partition": "iid"}}
    optimizer = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    method = method_of("fedprox", mu="0.5")
    plain = federation(method, optimizer=optimizer, **whole)
    plain.fit()
    given = {"clip": 1e6, "noise": 1e-20}
    fed = private(federation, method, given=given, optimizer=optimizer, **whole)
    fed.fit()
    one, other = (f.run.groups[0].vectors["model"] for f in (plain, fed))
    assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert float((one - plain.run.groups[0].initial).norm()) > 0.1


def test_batches_are_poisson_samples(federation):
    part = federation(FedAvg()).run.data.client(0, torch.device("cpu"), torch.float32).train
    n, draws = len(part), [seeded(k) for k in range(400)]
    batches = [sampled(part, 8, generator) for generator in draws]
    sizes = np.array([0 if b is None else len(b[1]) for b in batches])
    q = sampling_rate(n, 8)
    assert abs(sizes.mean() - 8) < 5 * (n * q * (1 - q) / 400) ** 0.5
    assert sizes.var() == pytest.approx(n * q * (1 - q), rel=0.4)
    assert sampled(part, 10 * n, draws[0]) is not None
    assert len(sampled(part, 10 * n, draws[0])[1]) == n


def test_noise_has_its_size(federation):
    [x] = noised([torch.zeros(100_000)], 0.3, seeded())
    assert float(x.std()) == pytest.approx(0.3, rel=0.02)
    given = {"clip": 1e-9, "noise": 1e9}  # of standard deviation 1, over the 32 samples of a batch
    fed = private(
        federation,
        FedAvg(),
        given=given,
        optimizer={"lr": 1.0},
        rounds=1,
        local_epochs=None,
        local_steps=1,
    )
    leaves = Leaves()
    fed.worker.transforms = [*fed.worker.transforms, leaves]
    fed.fit()
    layout = fed.run.groups[0].layout
    segments, first = layout.segments(layout.is_parameter), fed.run.groups[0].initial.double()
    moved = [
        torch.cat([(v[0][: layout.size] - first)[s.start : s.stop] for s in segments])
        for v in leaves.numbers.values()
    ]
    for x in moved:
        assert float(x.std()) == pytest.approx(1 / 32, rel=0.1)
    assert (
        abs(float(nn.functional.cosine_similarity(moved[0], moved[1], 0)))
        < 6 / len(moved[0]) ** 0.5
    )


@pytest.mark.slow
def test_no_two_steps_share_batches_or_noise(federation, monkeypatch):
    """Ditto's two phases would take the same batches otherwise."""
    from fl_lightning.callbacks import stepprivacy

    keys = []
    real = stepprivacy.generator
    monkeypatch.setattr(stepprivacy, "generator", lambda *key: keys.append(key) or real(*key))
    private(federation, Ditto(), rounds=2).fit()
    assert len(keys) == len(set(keys)) > 20


# ---------------------------------------------------------------- epsilon


@pytest.mark.slow
def test_epsilon_is_of_the_steps_that_clients_have_taken(federation):
    fed = private(
        federation, Ditto(), given={"clip": 1.0, "noise": 2.0}, participation=0.5, rounds=4
    )
    summary = fed.fit()
    sizes, taken = (
        fed.run.data.train_sizes,
        {c: int(s.memory[STEPS]) for c, s in fed.run.states.items()},
    )
    single = [
        epsilon([Mechanism(2.0, n, sampling_rate(sizes[c], 32))], 1e-5) for c, n in taken.items()
    ]
    assert summary["privacy_epsilon"] == max(single)
    assert summary["privacy_covers"].endswith(f"validation and test samples, {INPUTS}")
    assert summary["privacy_unit"] == "sample" and summary["privacy_steps"] == max(taken.values())


@pytest.mark.slow
def test_steps_of_a_refused_upload_count(fit, monkeypatch):
    """The server has seen it: what accounts for the steps stands before what refuses uploads."""
    flags = f"--method fedavg {FLAGS} --federation.rounds 2 --federation.on_bad_client skip"
    refuses = "--callbacks.normbound.action refuse --callbacks.normbound.bound 1e6"

    def half(self, client, payload):
        if client.id % 2 == client.round % 2:
            raise ValueError("half of the clients of each round")

    plain = RunFolder(fit("plain", flags, refuses)).read_summary()
    monkeypatch.setattr(NormBound, "on_upload", half)
    refused = RunFolder(fit("refused", flags, refuses)).read_summary()
    assert plain is not None and refused is not None
    keys = ("privacy_steps", "privacy_epsilon")
    assert [refused[key] for key in keys] == [plain[key] for key in keys]


# ---------------------------------------------------------------- bad input

WRONG = {
    "noise 1": "clip: it must be given: noise without a bound",
    "clip 1": "noise=.*exactly one of noise and epsilon_target",
    "clip 1 noise 1 epsilon_target 2": "noise=1.0.*exactly one of noise and epsilon_target",
    "clip 1 noise 0": "noise=0.0.*without noise there is no epsilon",
    "clip -1 noise 1": "clip=-1.0.*above 0",
    "clip 1 noise 1 delta 0.1": r"delta=0.1.*one over the \d+ training samples",
    "clip 1 noise 1 delta 2": r"delta=2.0.*in \(0, 1\)",
    "clip 1 epsilon_target 0": "epsilon_target=0.0.*above 0",
    "clip 1 epsilon_target 1e-9": "epsilon_target=1e-09.*no noise up to",
    "clip much noise 1": "clip='much'.*it must be a number or null",
    "clip 1 nois 1": r"nois=.*did you mean optimizer\.privacy\.noise",
}
BESIDE = {
    "--method apfl": r"optimizer\.privacy='apfl'.*steps of its own",
    "--method selfkapc": r"optimizer\.privacy='selfkapc'.*halves of the samples",
    "--method fedbabu": r"evaluation\.judge='finetuned'.*fine-tuned copies",
    "--optimizer.name adam": r"optimizer\.name='adam'.*works with sgd only",
    "--model resnet18": r"model='resnet18'.*BatchNorm2d\) keeps statistics of samples",
    "--fabric.precision bf16-mixed": r"fabric\.precision='bf16-mixed'.*32-true or 64-true",
    "--data.held_out_clients 0.25": r"data\.held_out_clients=0.25.*does not account",
    "--callbacks.localprivacy.clip 1 --callbacks.localprivacy.noise 1": r"callbacks\.localprivacy.*"
    r".*keep one of them",
    "--callbacks.centralprivacy.clip 1 --callbacks.centralprivacy.noise 1": r"callbacks\.centralprivacy.*"
    r".*keep one of them",
    "--method kapc --callbacks.layerselection.mu null": r"layerselection.*no other callback may use "
    r"samples",
}


@pytest.fixture
def private_fit(refused, tmp_path, monkeypatch):
    """The one line that refuses a small run of FedAvg with further flags."""
    monkeypatch.chdir(tmp_path)
    base = "--config digits --loggers null --callbacks null"
    small = "--federation.clients 4 --federation.rounds 1"

    def run(flags):
        line = refused(f"fit --name x {base} {small} --method fedavg {flags}")
        assert not Path("runs/x/metrics.csv").exists()
        return line

    return run


@pytest.mark.parametrize("words, says", WRONG.items())
def test_wrong_uses_are_one_line(words, says, private_fit):
    line = private_fit(re.sub(r"(\w+) (\S+)", r"--optimizer.privacy.\1 \2", words))
    assert re.match(rf"optimizer\.privacy\.{says}", line), line


@pytest.mark.sampled("resnet18", "selfkapc")
@pytest.mark.parametrize("flags, says", BESIDE.items())
def test_parts_that_tell_more_are_refused(flags, says, private_fit):
    line = private_fit(f"{flags} {FLAGS}")
    assert re.search(says, line), line
