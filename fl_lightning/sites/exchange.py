"""Who asks whom: messages to sites, their answers, what comes late, twice or not at all.

A transport delivers a message at most once and may lose any. So what is not answered is sent again
under the same (run, round, client), until the deadline; a site that has answered it sends the same
bytes again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fl_lightning.foundation import log
from fl_lightning.foundation.errors import BadClient, RunFailed
from fl_lightning.sites import wire
from fl_lightning.sites.data import NotHere

MOST_BEYOND = 2**26
"""Bytes of an answer beyond twice what a client uploads in vectors: header, statistics, predictions
(ours)."""


Come = bytes | int | None
"""An answer; or how many bytes one had that was too long to be taken (-1: nobody knows); None:
nobody will answer."""


class Transport(Protocol):
    """What carries messages to sites; an address is whatever it calls a site by."""

    def addresses(self) -> list[int]:
        """The sites that can be reached now."""

    def push(self, address: int, message: bytes, ttl: float) -> str:
        """Send; returns a name for the message. It may never arrive."""

    def pull(self, most: int) -> list[tuple[str, Come]]:
        """What has arrived of answers with at most `most` bytes, by the message's name."""

    def pause(self) -> None:
        """Wait a moment before the next look."""


@dataclass
class Limits:
    """Seconds of patience."""

    gather: float = 600.0
    """For all sites to be there. 600: a person starts them by hand."""
    visit: float = 3600.0
    """For one answer, sent again or not. 3600: a round of some hundred batches of a large model on
    a CPU."""
    again: float = 90.0
    """Until a message is sent again, and twice as long from each time to the next: Flower starts a
    process for each, and a busy site would be buried in them. 90: a site that died is known to be
    dead after 60 (Flower's heartbeat)."""


