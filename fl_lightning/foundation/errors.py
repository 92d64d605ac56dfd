"""Errors that end a command in one line: bad input (exit code 2) and failed runs (1). See "Exit
codes" in docs/reference.md."""

from __future__ import annotations

import os
import re

SECRET = re.compile(r"(^|[_.])(api_?key|token|password|secret)$", re.IGNORECASE)
"""Keys whose values must never be shown."""

LONGEST = 200
"""Maximum number of characters of a value in an error: an array would fill the screen."""

NO_VALUE, NOT_GIVEN = "it needs a value", "it must be given"


def redact(text: str) -> str:
    """Return `text` with the W&B key of the environment replaced by `***`."""
    key = os.environ.get("WANDB_API_KEY")
    return text.replace(key, "***") if key else text


class BadInput(Exception):
    """A value that the user has set is wrong. Printed as one line, `KEY=VALUE: REQUIREMENT`; exit
    code 2.

    Args:
        key: the configuration's key, or the argument's name.
        value: as the user has set it; `...` if no single value is wrong.
        requirement: what the value must be, or the problem and its remedy.
    """

    exit_code = 2

    def __init__(self, key: str, value: object, requirement: str) -> None:
        if SECRET.search(key):
            value = "***"
        super().__init__(_sentence(key, value, requirement))
        self.key = key
        self.value = value
        self.requirement = requirement

    def __reduce__(self) -> tuple[type[BadInput], tuple[str, object, str]]:
        return type(self), (self.key, self.value, self.requirement)


def check(key: str, value: object, holds: bool, requirement: str) -> None:
    """Raise `BadInput(key, value, requirement)` unless `holds` is true."""
    if not holds:
        raise BadInput(key, value, requirement)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class's name if it has no message."""
    return (str(error) or type(error).__name__).splitlines()[0]


class Damaged(BadInput, ValueError):
    """A file in a run folder cannot be read: it was cut short or changed.

    Also a `ValueError`, like other errors of reading a file (`UNREADABLE` in results/folder.py).
    """


def _sentence(key: str, value: object, requirement: str) -> str:
    """Return the error's line for the user, in one of three forms.

    - `data.alpha=-1: it must be above 0`
    - `method: it must be given`, if the value is missing or no single value is wrong
    - `there is no method 'fedagv'; ...`, if the requirement begins with `no such method`
    """
    is_missing = value is None and requirement.startswith(NOT_GIVEN)
    if value is ... or is_missing:
        return f"{key}: {requirement}"
    if requirement.startswith(f"no such {key}"):
        problem = requirement.replace("such ", "", 1).replace(key, f"{key} {value!r}", 1)
        return f"there is {problem}"
    text = repr(value)
    shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return f"{key}={shown}: {requirement}"


class RunFailed(Exception):
    """A run with valid input cannot go on (a client failed, a disk is full). Printed as one line;
    exit code 1."""

    exit_code = 1


class MachineFailed(RunFailed):
    """The machine failed, not the configuration: a disk is full, a process is gone."""


class BadClient(RunFailed):
    """One client failed; `federation.on_bad_client` decides whether the run goes on.

    Args:
        client: the client's number.
        round: the round in which it failed.
        stage: `data`, `download`, `training`, `evaluation` or `upload`.
        reason: the reason, for the user.
        called: text by which the message calls the client, with its number and name; empty:
            `client NUMBER`.
    """

    def __init__(
        self,
        client: int,
        round: int,
        stage: str,
        reason: str,
        called: str = "",
    ) -> None:
        # pickle builds the error again from these arguments
        super().__init__(client, round, stage, reason, called)
        self.client = client
        self.round = round
        self.stage = stage
        self.reason = reason
        self.called = called or f"client {client}"

    def bare(self) -> BadClient:
        """Return a copy of this error that has no traceback. The frames of a traceback would keep
        the failed visit's tensors in memory."""
        return BadClient(*self.args)

    def __str__(self) -> str:
        return f"{self.called} failed in round {self.round}, stage {self.stage}: {self.reason}"
