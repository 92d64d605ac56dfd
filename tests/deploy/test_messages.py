"""Odd and hostile messages: each is one line, its site has failed, and the run goes on as
`on_bad_client` says."""

import importlib
import shutil
import sys
import time
from collections import Counter
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fl_lightning.engine.visit import Visit
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.results.folder import RunFolder
from fl_lightning.sites import rehearsal, wire
from fl_lightning.sites.exchange import Exchange, Limits
from fl_lightning.sites.rehearsal import LocalTransport, differences, rehearse, simulate

from .test_equal import config_of

HUGE = 10 * 2**30
BAD = 1
"""The client whose site is odd."""
SKIP = ("--federation.on_bad_client", "skip")


class Odd(LocalTransport):
    """The answers of one site to messages of a `kind` arrive as `arrive` has it: of all its answers
    so far, and the message's name."""

    def push(self, address, message, ttl):
        name = super().push(address, message, ttl)
        if address == BAD and wire.unpack(message)["kind"] == self.kind:
            self.answers.append(self.waiting.pop()[1])
            self.waiting.extend(self.arrive(self.answers, name))
        return name


def odd(arrive, kind="visit"):
    def made(sites):
        transport = Odd(sites)
        transport.arrive, transport.kind, transport.answers = arrive, kind, []
        return transport

    return made


def changed(change, kind="visit"):
    """A transport on which each answer of one site has a `change`."""

    def arrive(answers, name):
        message = wire.unpack(answers[-1])
        change(message)
        return [(name, wire.pack(message))]

    return odd(arrive, kind)


def failures(run):
    """Round, client and outcome of each failure."""
    rows = RunFolder(run).read("failures")
    return [(row["round"], row["client"], row["outcome"]) for row in rows]


def _late(answers, name, first=[]):  # noqa: B006 (kept)
    """The first answer comes with the second."""
    if len(answers) == 1:
        first[:] = [name]
        return []
    earlier = [(first[0], answers[0])] if len(answers) == 2 else []
    return [*earlier, (name, answers[-1])]


ODD = {
    "lost": (lambda a, n: [(n, a[-1])] if len(a) > 1 else [], "did not answer within"),
    "late": (_late, "did not answer within"),
    "cut short": (lambda a, n: [(n, a[-1] if len(a) > 1 else a[-1][:100])], "it is cut short"),
    "too long": (
        lambda a, n: [(n, a[-1] if len(a) > 1 else HUGE)],
        f"it has {HUGE} bytes, more than the",
    ),
}
"""What becomes of a site's first answer, and the line."""


@pytest.mark.slow
@pytest.mark.parametrize("how", ODD)
def test_retry_comes_to_the_numbers_of_an_undisturbed_run(how, tmp_path, monkeypatch, capsys):
    """The site has trained: it sends what it has sent before, and trains nothing twice."""
    arrive, line = ODD[how]
    monkeypatch.setattr(rehearsal, "LIMITS", (10.0, 1.0, 10.0))
    config = config_of("ditto", "--federation.on_bad_client", "retry")
    run = rehearse(config, tmp_path, odd(arrive))
    assert line in capsys.readouterr().err
    assert failures(run) == [(1, BAD, "retried")]
    assert differences(simulate(config, tmp_path), run) == []


def test_a_message_that_is_not_answered_in_time_is_sent_again(tmp_path, monkeypatch):
    """Every second answer is lost, the others come twice: the same bytes, and nothing has failed."""
    monkeypatch.setattr(rehearsal, "LIMITS", (10.0, 10.0, 0.05))
    sent = []

    def arrive(answers, name):
        sent[:] = answers
        return [] if len(answers) % 2 else [(name, answers[-1])] * 2

    config = config_of("ditto")
    run = rehearse(config, tmp_path, odd(arrive))
    assert (sent[0], sent[2]) == (sent[1], sent[3]) and len(sent) == 4
    assert differences(simulate(config, tmp_path), run) == []


