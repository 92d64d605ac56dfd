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
    """What the user gave cannot work: one line that names the key, the value and what is allowed;
    exit code 2."""

    exit_code = 2

    def __init__(self, key: str, value: object, allowed: str) -> None:
        if SECRET.search(key):
            value = "***"
        super().__init__(_sentence(key, value, allowed))
        self.key, self.value, self.allowed = key, value, allowed

    def __reduce__(self) -> tuple[type[BadInput], tuple[str, object, str]]:
        return type(self), (self.key, self.value, self.allowed)


def check(key: str, value: object, holds: bool, allowed: str) -> None:
    """Raise `BadInput` for `key` unless `holds`."""
    if not holds:
        raise BadInput(key, value, allowed)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message; the name of its class where it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]


class Damaged(BadInput, ValueError):
    """A file of the run folder that the user named cannot be read."""


def _sentence(key: str, value: object, allowed: str) -> str:
    """What is wrong, in words: something is missing, there is no such thing, or the value is not
    allowed."""
    if (value is None and allowed.startswith(NOT_GIVEN)) or (value == "" and allowed == NO_VALUE):
        return f"{key}: {allowed}"
    if allowed.startswith(f"no such {key}"):
        return f"there is {allowed.replace('such ', '', 1).replace(key, f'{key} {value!r}', 1)}"
    text = repr(value)
    shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return f"{key}: {shown} is not allowed; {allowed}"


class RunFailed(Exception):
    """A run that began well cannot go on (a client failed, a disk is full): one line; exit code
    1."""

    exit_code = 1


class MachineFailed(RunFailed):
    """The machine is at fault, not what the run was asked to do: a disk refuses, a process is
    gone."""


class BadClient(RunFailed):
    """One client failed: in which round, at which stage and why. `federation.on_bad_client` says
    what follows.

    Stages are `data`, `download`, `training`, `evaluation` and `upload`.
    """

    def __init__(self, client: int, round: int, stage: str, reason: str, called: str = "") -> None:
        """`called`: the client in words, its name included where it has one."""
        # as they are: a pickled error is made from them again
        super().__init__(client, round, stage, reason, called)
        self.client, self.round, self.stage, self.reason = client, round, stage, reason
        self.called = called or f"client {client}"

    def bare(self) -> BadClient:
        """The same without its traceback, whose frames would keep the failed visit's tensors
        alive."""
        return BadClient(*self.args)

    def __str__(self) -> str:
        return f"{self.called} failed in round {self.round}, stage {self.stage}: {self.reason}"
