"""Nothing leaves a client beyond its bound or without noise, for every method; wrong uses are
refused by name."""

import itertools
import re
from dataclasses import dataclass

import pytest
import torch
from classes import SCAFFOLD, FedAvg
from every import FEW, NAMES, method_of
from refusals import refuses

from fl_lightning.callbacks.checkpoint import Checkpoint, restore
from fl_lightning.callbacks.privacy import NOISE, UPLOADS, LocalPrivacy
from fl_lightning.callbacks.robust import NormBound
from fl_lightning.core.beside import Beside
from fl_lightning.foundation.rng import ENTROPY, unrepeatable
from fl_lightning.privacy.mechanism import kinds_of_run

REFUSED = ("crosskapc", "fedcac", "fedfomo", "fedora", "flayer", "ifca", "partialpooling")
BOUNDED = [name for name in NAMES if name not in REFUSED]


class Spy(NormBound):
    """Keeps what leaves each client, behind the noise, as vectors by kind."""

    further_vectors = True

    def __init__(self):
        super().__init__(1e30)
        self.kinds = []

    def on_upload(self, client, payload):
        if payload.sent.any():
            change = payload.vector - client.reference
            parts = [change[s.start : s.stop] for s in client.layout.segments(payload.sent)]
            self.kinds.append((client.id, client.round, "model", torch.cat(parts)))
        for slot, vector in payload.vectors.items():
            self.kinds.append((client.id, client.round, slot, vector.clone()))
        beside, tensors = client.run.method.beside(), payload.statistics | payload.extra
        names = [n for n in tensors if beside[n].values not in ("public", "classes")]
        for kind in dict.fromkeys(beside[n].kind for n in names):
            parts = [tensors[n].float().flatten() for n in names if beside[n].kind == kind]
            self.kinds.append((client.id, client.round, kind, torch.cat(parts)))


def quick(name):
    return method_of(name, **({"sigma": "0"} if name == "fedhkd" else {}))


def data_of(name):
    public = "samples" in FEW.get(name, {})
    return {"validation": 0.1} | ({"public": "held_back"} if public else {})


def net_of(name):
    return "residual" if name == "fedalign" else "plain"


# ---------------------------------------------------------------- bounds


@pytest.mark.sampled
@pytest.mark.parametrize("name", BOUNDED)
def test_no_upload_is_longer_than_its_clip(federation, name):
    """With next to no noise and a huge learning rate: every kind of every method."""
    spy = Spy()
    private = LocalPrivacy(clip=0.01, noise=1e-9)
    data = data_of(name)
    lr = 0.05 if name == "fedsalora" else 0.5  # a product of two factors diverges sooner
    fed = federation(
        quick(name), net_of(name), [private, spy], data, optimizer={"lr": lr}, rounds=2
    )
    fed.fit()
    beside = {b.kind: b.values for b in fed.run.method.beside().values()}
    assert {kind for *_, kind, _ in spy.kinds} == set(kinds_of_run(fed.run)) - {"counts"} | (
        {"counts"} & {kind for *_, kind, _ in spy.kinds}
    )
    for _, _, kind, x in spy.kinds:
        if beside.get(kind) not in ("shares", "covariance", "counts"):  # repaired
            assert float(x.double().norm()) <= 0.01 * 1.001 + 1e-5, kind
    if "model" in kinds_of_run(fed.run):
        assert (
            max(float(x.double().norm()) for *_, kind, x in spy.kinds if kind == "model") > 0.0099
        )


# ---------------------------------------------------------------- noise


def test_noise_has_its_variance_and_is_drawn_anew_for_each_client_round_and_kind(federation):
    """With lr 0 the model's change is 0, so that all that leaves is noise; SCAFFOLD's control
    variate too."""
    spy = Spy()
    private = LocalPrivacy(
        clip={"model": 0.5, "control": 0.25}, noise={"model": 2.0, "control": 3.0}
    )
    fed = federation(SCAFFOLD(), callbacks=[private, spy], optimizer={"lr": 0.0}, rounds=3)
    fed.fit()
    wanted = {"model": 1.0, "control": 0.75}
    parameters = fed.run.groups[0].layout.is_parameter
    columns = fed.run.groups[0].layout.segments(parameters)
    drawn = []
    for _, _, kind, x in spy.kinds:
        if kind == "control":
            x = torch.cat([x[s.start : s.stop] for s in columns])
        n = len(x)
        assert float(x.var()) / wanted[kind] ** 2 == pytest.approx(1, abs=6 * (2 / n) ** 0.5)
        assert abs(float(x.mean())) < 6 * wanted[kind] / n**0.5
        drawn.append(x / wanted[kind])
    assert len(drawn) == 4 * 3 * 2
    for x, y in itertools.combinations(drawn, 2):
        assert abs(float((x @ y) / len(x))) < 6 / len(x) ** 0.5


