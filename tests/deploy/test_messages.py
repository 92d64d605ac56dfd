"""Odd and hostile messages: each is one line, its site has failed, and the run goes on as
`on_bad_client` says."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

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
Answers = list[bytes]
Come = Callable[[Answers, str], list[Any]]


class Odd(LocalTransport):
    """The answers of one site to visits come as `come` has it: of all its answers so far, and the
    message's name."""

    come: Come

    def push(self, address: int, message: bytes, ttl: float) -> str:
        name = super().push(address, message, ttl)
        if address == BAD and wire.unpack(message)[0]["kind"] == "visit":
            self.answers.append(self.waiting.pop()[1])
            self.waiting.extend(self.come(self.answers, name))
        return name


def odd(come: Come) -> Callable[..., LocalTransport]:
    def made(sites: list[Any]) -> LocalTransport:
        transport = Odd(sites)
        transport.come, transport.answers = come, []
        return transport

    return made


def _late(answers: Answers, name: str, first: list[str] = []) -> list[Any]:  # noqa: B006 (it is what is kept)
    """The first answer comes with the second."""
    if len(answers) == 1:
        first[:] = [name]
        return []
    return (
        [(first[0], answers[0]), (name, answers[-1])]
        if len(answers) == 2
        else [(name, answers[-1])]
    )


ODD: dict[str, tuple[Come, str]] = {
    "lost": (lambda a, n: [(n, a[-1])] if len(a) > 1 else [], "did not answer within"),
    "late": (_late, "did not answer within"),
    "cut short": (lambda a, n: [(n, a[-1] if len(a) > 1 else a[-1][:100])], "it is cut short"),
    "too long": (
        lambda a, n: [(n, a[-1] if len(a) > 1 else HUGE)],
        f"it has {HUGE} bytes, more than the",
    ),
}
"""What becomes of a site's first answer, and the line."""


