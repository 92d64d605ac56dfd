"""The centre's side of the protocol with sites: messages and answers may be late, lost or sent
twice.

A transport may lose any message. So the centre sends a message with the same (run, round, client)
again until it is answered or the deadline has passed; a site that has answered before sends the
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
from fl_lightning.sites.data import NotTransmitted

MOST_BEYOND = 2**26
"""Accepted bytes of an answer beyond twice the size of its vectors, for header, statistics and
predictions (our choice)."""


Reply = bytes | int | None
"""The answer to a message; or a number: the answer was too long and has this length in bytes (-1:
unknown length); or None: the message is lost, and nobody will answer."""


class Transport(Protocol):
    """Carries messages to sites; each site has an address."""

    def addresses(self) -> list[int]:
        """Return the addresses of the sites that can be reached now."""

    def push(self, address: int, message: bytes, ttl: float) -> str:
        """Send a message, which may get lost; return a name by which `pull` identifies its reply.

        Args:
            address: the site's.
            message: the bytes.
            ttl: seconds after which message and reply expire.
        """

    def pull(self, most: int) -> list[tuple[str, Reply]]:
        """Return the replies that have arrived since the last call, each with the name of its
        message.

        Args:
            most: maximum size of a reply in bytes. A longer reply is returned as its length. As
                soon as the returned replies have more bytes together, the other replies are left to
                the next call.
        """

    def pause(self) -> None:
        """Sleep for a moment between two calls of `pull`."""


@dataclass
class Limits:
    """Timeouts in seconds."""

    gather: float = 600.0
    """Time in which all sites must connect. 600: a person starts them by hand."""
    visit: float = 3600.0
    """Time in which a message must be answered, however often it is sent. 3600: a round of some
    hundred batches of a large model on a CPU."""
    again: float = 90.0
    """Time after which an unanswered message is sent again. It doubles each time, since Flower
    starts a process for each message and a busy site would get too many. 90: Flower's heartbeat
    knows after 60 that a site has died."""


@dataclass
class Exchange:
    """Registers sites, sends them messages until they are answered, and checks the answers.

    `run_id` and `fingerprint` (`ends.run_id`, `app.fingerprint`) are in the header of each message.
    """

    transport: Transport
    run_id: str
    fingerprint: str
    limits: Limits = field(default_factory=Limits)
    tolerant: bool = False
    """Whether the run goes on without a site that cannot take part (`federation.on_bad_client`)."""
    most: int = MOST_BEYOND
    """Maximum size of an answer in bytes; `center.federation_of` sets it from the model's size."""
    method: str = ""
    """The method's name, for errors."""
    bytes_sent: int = 0
    bytes_received: int = 0
    left_out: dict[int, str] = field(default_factory=dict)
    """Clients whose site cannot take part, with the reason."""
    _address: dict[int, int] = field(default_factory=dict)
    """Address of the site by client."""
    _client_at: dict[int, int] = field(default_factory=dict)
    """Client by address; -1: the site did not say which, and gets no further hello."""
    _hellos: dict[int, wire.Message] = field(default_factory=dict)
    """Answers to hello by client."""
    _greet_at: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By address: the time of the next hello, and the seconds between it and the one after."""
    _rivals: set[int] = field(default_factory=set)
    """Addresses that claim a client whose site is at another address."""
    _open: dict[str, tuple[int, Any]] = field(default_factory=dict)
    """Unanswered messages by name: the address, and `hello` or (round, kind, attempt)."""

    def name(self, client: int) -> str:
        """Return the name of a client's site for messages to the user: `site 3 (Basel)`."""
        site_name = str(self._hellos.get(client, {}).get("name") or "")
        return f"site {client} ({site_name})" if site_name else f"site {client}"

    def pack(self, message: wire.Message, client: int | None) -> bytes:
        """Return a message and its header as bytes. `client`: the receiver; None: any site."""
        common = {"run": self.run_id, "fingerprint": self.fingerprint, "client": client}
        return wire.pack(message | common)

    # ---------------------------------------------------------------- hello

    def wait_for_sites(self, clients: int) -> dict[int, list[int]]:
        """Wait until every client has a site; return its numbers of training, validation and test
        samples by client (0 if its site cannot take part).

        Raises:
            RunFailed: a site is missing at the deadline or cannot take part, and
                `federation.on_bad_client` is stop; or no site can take part.
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
            raise RunFailed("no site can take part: the lines above give the reason of each")
        absent = {"sizes": [0, 0, 0]}
        return {c: self._hellos.get(c, absent)["sizes"] for c in range(clients)}

    def check_equal_start(self, initial: str, version: str) -> None:
        """Leave out sites that would not start like the centre.

        Args:
            initial: digest of the centre's initial models.
            version: the centre's version of this package.

        Raises:
            RunFailed: a site has another version, app or initial model, and
                `federation.on_bad_client` is stop.
        """
        for client, hello in sorted(self._hellos.items()):
            if hello["version"] != version:
                why = f"it has fl_lightning {hello['version']}, the centre has {version}"
            elif hello.get("fingerprint") != self.fingerprint:
                why = "its configuration is not the centre's: another app, or other own code"
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
        """Print that the run goes on without a site; if it may not, raise `RunFailed` with `error`
        (empty: `line`)."""
        if not self.tolerant:
            raise RunFailed(error or line)
        log.say(f"{line}; the run goes on without it")

    def _greet(self) -> None:
        """Send hello to each new site, and again to sites that have not answered it."""
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
        """Register the site at `address` by its answer to hello, or leave it out."""
        client = message.get("site")
        if type(client) is not int or client < 0:
            silent = "it did not say which client it is: client=K in its node config"
            why = message.get("unreadable", silent)
            self._go_on_without(f"the site at {address} cannot take part: {why}")
            self._client_at[address] = -1
            return
        first = self._address.get(client, address)
        if first != address and first in self.transport.addresses():
            # the second site is greeted again later: the first may be gone by then
            if address not in self._rivals:
                self._rivals.add(address)
                line = f"the sites at {first} and {address} both say that they are client {client}"
                self._go_on_without(f"{line}; the first is kept while it is there", line)
            return
        self._client_at[address] = client
        if "failed" in message:
            self._leave_out(client, _two_texts(message["failed"])[1])
            return
        sizes: Any = message.get("sizes")
        are_counts = isinstance(sizes, list) and [type(n) for n in sizes] == [int] * 3
        if not (are_counts and min(sizes) >= 0 and {"version", "initial"} <= message.keys()):
            why = "it did not send its version, initial weights and numbers of samples"
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
        """Send each client its message until it is answered; return the answers by client, None if
        there was none in time.

        Args:
            t: the round.
            kind: kind of the messages: `visit`, `score` or `final`.
            messages: bytes of each client's message, by client.
            attempt: 1, or 2 if failed clients are visited again.
        """
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
            # lost messages: send them again soon, to the address that the site has then
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
        """Handle the replies that have arrived: put answers to `question` into `answers`, register
        sites that answered hello; return the clients whose message is lost."""
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
        """Validate the `answer` of client `c`, and return it if it is a result of round `t`.

        Args:
            t: the round.
            c: the client that was asked.
            answer: the site's message; None: there was none in time.

        Raises:
            BadClient: the site did not answer, answered another message, or failed.
            BadInput: a hook of the method reads data that are not transmitted.
            Unreadable: the answer is not a message.
        """
        site = self.name(c)
        if answer is None:
            absent = f"it did not answer within {self.limits.visit:.0f} s"
            raise BadClient(c, t, "download", f"{site}: {self.left_out.get(c, absent)}")
        if "unreadable" in answer:
            raise wire.Unreadable(answer["unreadable"])
        if "refused" in answer:
            raise NotTransmitted(*_two_texts(answer["refused"])).as_bad_input(self.method)
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
        """Catch a failure of client `c` within the block and add it to `failures`.

        Args:
            t: the round.
            c: the client.
            stage: stage of the failure if the site's answer cannot be used.
            failures: list to which the failure is added.
        """
        try:
            yield
        except wire.Unreadable as error:
            why = f"the answer of {self.name(c)} is refused: {error}"
            failures.append(BadClient(c, t, stage, why))
        except BadClient as failure:
            failures.append(failure)


def _two_texts(texts: Any) -> tuple[str, str]:
    """Return a site's pair of texts, shortened; a hostile site may have sent anything."""
    if not isinstance(texts, list) or len(texts) != 2:
        return "", "its answer has no reason"
    first, second = (str(text)[:200] for text in texts)
    return first, second