@dataclass
class Exchange:
    """The centre's end. `run_id` names the run for the sites, `fingerprint` its configuration."""

    transport: Transport
    run_id: str
    fingerprint: str
    limits: Limits = field(default_factory=Limits)
    tolerant: bool = False
    """Whether the run goes on without a site that cannot take part (`federation.on_bad_client`)."""
    most: int = MOST_BEYOND
    """Bytes of an answer at most; `center.remote` adds what the method's clients upload."""
    method: str = ""
    """For messages."""
    bytes_sent: int = 0
    bytes_received: int = 0
    out: dict[int, str] = field(default_factory=dict)
    """Clients whose site cannot take part, and why."""
    _address: dict[int, int] = field(default_factory=dict)
    _client_at: dict[int, int] = field(default_factory=dict)
    _hellos: dict[int, wire.Message] = field(default_factory=dict)
    _greeted: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By address: when it is said hello again, and how long after that again."""
    _second: set[int] = field(default_factory=set)
    """Addresses that have said that they are a client who is at another."""
    _open: dict[str, tuple[int, Any]] = field(default_factory=dict)
    """By a message's name: the address, and what it was (`hello`, or round, kind, attempt)."""

    def name(self, client: int) -> str:
        """What messages to the user call a client's site."""
        own = str(self._hellos.get(client, {}).get("name") or "")
        return f"site {client} ({own})" if own else f"site {client}"

    def pack(self, message: wire.Message, client: int | None) -> bytes:
        """A message to `client` (None: to whom it may be)."""
        common = {"run": self.run_id, "fingerprint": self.fingerprint, "client": client}
        return wire.pack(message | common)

    # ---------------------------------------------------------------- who is there

    def gathered(self, clients: int) -> dict[int, list[int]]:
        """Wait until every client has a site; samples for training, validation and test by client
        (none of one that cannot take part).

        Raises:
            RunFailed: some are missing when the time is over, or one cannot take part, and the run
                does not go on so.
        """
        deadline = time.monotonic() + self.limits.gather
        while missing := [c for c in range(clients) if c not in self._hellos and c not in self.out]:
            if time.monotonic() > deadline:
                names = ", ".join(map(str, missing))
                why = f"no site for client {names} after {self.limits.gather:.0f} s"
                self._go_on_without(why, f"{why}; is it started?")
                self.out |= dict.fromkeys(missing, "it was not there before the first round")
            self._greet()
            self._listen({})
            self.transport.pause()
        if len(self.out) == clients:
            raise RunFailed("no site can take part")
        return {
            c: self._hellos[c]["sizes"] if c in self._hellos else [0, 0, 0] for c in range(clients)
        }

    def check_beginnings(self, initial: str, version: str) -> None:
        """Leave out a site that has another version of the package or another app, or begins with
        other weights.

        Raises:
            RunFailed: there is one, and the run does not go on without it.
        """
        for c, hello in sorted(self._hellos.items()):
            if hello["version"] != version:
                self._leave_out(
                    c, f"it has fl_lightning {hello['version']}, the centre has {version}"
                )
            elif hello.get("fingerprint") != self.fingerprint:
                self._leave_out(
                    c,
                    "it has another configuration than the centre: another app, or other own code",
                )
            elif hello["initial"] and hello["initial"] != initial:
                self._leave_out(
                    c,
                    "it begins with other weights than the centre: model.weights, or another torch",
                )

    def _leave_out(self, client: int, why: str) -> None:
        self._go_on_without(f"{self.name(client)} cannot take part: {why}")
        self.out[client] = why

    def _go_on_without(self, line: str, otherwise: str = "") -> None:
        """Say that the run goes on without a site; raise `RunFailed` where it does not."""
        if not self.tolerant:
            raise RunFailed(otherwise or line)
        log.say(f"{line}; the run goes on without it")

    def _greet(self) -> None:
        """Say hello to each site that is new, or has not answered for a while."""
        now = time.monotonic()
        for address in self.transport.addresses():
            due, wait = self._greeted.get(address, (now, self.limits.again))
            if address in self._client_at or now < due:
                continue
            self._greeted[address] = now + wait, 2 * wait
            self._push(address, self.pack({"kind": "hello", "round": 0}, None), "hello")

    def _welcome(self, address: int, message: wire.Message) -> None:
        """A site has told who it is."""
        client = message.get("site")
        sizes = message.get("sizes")
        if type(client) is not int or client < 0:
            why = message.get(
                "unreadable", "it did not say which client it is: client=K in its node config"
            )
            self._go_on_without(f"the site at {address} cannot take part: {why}")
            self._client_at[address] = -1
            return
        known = self._address.get(client)
        if known is not None and known != address and known in self.transport.addresses():
            line = f"the sites at {known} and {address} both say that they are client {client}"
            # it is greeted again: the first may be a site that has gone
            if address not in self._second:
                self._second.add(address)
                self._go_on_without(f"{line}; the first is kept while it is there", line)
            return
        self._client_at[address] = client
        if "failed" in message:
            return self._leave_out(client, _two_words(message["failed"])[1])
        counts = (
            sizes if isinstance(sizes, list) and {"version", "initial"} <= message.keys() else []
        )
        if len(counts) != 3 or not all(type(n) is int and n >= 0 for n in counts):
            return self._leave_out(
                client, "it did not tell its version, its first weights and how many samples it has"
            )
        self._address[client], self._hellos[client] = address, message
        log.note(
            f"{self.name(client)} is there: {counts[0]} samples for training, {counts[2]} for test"
        )

    # ---------------------------------------------------------------- asking

    def ask(self, t: int, kind: str, messages: Mapping[int, bytes], attempt: int) -> dict[int, Any]:
        """The answer of each client to its message; None where there is none in time."""
        key = (t, kind, attempt)
        answers: dict[int, Any] = {}
        again = self.limits.again
        deadline = time.monotonic() + self.limits.visit
        there = [c for c in messages if c not in self.out]
        due = dict.fromkeys(there, 0.0)
        wait = dict.fromkeys(there, again)
        while len(answers) < len(there) and time.monotonic() < deadline:
            now = time.monotonic()
            for c in there:
                if c not in answers and now >= due[c] and c in self._address:
                    due[c], wait[c] = now + wait[c], 2 * wait[c]
                    self._push(self._address[c], messages[c], key)
            self._greet()
            lost = self._listen({key: answers})
            for c in lost:  # nobody will answer: send again soon, to wherever the site is then
                due[c] = min(due.get(c, now), now + min(5.0, again))
            if len(answers) < len(there):
                self.transport.pause()
        return {c: answers.get(c) for c in messages}

    def _push(self, address: int, message: bytes, what: Any) -> None:
        name = self.transport.push(address, message, self.limits.visit)
        self._open[name] = address, what
        self.bytes_sent += len(message) if what != "hello" else 0

    def _listen(self, waiting: Mapping[Any, dict[int, Any]]) -> list[int]:
        """Take what has come: into `waiting`, by what was asked; the clients whose message is
        lost."""
        lost = []
        for name, content in self.transport.pull(self.most):
            address, what = self._open.pop(name, (None, None))
            if address is None:
                continue
            client = self._client_at.get(address, -1)
            if content is None:
                self._greeted.pop(address, None)
                lost += [client] if what in waiting else []
                continue
            if what != "hello":
                self.bytes_received += content if isinstance(content, int) else len(content)
            try:
                message = wire.unpack(content, self.most)
            except wire.Unreadable as error:
                message = {"unreadable": str(error)}
            if what == "hello":
                self._welcome(address, message)
            elif what in waiting and client not in waiting[what]:
                waiting[what][client] = message
        return lost

    def read(self, t: int, c: int, answer: wire.Message | None) -> wire.Message:
        """An answer that is one.

        Raises:
            BadClient: there is none, or the site says that it failed.
            BadInput: a hook of the method asks for what does not travel.
        """
        if answer is None:
            absent = f"it did not answer within {self.limits.visit:.0f} s"
            raise BadClient(c, t, "download", f"{self.name(c)}: {self.out.get(c, absent)}")
        if "unreadable" in answer:
            raise wire.Unreadable(answer["unreadable"])
        if "refused" in answer:
            raise NotHere(*_two_words(answer["refused"])).refusal(self.method)
        if "failed" in answer:
            at, reason = _two_words(answer["failed"])
            raise BadClient(c, t, at, f"{self.name(c)}: {reason}")
        if (answer.get("run"), answer.get("round"), answer.get("client")) != (self.run_id, t, c):
            raise BadClient(
                c, t, "upload", f"{self.name(c)} answered another message than round {t}'s"
            )
        return answer

    @contextlib.contextmanager
    def naming(self, t: int, c: int, stage: str, failures: list[BadClient]) -> Iterator[None]:
        """Within this, an answer that cannot be used becomes one of `failures`."""
        try:
            yield
        except wire.Unreadable as error:
            why = f"{self.name(c)} sent what is refused: {error}"
            failures.append(BadClient(c, t, stage, why))
        except BadClient as failure:
            failures.append(failure)


def _two_words(words: Any) -> tuple[str, str]:
    """As a site writes them; a hostile one may have sent anything."""
    words = [str(word)[:200] for word in words] if isinstance(words, list) else []
    return (words[0], words[1]) if len(words) == 2 else ("", "its answer has no reason")