@pytest.mark.sampled("late", "too long")
@pytest.mark.parametrize("how", ODD)
def test_retry_comes_to_the_numbers_of_an_undisturbed_run(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The site has trained: it sends what it has sent before, and trains nothing twice."""
    come, line = ODD[how]
    monkeypatch.setattr(rehearsal, "LIMITS", (10.0, 1.0, 10.0))
    config = config_of("ditto", "--federation.on_bad_client", "retry")
    run = rehearse(config, tmp_path, odd(come))
    assert line in capsys.readouterr().err
    assert [(row["client"], row["outcome"]) for row in RunFolder(run).read("failures")] == [
        (BAD, "retried")
    ]
    assert differences(simulate(config, tmp_path), run) == []


def test_a_message_that_is_not_answered_in_time_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is lost: the site gives the same bytes again, and nothing has failed."""
    monkeypatch.setattr(rehearsal, "LIMITS", (10.0, 10.0, 0.05))
    transports: list[Any] = []

    def keep(sites: list[Any]) -> LocalTransport:
        transports.append(odd(lambda a, n: [] if len(a) == 1 else [(n, a[-1])])(sites))
        return transports[0]

    config = config_of("ditto")
    run = rehearse(config, tmp_path, keep)
    first, second, *_ = transports[0].answers
    assert first == second
    assert differences(simulate(config, tmp_path), run) == []


# ---------------------------------------------------------------- hostile answers


def _tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def of(answer: bytes) -> bytes:
        header, tensors = wire.unpack(answer)
        change(tensors)
        return wire.pack(header, tensors)

    return of


HOSTILE = [
    (
        "fpl",
        _tensors(lambda t: t.update({"extra.features": t["extra.features"][:, :-1].clone()})),
        "its features has shape",
    ),
    (
        "fpl",
        _tensors(lambda t: t.update({"statistics.classes": t["statistics.classes"] + 9})),
        "it names classes that the federation does not have",
    ),
    (
        "fedpac",
        _tensors(
            lambda t: t.update({"extra.moments.means": t["extra.moments.means"][:-1].clone()})
        ),
        "it has not one row for each of its classes",
    ),
    (
        "fedmd",
        _tensors(lambda t: t.update({"extra.predictions": t["extra.predictions"][:-1].clone()})),
        "its predictions has shape",
    ),
    (
        "fednova",
        _tensors(lambda t: t.update({"statistics.steps": torch.tensor([torch.inf])})),
        "its upload is not finite",
    ),
]


@pytest.mark.sampled("fpl-0", "fedpac-2")
@pytest.mark.parametrize(
    ("method", "change", "line"), HOSTILE, ids=[f"{m}-{k}" for k, (m, _, _) in enumerate(HOSTILE)]
)
def test_what_comes_beside_vectors_is_looked_at(
    method: str,
    change: Callable[[bytes], bytes],
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = config_of(method, "--federation.on_bad_client", "skip")
    run = rehearse(config, tmp_path, odd(lambda answers, name: [(name, change(answers[-1]))]))
    assert [(row["client"], row["outcome"]) for row in RunFolder(run).read("failures")] == [
        (BAD, "skipped")
    ] * 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "other", "line"),
    [
        ("fedavg", "scaffold", "it holds what the method does not upload"),
        ("scaffold", "fedavg", "blocks or vectors are missing that the method uploads"),
        ("fednova", "fedavg", "its steps is missing"),
        ("fedavg", "fedper", "blocks or vectors are missing that the method uploads"),
    ],
)
def test_another_methods_payload_is_refused(
    method: str, other: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a real site of another method sends in the same round of the same model."""
    theirs: dict[int, bytes] = {}

    def keep(answers: Answers, name: str) -> list[Any]:
        theirs[wire.unpack(answers[-1])[0]["round"]] = answers[-1]
        return [(name, answers[-1])]

    (tmp_path / "other").mkdir()
    rehearse(config_of(other), tmp_path / "other", odd(keep))
    config = config_of(method, "--federation.on_bad_client", "skip")
    run = rehearse(
        config, tmp_path, odd(lambda a, name: [(name, theirs[wire.unpack(a[-1])[0]["round"]])])
    )
    assert [(row["client"], row["outcome"]) for row in RunFolder(run).read("failures")] == [
        (BAD, "skipped")
    ] * 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("visit", lambda h: h.pop("values")),
        ("visit", lambda h: h["values"].update(client=0)),
        ("score", lambda h: h.pop("values")),
        ("final", lambda h: h.pop("scores")),
        ("final", lambda h: h["scores"].update(kind="best")),
    ],
)
def test_headers_that_lack_something_are_refused(
    kind: str, change: Callable[[Any], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each kind of message."""

    def made(sites: list[Any]) -> LocalTransport:
        def spoilt(message: bytes) -> bytes:
            header, tensors = wire.unpack(sites[BAD](message))
            if header["kind"] == kind:
                change(header)
            return wire.pack(header, tensors)

        return LocalTransport([sites[0], spoilt, sites[2]])

    run = rehearse(config_of("fedavg", "--federation.on_bad_client", "skip"), tmp_path, made)
    assert (run / "summary.json").is_file()
    assert (
        f"client {BAD} failed in round" in (shown := capsys.readouterr().err)
        and "sent what is refused" in shown
    )


def test_a_replay_of_an_old_round_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of("fedavg", "--federation.on_bad_client", "skip")
    run = rehearse(config, tmp_path, odd(lambda answers, name: [(name, answers[0])]))
    assert [(row["round"], row["client"]) for row in RunFolder(run).read("failures")] == [(2, BAD)]
    assert "answered another message than round 2's" in capsys.readouterr().err


def test_uploads_that_the_centre_refuses_count_in_epsilon(tmp_path: Path) -> None:
    """They have left the site with noise of their own."""

    def spoilt(answers: Answers, name: str) -> list[Any]:
        header, tensors = wire.unpack(answers[-1])
        if header["round"] in (2, 3):
            tensors |= {"model": tensors["model"][:-1]}
        return [(name, wire.pack(header, tensors))]

    flags = "--federation.on_bad_client skip --federation.rounds 4 --callbacks.localprivacy.clip 1"
    config = config_of("fedavg", *f"{flags} --callbacks.localprivacy.noise 0.5".split())
    rows = RunFolder(rehearse(config, tmp_path, odd(spoilt))).read("clients")
    epsilons = {(row["round"], row["client"]): row["privacy_epsilon"] for row in rows}
    assert [t for t, c in epsilons if c == BAD] == [1, 4] and epsilons[4, BAD] == epsilons[4, 0]


# ---------------------------------------------------------------- before the first round


class Moving:
    """Sites that answer with who they are; the one at 3 is client 0's, started again after that at
    1 has died."""

    def __init__(self) -> None:
        self.nodes, self.dead, self.waiting, self.hellos = (
            [1, 2],
            set[int](),
            list[tuple[str, Any]](),
            0,
        )

    def addresses(self) -> list[int]:
        return list(self.nodes)

    def push(self, address: int, message: bytes, ttl: float) -> str:
        header, _ = wire.unpack(message)
        answer = {key: header[key] for key in ("kind", "run", "round", "client")}
        if header["kind"] == "hello":
            who = {1: 0, 2: 1, 3: 0}[address]
            facts = {"version": "x", "initial": "i", "fingerprint": "f"}
            answer |= {"site": who, "name": "", "sizes": [5, 0, 5], **facts}
        self.hellos += 1
        if address in self.nodes and address not in self.dead:
            self.waiting.append((str(self.hellos), wire.pack(answer, {})))
        return str(self.hellos)

    def pull(self, most: int) -> list[tuple[str, Any]]:
        come, self.waiting = self.waiting, []
        return come

    def pause(self) -> None:
        time.sleep(0.005)


def test_a_site_that_comes_back_at_another_address_is_taken_once_the_first_has_gone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    transport = Moving()
    exchange = Exchange(transport, "r", "f", Limits(2, 0.5, 0.05), tolerant=True)
    exchange.gathered(2)
    answered = []
    for t, (nodes, dead) in enumerate([([1, 2, 3], {1}), ([2, 3], {1})], 1):
        transport.nodes, transport.dead = nodes, dead
        messages = {c: exchange.pack({"kind": "visit", "round": t}, {}, c) for c in (0, 1)}
        answers = exchange.ask(t, "visit", messages, 1)
        answered.append([c for c, answer in answers.items() if answer is not None])
    assert answered == [[1], [0, 1]]
    assert (
        capsys.readouterr().err.count(
            "both say that they are client 0; the first is kept while it is there"
        )
        == 1
    )


class Silent(LocalTransport):
    """One site answers the first message, the hello, with `hello`, or never."""

    hello: Any = None

    def push(self, address: int, message: bytes, ttl: float) -> str:
        name = super().push(address, message, ttl)
        if address == BAD:
            self.waiting.pop()
            self.waiting.extend([] if self.hello is None else [(name, self.hello)])
        return name


@pytest.mark.parametrize(
    ("hello", "line"),
    [
        (None, "no site for client 1 after 0 s"),
        (HUGE, f"the site at 1 cannot take part: it has {HUGE} bytes, more than the"),
        (b"\0" * 64, "the site at 1 cannot take part: it is no message of this package"),
    ],
)
def test_a_site_that_says_nothing_of_itself(
    hello: Any,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(rehearsal, "LIMITS", (0.3, 5.0, 5.0))
    monkeypatch.setattr(Silent, "hello", hello)
    (tmp_path / "one").mkdir()
    with pytest.raises(RunFailed, match=line):
        rehearse(config_of("fedavg"), tmp_path / "one", Silent)
    run = rehearse(config_of("fedavg", "--federation.on_bad_client", "skip"), tmp_path, Silent)
    shown = capsys.readouterr().err
    assert line in shown
    assert "the run goes on without it" in shown
    assert {row["client"] for row in RunFolder(run).read("failures")} == {BAD}


# --------------------------------------------------------- the cap, where Flower hands answers over


class Body:
    """Ten gigabytes that nobody may read."""

    def __len__(self) -> int:
        return HUGE


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`flower.py` with made-up parts of Flower, which is not in this environment."""
    names = ("Array", "ArrayRecord", "ConfigRecord", "Context", "Message", "RecordDict", "Grid")
    parts: dict[str, Any] = {name: lambda *given, **named: given for name in names}
    parts |= {"RecordDict": dict, "ArrayRecord": dict, "ConfigRecord": dict}

    def app() -> Any:
        return SimpleNamespace(main=lambda: lambda hook: hook, train=lambda: lambda hook: hook)

    for name in ("flwr", "flwr.app", "flwr.clientapp", "flwr.serverapp"):
        made = ModuleType(name)
        made.__dict__.update(parts | {"ServerApp": app, "ClientApp": app})
        monkeypatch.setitem(sys.modules, name, made)
    yield importlib.import_module("fl_lightning.sites.flower")
    sys.modules.pop("fl_lightning.sites.flower")


def test_an_answer_of_ten_gigabytes_is_not_copied(ends: Any) -> None:
    """Only its length is read; an answer beside it arrives."""

    def reply(data: Any) -> Any:
        content = {"body": {"bytes": SimpleNamespace(data=data)}}
        return SimpleNamespace(content=content, has_error=bool)

    replies = {"a": reply(Body()), "b": reply(b"whole"), "c": reply(bytes(1001))}
    grid = SimpleNamespace(pull_messages=lambda names: [replies[name] for name in names])
    transport = ends.GridTransport(grid, "app")
    transport.waiting = [*replies]
    assert transport.pull(1000) == [("a", HUGE), ("b", b"whole"), ("c", 1001)]
    with pytest.raises(
        wire.Unreadable, match=rf"^it has {HUGE} bytes, more than the 1000 that are accepted$"
    ):
        wire.unpack(HUGE, 1000)


def test_an_answer_that_flower_takes_in_whole_costs_no_memory(ends: Any) -> None:
    """Flower puts ten gigabytes together before it hands them over: that ends where four caps are
    reached."""
    taken: list[int] = []

    def pull(names: list[str]) -> list[Any]:
        if names == ["a"]:
            taken.append(len(bytes(HUGE)))
        return []

    transport = ends.GridTransport(SimpleNamespace(pull_messages=pull), "app")
    transport.waiting = ["a", "b"]
    assert transport.pull(1000) == [("a", -1)]
    assert (taken, transport.waiting) == ([], ["b"])
    with pytest.raises(
        wire.Unreadable, match=r"^it has far more than the 1000 bytes that are accepted$"
    ):
        wire.unpack(-1, 1000)
    assert len(bytes(HUGE)) == HUGE  # the limit is gone


def test_the_cap_is_set_by_the_method_and_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MiB, and twice what a client's vectors have: SCAFFOLD's two."""
    caps = set()
    ask = Exchange.ask

    def seen(self: Exchange, *rest: Any) -> Any:
        caps.add(self.most)
        return ask(self, *rest)

    monkeypatch.setattr(Exchange, "ask", seen)
    rehearse(config_of("scaffold", "--federation.rounds", "1"), tmp_path)
    numbers = 64 * 16 + 16 + 16 * 10 + 10
    [cap] = caps
    assert 0 <= cap - 2**26 - 2 * 2 * 4 * numbers < 2 * 2 * 4 * 64  # gaps between layers
    assert Exchange(LocalTransport([]), "", "", Limits()).most == 2**26


# ---------------------------------------------------------------- an answer that was refused


@pytest.mark.sampled("ditto-twice")
@pytest.mark.parametrize("rounds", [{1}, {2, 3}, {4}], ids=["first", "twice", "last"])
@pytest.mark.parametrize("method", ["ditto", "scaffold", "fedavg"])
def test_a_site_whose_answer_was_refused_goes_back(
    method: str, rounds: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has trained; the centre goes on without that: the numbers are those of a client that
    failed then."""
    config = config_of(method, "--federation.on_bad_client", "skip", "--federation.rounds", "4")

    def spoilt(answers: Answers, name: str) -> list[Any]:
        header, tensors = wire.unpack(answers[-1])
        lost = header["round"] in rounds
        return [
            (
                name,
                wire.pack(header, tensors | {"model": tensors["model"][:-1]})
                if lost
                else answers[-1],
            )
        ]

    run = rehearse(config, tmp_path, odd(spoilt))
    failed = [
        (row["round"], row["client"], row["outcome"]) for row in RunFolder(run).read("failures")
    ]
    assert failed == [(t, BAD, "skipped") for t in sorted(rounds)]
    upload = Visit.upload

    def breaks(self: Visit) -> None:
        upload(self)
        if self.id == BAD and self.t in rounds:
            raise OSError

    monkeypatch.setattr(Visit, "upload", breaks)
    assert differences(simulate(config, tmp_path), run) == []


def test_a_site_that_has_lost_its_state_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder is empty after the first round: it trains no other model in silence."""
    sites: list[Any] = []

    def emptied(answers: Answers, name: str) -> list[Any]:
        if len(answers) == 1:
            site = sites[0][BAD].__self__
            site.fed.run.states.clear()
        return [(name, answers[-1])]

    def keep(made: list[Any]) -> LocalTransport:
        sites.append(made)
        return odd(emptied)(made)

    run = rehearse(config_of("ditto", "--federation.on_bad_client", "skip"), tmp_path, keep)
    assert (2, BAD, "skipped") in [
        (r["round"], r["client"], r["outcome"]) for r in RunFolder(run).read("failures")
    ]
    assert "the site has its state after 0 visits, the centre has 1" in capsys.readouterr().err
