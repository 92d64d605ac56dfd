"""Messages from the centre to sites, and their answers, of which some are late, lost or sent twice.

A transport delivers a message at most once and may lose any. So a message without an answer is sent
again under the same (run, round, client), until the deadline; a site that has answered it sends the
same bytes again.
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


Reply = bytes | int | None
"""What has come of a message: the answer; a number: it was too long to be accepted, and this is its
length (-1: unknown); None: nobody will answer."""


class Transport(Protocol):
    """Carries messages to sites, each of which it knows by an address."""

    def addresses(self) -> list[int]:
        """Addresses of the sites that can be reached now."""

    def push(self, address: int, message: bytes, ttl: float) -> str:
        """Send; returns a name for the message. It may never arrive."""

    def pull(self, most: int) -> list[tuple[str, Reply]]:
        """Answers of at most `most` bytes that have arrived, with their messages' names."""

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
    """Bytes of an answer at most; `center.federation_of` adds what the method's clients upload."""
    method: str = ""
    """For messages."""
    bytes_sent: int = 0
    bytes_received: int = 0
    left_out: dict[int, str] = field(default_factory=dict)
    """Clients whose site cannot take part, and why."""
    _address: dict[int, int] = field(default_factory=dict)
    """By client: the address of its site."""
    _client_at: dict[int, int] = field(default_factory=dict)
    """By address: the client; -1: the site did not say which, and is not greeted again."""
    _hellos: dict[int, wire.Message] = field(default_factory=dict)
    _greet_at: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By address: the time of the next hello, and seconds from it to the one after."""
    _rivals: set[int] = field(default_factory=set)
    """Addresses that claim a client whose site is at another address."""
    _open: dict[str, tuple[int, Any]] = field(default_factory=dict)
    """By a message's name: the address, and the question (`hello`, or round, kind, attempt)."""

    def name(self, client: int) -> str:
        """The client's site, as messages to the user call it."""
        site_name = str(self._hellos.get(client, {}).get("name") or "")
        return f"site {client} ({site_name})" if site_name else f"site {client}"

    def pack(self, message: wire.Message, client: int | None) -> bytes:
        """The bytes of a message to `client`; None: to any site."""
        common = {"run": self.run_id, "fingerprint": self.fingerprint, "client": client}
        return wire.pack(message | common)

    # ---------------------------------------------------------------- hello

    def wait_for_sites(self, clients: int) -> dict[int, list[int]]:
        """Wait until every client has a site; return samples for training, validation and test by
        client (0 of one that cannot take part).

        Raises:
            RunFailed: sites are missing at the deadline, or one cannot take part, and the run does
                not go on so.
        """
        deadline = time.monotonic() + self.limits.gather
        while missing := sorted({*range(clients)} - {*self._hellos, *self.left_out}):
            if time.monotonic() > deadline:
                names = ", ".join(map(str, missing))
                why = f"no site for client {names} after {self.limits.gather:.0f} s"
                self._go_on_without(why, f"{why}; is it started?")
                self.left_out |= dict.fromkeys(missing, "it was not there before the first round")
            self._greet()
            self._listen(None, {})
            self.transport.pause()
        if len(self.left_out) == clients:
            raise RunFailed("no site can take part")
        absent = {"sizes": [0, 0, 0]}
        return {c: self._hellos.get(c, absent)["sizes"] for c in range(clients)}

    def check_beginnings(self, initial: str, version: str) -> None:
        """Leave out sites with another version of the package, another app or other first weights
        (`initial`: their digest) than the centre.

        Raises:
            RunFailed: there is one, and the run does not go on without it.
        """
        for client, hello in sorted(self._hellos.items()):
            if hello["version"] != version:
                why = f"it has fl_lightning {hello['version']}, the centre has {version}"
            elif hello.get("fingerprint") != self.fingerprint:
                why = "it has another configuration than the centre: another app, or other own code"
            elif hello["initial"] not in ("", initial):
                why = (
                    "it begins with other weights than the centre: model.weights, or another torch"
                )
            else:
                continue
            self._leave_out(client, why)

    def _leave_out(self, client: int, why: str) -> None:
        self._go_on_without(f"{self.name(client)} cannot take part: {why}")
        self.left_out[client] = why

    def _go_on_without(self, line: str, error: str = "") -> None:
        """Say that the run goes on without a site; raise `RunFailed` with `error`, else `line`,
        where it does not."""
        if not self.tolerant:
            raise RunFailed(error or line)
        log.say(f"{line}; the run goes on without it")

    def _greet(self) -> None:
        """Say hello to each site that is new, or has not answered for a while."""
        now = time.monotonic()
        for address in self.transport.addresses():
            greet_at, wait = self._greet_at.get(address, (now, self.limits.again))
            if address in self._client_at or now < greet_at:
                continue
            self._greet_at[address] = now + wait, 2 * wait
            self._push(
                address,
                self.pack({"kind": "hello", "round": 0}, None),
                "hello",
            )

    def _welcome(self, address: int, message: wire.Message) -> None:
        """Take in a site's answer to hello."""
        client = message.get("site")
        if type(client) is not int or client < 0:
            silent = "it did not say which client it is: client=K in its node config"
            why = message.get("unreadable", silent)
            self._go_on_without(f"the site at {address} cannot take part: {why}")
            self._client_at[address] = -1
            return
        first = self._address.get(client, address)
        if first != address and first in self.transport.addresses():
            # it is greeted again: the first may be a site that has gone
            if address not in self._rivals:
                self._rivals.add(address)
                line = f"the sites at {first} and {address} both say that they are client {client}"
                self._go_on_without(f"{line}; the first is kept while it is there", line)
            return
        self._client_at[address] = client
        sizes: Any = message.get("sizes")
        counted = isinstance(sizes, list) and [type(n) for n in sizes] == [int] * 3
        counted = counted and min(sizes) >= 0 and {"version", "initial"} <= message.keys()
        if "failed" in message:
            self._leave_out(client, _two_texts(message["failed"])[1])
            return
        if not counted:
            why = "it did not tell its version, its first weights and how many samples it has"
            self._leave_out(client, why)
            return
        self._address[client] = address
        self._hellos[client] = message
        train, _, test = sizes
        log.note(f"{self.name(client)} is there: {train} samples for training, {test} for test")

    # ---------------------------------------------------------------- asking

    def ask(
        self,
        t: int,
        kind: str,
        messages: Mapping[int, bytes],
        attempt: int,
    ) -> dict[int, Any]:
        """Send each client its message, again until it is answered; return answers by client, None
        where there is none in time."""
        question = (t, kind, attempt)
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.limits.visit
        present = [c for c in messages if c not in self.left_out]
        send_at = dict.fromkeys(present, 0.0)
        wait = dict.fromkeys(present, self.limits.again)
        while len(answers) < len(present) and time.monotonic() < deadline:
            now = time.monotonic()
            for c in present:
                if c not in answers and now >= send_at[c] and c in self._address:
                    send_at[c] = now + wait[c]
                    wait[c] *= 2
                    self._push(self._address[c], messages[c], question)
            self._greet()
            # nobody will answer these: send soon, to wherever the site is then
            for c in self._listen(question, answers):
                soon = now + min(5.0, self.limits.again)
                send_at[c] = min(send_at.get(c, now), soon)
            if len(answers) < len(present):
                self.transport.pause()
        return {c: answers.get(c) for c in messages}

    def _push(self, address: int, message: bytes, question: Any) -> None:
        name = self.transport.push(address, message, self.limits.visit)
        self._open[name] = address, question
        self.bytes_sent += len(message) if question != "hello" else 0

    def _listen(
        self,
        question: Any,
        answers: dict[int, Any],
    ) -> list[int]:
        """Put replies to `question` into `answers`; return clients whose message is lost."""
        lost_clients = []
        for name, reply in self.transport.pull(self.most):
            if name not in self._open:
                continue
            address, asked_question = self._open.pop(name)
            client = self._client_at.get(address, -1)
            is_answer = asked_question == question
            if reply is None:
                self._greet_at.pop(address, None)
                if is_answer:
                    lost_clients.append(client)
                continue
            is_hello = asked_question == "hello"
            if not is_hello:
                self.bytes_received += reply if isinstance(reply, int) else len(reply)
            try:
                message = wire.unpack(reply, self.most)
            except wire.Unreadable as error:
                message = {"unreadable": str(error)}
            if is_hello:
                self._welcome(address, message)
            elif is_answer:
                answers.setdefault(client, message)
        return lost_clients

    def checked(
        self,
        t: int,
        c: int,
        answer: wire.Message | None,
    ) -> wire.Message:
        """Return `answer` if it answers the message of round `t`.

        Raises:
            BadClient: there is none, it answers another message, or the site failed.
            BadInput: a hook of the method reads data that do not travel.
            Unreadable: it is no message.
        """
        site = self.name(c)
        if answer is None:
            absent = f"it did not answer within {self.limits.visit:.0f} s"
            raise BadClient(c, t, "download", f"{site}: {self.left_out.get(c, absent)}")
        if "unreadable" in answer:
            raise wire.Unreadable(answer["unreadable"])
        if "refused" in answer:
            raise NotHere(*_two_texts(answer["refused"])).refusal(self.method)
        if "failed" in answer:
            stage, reason = _two_texts(answer["failed"])
            raise BadClient(c, t, stage, f"{site}: {reason}")
        if (answer.get("run"), answer.get("round"), answer.get("client")) != (self.run_id, t, c):
            raise BadClient(c, t, "upload", f"{site} answered another message than round {t}'s")
        return answer

    @contextlib.contextmanager
    def collecting(
        self,
        t: int,
        c: int,
        stage: str,
        failures: list[BadClient],
    ) -> Iterator[None]:
        """Add a failure within the block, where an answer cannot be used, to `failures`."""
        try:
            yield
        except wire.Unreadable as error:
            why = f"{self.name(c)} sent what is refused: {error}"
            failures.append(BadClient(c, t, stage, why))
        except BadClient as failure:
            failures.append(failure)


def _two_texts(texts: Any) -> tuple[str, str]:
    """The two texts that a site sends; a hostile one may have sent anything."""
    if not isinstance(texts, list) or len(texts) != 2:
        return "", "its answer has no reason"
    first, second = (str(text)[:200] for text in texts)
    return first, second