class Repeating(LocalTransport):
    """A centre that sends a visit again after the round's score, as one does that was killed."""

    def push(self, address, message, ttl):
        name = super().push(address, message, ttl)
        kind = wire.unpack(message)["kind"]
        if address == BAD and kind == "visit":
            self.visit = message
            self.answer = self.waiting[-1][1]
        if address == BAD and kind == "score":
            super().push(address, self.visit, ttl)
            assert self.waiting.pop()[1] == self.answer
        return name


@pytest.mark.slow
def test_a_visit_sent_again_after_its_score_trains_nothing_twice(tmp_path, monkeypatch):
    trained = Counter()
    upload = Visit.upload

    def counting(self):
        trained[self.t, self.id] += 1
        upload(self)

    config = config_of("fedavg")
    with monkeypatch.context() as patch:
        patch.setattr(Visit, "upload", counting)
        run = rehearse(config, tmp_path, Repeating)
    assert trained and set(trained.values()) == {1}
    assert differences(simulate(config, tmp_path), run) == []


# ---------------------------------------------------------------- hostile answers


def _payload(**parts):
    """Changes one part of the payload: `extra_features=...` is the tensor `features` of `extra`."""

    def change(message):
        for path, new in parts.items():
            kind, _, name = path.partition("_")
            payload = message["payload"]
            payload, name = (payload[kind], name.replace("_", ".")) if name else (payload, kind)
            payload[name] = new(payload.get(name, payload))

    return change


SHORT = _payload(model=lambda model: model[:-1])
HOSTILE = [
    ("fedavg", "visit", SHORT, "a vector has shape"),
    ("fedavg", "visit", _payload(model=lambda x: x * torch.nan), "its upload is not finite"),
    ("fedavg", "visit", _payload(model=lambda x: 3), "parts of it are missing"),
    ("fedavg", "visit", _payload(sent=lambda x: [99]), "names blocks that the model does not have"),
    ("fedavg", "visit", lambda m: m.update(round=m["round"] - 1), "answered another message"),
    (
        "fedavg",
        "visit",
        lambda m: m["payload"]["vectors"].update(personal=m["payload"]["model"]),
        "it holds blocks or vectors that the method does not upload",
    ),
    ("fedavg", "visit", lambda m: m.update(values={"accuracy": "all"}), "are not numbers"),
    ("fedavg", "visit", lambda m: m.pop("values"), "its scores are not numbers"),
    ("fedavg", "visit", lambda m: m["values"].update(client=0), "its scores are not numbers"),
    ("fedavg", "score", lambda m: m.pop("values"), "its scores are not numbers"),
    ("fedavg", "final", lambda m: m.pop("scores"), "does not say which model it has scored"),
    (
        "fedavg",
        "final",
        lambda m: m["scores"].update(kind="best"),
        "does not say which model it has scored",
    ),
    ("fpl", "visit", _payload(extra_features=lambda x: x[:, :-1]), "its features has shape"),
    (
        "fpl",
        "visit",
        _payload(statistics_classes=lambda x: x + 9),
        "it names classes that the federation does not have",
    ),
    (
        "fedpac",
        "visit",
        _payload(extra_moments_means=lambda x: x[:-1]),
        "a tensor does not have one row for each of its classes",
    ),
    ("fedmd", "visit", _payload(extra_predictions=lambda x: x[:-1]), "its predictions has shape"),
    (
        "fednova",
        "visit",
        _payload(statistics_steps=lambda x: x * torch.inf),
        "its upload is not finite",
    ),
]


@pytest.mark.sampled("fedavg-0")
@pytest.mark.parametrize(
    "method, kind, change, line",
    HOSTILE,
    ids=[f"{method}-{k}" for k, (method, *_) in enumerate(HOSTILE)],
)
def test_a_hostile_answer_costs_one_line_and_one_client(
    method,
    kind,
    change,
    line,
    tmp_path,
    capsys,
):
    run = rehearse(config_of(method, *SKIP), tmp_path, changed(change, kind))
    assert (run / "summary.json").is_file()
    shown = capsys.readouterr().err
    assert line in shown and f"client {BAD} failed in round" in shown
    if kind == "visit":
        assert failures(run) == [(1, BAD, "skipped"), (2, BAD, "skipped")]