def test_noise_from_the_system_is_never_the_same(federation):
    def once(reproducible):
        spy = Spy()
        federation(
            FedAvg(),
            callbacks=[LocalPrivacy(clip=1.0, noise=1.0, reproducible=reproducible), spy],
            rounds=1,
        ).fit()
        return torch.cat([x for *_, x in spy.kinds])

    assert torch.equal(once(True), once(True))
    # single numbers of thousands may be alike by chance
    same = torch.isclose(once(False), once(False))
    assert same.float().mean() < 0.01


# ---------------------------------------------------------------- what is declared


# ---------------------------------------------------------------- epsilon of a run


def test_epsilon_counts_the_rounds_in_which_a_client_took_part(federation):
    from fl_lightning.privacy.accounting import Mechanism, epsilon

    fed = federation(
        FedAvg(), callbacks=[LocalPrivacy(clip=1.0, noise=2.0)], participation=0.5, rounds=5
    )
    fed.prepare()
    records = [fed.round(t) for t in range(1, 6)]
    taken = [0] * 4
    for record in records:
        fed.run.callbacks[0].on_round_end(fed.run, record)
        for row in record.clients:
            taken[int(row["client"])] += 1
    assert len(set(taken)) > 1
    last = {
        int(row["client"]): row["privacy_epsilon"] for record in records for row in record.clients
    }
    for client, times in enumerate(taken):
        if times:
            assert fed.run.states[client].memory["privacy.uploads"].tolist() == [times]
    summary = fed.run.callbacks[0].summarize(fed.run)
    assert (
        summary["privacy_epsilon"]
        == max(last.values())
        == epsilon([Mechanism(2.0, max(taken))], 1e-5)
    )
    assert summary["privacy_epsilon_replace_one"] == epsilon([Mechanism(1.0, max(taken))], 1e-5)


NOISY = "--callbacks.localprivacy.clip 1 --callbacks.localprivacy.noise 1"


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", REFUSED)
def test_methods_whose_uploads_cannot_be_bounded_are_refused_by_name(federation, name):
    fed = federation(quick(name), callbacks=[LocalPrivacy(clip=1.0, noise=1.0)], data=data_of(name))
    with refuses(rf"callbacks\.localprivacy='{name}'.*which clipping and noise cannot protect"):
        fed.prepare()


WRONG = {
    "noise 1": "clip: it must be given: noise without a bound",
    "clip 1": "noise=None.*exactly one of noise and epsilon_target",
    "clip 1 noise 1 epsilon_target 2": "noise=1.0.*exactly one of noise and epsilon_target",
    "clip 1 noise 0": "noise=0.0.*above 0: without noise there is no epsilon",
    "clip 0 noise 1": "clip=0.0.*above 0",
    "clip 1 noise 1 delta 0.01": r"delta=0.01.*one over the \d+ training samples",
    "clip 1 noise 1 delta 1": r"delta=1.0.*\(0, 1\)",
    "clip 1 epsilon_target 1e-9": "epsilon_target=1e-09.*no noise up to",
    "clip 1 epsilon_target 0": "epsilon_target=0.0.*above 0",
    "clip '{model: 1, step_norms: 1}' noise 1": "clip=.*also upload noise_norms, which .*unprotected",
    "clip '{model: 1, scores: 1}' noise 1": "clip='scores'.*published without noise",
    "clip '{model: 1, heads: 1}' noise 1": "clip='heads'.*clients upload nothing of this name; they upload model, step",
}


