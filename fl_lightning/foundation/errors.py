"""The two ways a run may end badly, each with its exit code (docs/reference.md, "Exit codes")."""

from __future__ import annotations

import os
import re

SECRET = re.compile(r"(^|[_.])(api_?key|token|password|secret)$", re.IGNORECASE)
"""Keys whose values must never be shown."""

LONGEST = 200
"""Characters of a value that an error shows: an array in its place would fill the screen."""

NO_VALUE, NOT_GIVEN = "it needs a value", "it must be given"


def redact(text: str) -> str:
    """`text` without the W&B key that the environment holds."""
    key = os.environ.get("WANDB_API_KEY")
    return text.replace(key, "***") if key else text


class BadInput(Exception):
    """A value that the user has set cannot work: one line; exit code 2.

    Args:
        key: of the value.
        value: as it was set; `...` where no single value is at fault.
        requirement: what the value must be, or the problem and the remedy.
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
    """Raise `BadInput` for `key` unless `holds`."""
    if not holds:
        raise BadInput(key, value, requirement)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message; the name of its class where it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]


class Damaged(BadInput, ValueError):
    """A file of the run folder that the user named cannot be read.

    A `ValueError` as well, so that `except UNREADABLE` (results/folder.py) catches it.
    """


def _sentence(key: str, value: object, requirement: str) -> str:
    """Return the line for the user, in one of three forms.

    - `data.alpha=-1: it must be above 0`
    - `method: it must be given`, without a value: it is missing, or no single value is at fault
    - `there is no method 'fedagv'; ...`, of a requirement that begins with `no such method`
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
    """A run that began well cannot go on (a client failed, a disk is full): one line; exit code
    1."""

    exit_code = 1


class MachineFailed(RunFailed):
    """The machine is at fault, not the configuration: a disk refuses, a process is gone."""


class BadClient(RunFailed):
    """One client failed; `federation.on_bad_client` decides whether the run goes on.

    Args:
        client: its number.
        round: of the failure.
        stage: `data`, `download`, `training`, `evaluation` or `upload`.
        reason: for the user.
        called: the client in words, its name included where it has one.
    """

    def __init__(
        self,
        client: int,
        round: int,
        stage: str,
        reason: str,
        called: str = "",
    ) -> None:
        # a pickled error is made from these again
        super().__init__(client, round, stage, reason, called)
        self.client = client
        self.round = round
        self.stage = stage
        self.reason = reason
        self.called = called or f"client {client}"

    def bare(self) -> BadClient:
        """The same without its traceback, whose frames would keep the failed visit's tensors
        alive."""
        return BadClient(*self.args)

    def __str__(self) -> str:
        return f"{self.called} failed in round {self.round}, stage {self.stage}: {self.reason}"