def test_a_hostile_answer_ends_a_run_that_tolerates_none(tmp_path):
    line = f"client {BAD} failed in round 1, .*site 1.*a vector has shape"
    with pytest.raises(RunFailed, match=line):
        rehearse(config_of("fedavg"), tmp_path, changed(SHORT))


def test_a_replay_of_an_old_round_is_refused(tmp_path, capsys):
    replay = odd(lambda answers, name: [(name, answers[0])])
    assert failures(rehearse(config_of("fedavg", *SKIP), tmp_path, replay)) == [(2, BAD, "skipped")]
    assert "answered another message than round 2's" in capsys.readouterr().err


def refused_in(rounds):
    """A transport on which a site's answers in these rounds lack a number."""
    return changed(lambda message: SHORT(message) if message["round"] in rounds else None)


@pytest.mark.slow
def test_uploads_that_the_centre_refuses_count_in_epsilon(tmp_path):
    """They have left the site with noise of their own."""
    flags = "--federation.rounds 4 --callbacks.localprivacy.clip 1"
    flags += " --callbacks.localprivacy.noise 0.5"
    config = config_of("fedavg", *SKIP, *flags.split())
    rows = RunFolder(rehearse(config, tmp_path, refused_in({2, 3}))).read("clients")
    epsilons = {(row["round"], row["client"]): row["privacy_epsilon"] for row in rows}
    assert [t for t, c in epsilons if c == BAD] == [1, 4] and epsilons[4, BAD] == epsilons[4, 0]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [{1}, {2, 3}, {4}], ids=["first", "twice", "last"])
@pytest.mark.parametrize("method", ["ditto", "scaffold", "fedavg"])
def test_a_site_whose_answer_was_refused_goes_back(method, rounds, tmp_path, monkeypatch):
    """It has trained; the centre goes on without that: the numbers are those of a client that
    failed then."""
    config = config_of(method, *SKIP, "--federation.rounds", "4")
    run = rehearse(config, tmp_path, refused_in(rounds))
    assert failures(run) == [(t, BAD, "skipped") for t in sorted(rounds)]
    upload = Visit.upload

    def breaks(self):
        upload(self)
        if self.id == BAD and self.t in rounds:
            raise OSError

    monkeypatch.setattr(Visit, "upload", breaks)
    assert differences(simulate(config, tmp_path), run) == []


def test_a_site_that_has_lost_its_state_says_so(tmp_path, capsys):
    """Its folder is empty after the first round: it trains no other model in silence."""

    def emptied(sites):
        def arrive(answers, name):
            if len(answers) == 1:
                shutil.rmtree(sites[BAD].folder / "checkpoints")
            return [(name, answers[-1])]

        return odd(arrive)(sites)

    run = rehearse(config_of("ditto", *SKIP), tmp_path, emptied)
    assert (2, BAD, "skipped") in failures(run)
    assert "the site has the state after 0 visits, the centre counts 1" in capsys.readouterr().err


# ---------------------------------------------------------------- before the first round


class Moving(LocalTransport):
    """Sites that answer with who they are; the one at 3 is client 0's, started again after that at
    1 has died."""

    nodes, dead = (1, 2), 0

    def addresses(self):
        return list(self.nodes)

    def push(self, address, message, ttl):
        answer = wire.unpack(message)
        if answer["kind"] == "hello":
            facts = {"version": "x", "initial": "i", "fingerprint": "f", "sizes": [5, 0, 5]}
            answer |= {"site": {1: 0, 2: 1, 3: 0}[address], "name": "", **facts}
        name = str(time.monotonic_ns())
        if address != self.dead:
            self.waiting.append((name, wire.pack(answer)))
        return name

    def pause(self):
        time.sleep(0.005)