@pytest.mark.parametrize("words, says", WRONG.items())
def test_wrong_uses_are_one_line(words, says, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = re.sub(r"(\w+) ('.*?'|\S+)", r"--callbacks.localprivacy.\1 \2", words)
    line = refused(f"fit --method selfkapc --name x --loggers null {flags}")
    assert re.match(rf"callbacks\.localprivacy\.{says}", line), line


@pytest.mark.parametrize(
    "flags, says",
    {
        "--callbacks.quantize.bits 8": "callbacks.quantize.*after localprivacy",
        "--method kapc --callbacks.layerselection.mu null": "layerselection.client=True.*reveal its data",
        "--data.held_out_clients 0.25": "data.held_out_clients=0.25.*does not account",
        "--method fedhkd": "method.sigma=7.0.*set it to 0",
    }.items(),
)
def test_parts_that_tell_more_are_refused(flags, says, fl_train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = "--config kapc_exact_digits --loggers null --callbacks null --federation.clients 4"
    code, _, err = fl_train(f"fit --name x {base} {flags} {NOISY}")
    assert code == 2 and re.search(says, err), err


@pytest.mark.slow
def test_a_resumed_run_has_the_noise_that_it_began_with(fit, refused):
    target = "--callbacks.localprivacy.clip 1 --callbacks.localprivacy.epsilon_target 8"
    flags = "--method fedavg --callbacks.checkpoint.seconds 0 --federation.rounds 1"
    folder = fit("x", flags, target)
    before = {file: file.read_bytes() for file in folder.glob("*.csv")}
    again = "fit --name x --resume"
    assert "the run began with noise" in refused(f"{again} --federation.rounds 2")
    line = refused(f"{again} --callbacks.localprivacy.epsilon_target 9")
    assert "the run began with 8.0:" in line
    assert {file: file.read_bytes() for file in folder.glob("*.csv")} == before


@pytest.mark.sampled("pfedgraph")
@pytest.mark.parametrize(
    "method, judge", [("fedavg", "after"), ("fedavg", "before"), ("pfedgraph", "before")]
)
def test_an_upload_that_is_refused_has_been_spent(federation, method, judge):
    """The server has seen it, whatever it makes of it: three rounds are three noisy uploads of
    everybody."""

    @dataclass
    class Refuses(NormBound):
        """Every upload of client 0, and the second one of client 1."""

        def on_upload(self, client, payload):
            if client.id == 0 or (client.id, client.round) == (1, 2):
                super().on_upload(client, payload)

    callbacks = [LocalPrivacy(clip=1.0, noise=0.5), Refuses(bound=1e-6, action="refuse")]
    changes = {"rounds": 3, "on_bad_client": "skip", "evaluation": {"judge": judge}}
    fed = federation(method_of(method), callbacks=callbacks, **changes)
    fed.fit()
    counts = {c: state.memory[UPLOADS].tolist() for c, state in fed.run.states.items()}
    assert counts == {c: [3] for c in range(fed.run.clients)} and 0 not in fed.run.server.uploaded
    # client 0 never took part
    assert [fed.evaluator.final_model(c)[0] for c in (0, 1)] == ["before", judge]


@pytest.mark.parametrize("refused", [(1, 2), (0, 2)])
def test_what_a_refused_upload_has_spent_is_saved(federation, tmp_path, refused):
    """By a checkpoint, although the client's model and its rounds are those of the one before:
    epsilon counts it."""

    @dataclass
    class Refuses(NormBound):
        def on_upload(self, client, payload):
            if (client.id, client.round) == refused:
                super().on_upload(client, payload)

    def make():
        parts = [
            LocalPrivacy(clip=1.0, noise=0.5),
            Refuses(bound=1e-6, action="refuse"),
            Checkpoint(seconds=0),
        ]
        return federation(method_of("fedavg"), callbacks=parts, rounds=2, on_bad_client="skip")

    make().fit()
    again = make().run
    assert restore(again, tmp_path / "checkpoints") == 2
    assert [state.memory[UPLOADS].tolist() for state in again.states.values()] == [
        [2]
    ] * again.clients


def test_noise_that_nobody_can_repeat_has_more_than_32_bits():
    """torch keeps 32 bits of a seed: here what follows the first 32 bits of the entropy matters,
    too."""
    entropy = bytes(range(256)) * 10
    streams = [
        torch.randn(64, generator=unrepeatable(e))
        for e in (entropy[:ENTROPY], entropy[:ENTROPY], None, None)
    ]
    assert torch.equal(streams[0], streams[1]) and not torch.equal(streams[2], streams[3])
    other = torch.randn(2000, generator=unrepeatable(entropy[: ENTROPY - 1] + b"!"))
    assert not torch.equal(other, torch.randn(2000, generator=unrepeatable(entropy[:ENTROPY])))
    normal = torch.randn(100_000, generator=unrepeatable())
    assert abs(float(normal.mean())) < 0.02 and abs(float(normal.std()) - 1) < 0.02


@pytest.mark.parametrize(
    "declared, line",
    [
        ({}, "its upload holds age, which its `beside` does not declare"),
        (
            {"age": Beside("age", "classes", "classes")},
            "its `beside` declares classes but no class_counts",
        ),
    ],
)
def test_uploads_that_beside_does_not_cover_are_refused(federation, declared, line):
    class Tells(FedAvg):
        def beside(self):
            return declared

        def upload(self, client, payload):
            sent = super().upload(client, payload)
            sent.statistics["age"] = torch.ones(1)
            return sent

    fed = federation(Tells(), callbacks=[LocalPrivacy(clip=1.0, noise=1.0)])
    with refuses(line):
        fed.fit()
    assert NOISE in fed.run.states[0].memory