@pytest.mark.slow
def test_a_site_that_comes_back_at_another_address_is_taken_once_the_first_has_gone(
    capsys,
):
    transport = Moving([])
    exchange = Exchange(transport, "r", "f", Limits(60, 2, 0.05), tolerant=True)
    exchange.wait_for_sites(2)
    transport.dead = 1
    answered = []
    for t, nodes in enumerate([(1, 2, 3), (2, 3)], 1):
        transport.nodes = nodes
        messages = {c: exchange.pack({"kind": "visit", "round": t}, c) for c in (0, 1)}
        answers = exchange.ask(t, "visit", messages, 1)
        answered.append([c for c, answer in answers.items() if answer is not None])
    assert answered == [[1], [0, 1]]
    line = "both say that they are client 0; the first is kept while it is there"
    assert capsys.readouterr().err.count(line) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "hello, line",
    [
        (None, "no site for client 1 after 0 s"),
        (HUGE, f"the site at 1 cannot take part: it has {HUGE} bytes, more than the"),
        (b"\0" * 64, "the site at 1 cannot take part: it is not a message of this package"),
    ],
)
def test_a_site_that_says_nothing_of_itself(
    hello,
    line,
    tmp_path,
    monkeypatch,
    capsys,
):
    monkeypatch.setattr(rehearsal, "LIMITS", (0.3, 5.0, 5.0))
    silent = odd(lambda _, name: [] if hello is None else [(name, hello)], "hello")
    (tmp_path / "one").mkdir()
    with pytest.raises(RunFailed, match=line):
        rehearse(config_of("fedavg"), tmp_path / "one", silent)
    run = rehearse(config_of("fedavg", *SKIP), tmp_path, silent)
    shown = capsys.readouterr().err
    assert line in shown and "the run goes on without it" in shown
    assert {client for _, client, _ in failures(run)} == {BAD}


# --------------------------------------------------------- the cap, where Flower hands answers over


class Body:
    """Ten gigabytes that nobody may read."""

    def __len__(self):
        return HUGE


@pytest.fixture
def flower(monkeypatch):
    """`flower.py` with made-up parts of Flower, which is not in this environment."""
    parts = "Array ArrayRecord ConfigRecord Context Message RecordDict ClientApp Grid ServerApp"
    for name in ("flwr", "flwr.app", "flwr.clientapp", "flwr.serverapp"):
        module = ModuleType(name)
        module.__dict__.update(dict.fromkeys(parts.split(), object))
        monkeypatch.setitem(sys.modules, name, module)
    yield importlib.import_module("fl_lightning.sites.flower")
    sys.modules.pop("fl_lightning.sites.flower")


def transport_of(flower, pull, *waiting):
    transport = flower.GridTransport(SimpleNamespace(pull_messages=pull), "app")
    transport.waiting = [*waiting]
    return transport


def test_an_answer_of_ten_gigabytes_is_not_copied(flower):
    """Only its length is read; an answer beside it arrives."""
    bodies = {"a": Body(), "b": b"whole", "c": bytes(1001)}

    def pull(names):
        content = {"body": {"bytes": SimpleNamespace(data=bodies[names[0]])}}
        return [SimpleNamespace(content=content, has_error=bool)]

    transport = transport_of(flower, pull, *bodies)
    assert transport.pull(1000) == [("a", HUGE), ("b", b"whole"), ("c", 1001)]
    line = rf"^it has {HUGE} bytes, more than the 1000 that are accepted$"
    with pytest.raises(wire.Unreadable, match=line):
        wire.unpack(HUGE, 1000)


def test_an_answer_that_flower_takes_in_whole_costs_no_memory(flower):
    """Flower puts ten gigabytes together before it hands them over: that ends where four caps are
    reached."""
    transport = transport_of(
        flower, lambda names: [bytes(HUGE)] if names == ["a"] else [], "a", "b"
    )
    assert transport.pull(1000) == [("a", -1)]
    assert transport.waiting == ["b"]
    line = r"^it has far more than the 1000 bytes that are accepted$"
    with pytest.raises(wire.Unreadable, match=line):
        wire.unpack(-1, 1000)
    assert len(bytes(HUGE)) == HUGE  # the limit is gone
