"""The two ways a run may end badly, each with its exit code (docs/reference.md, "Exit codes")."""

from __future__ import annotations


class BadInput(Exception):
    """What the user gave cannot work: one line that names the key, the value and what is allowed; exit code 2."""

    exit_code = 2

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(f"{key}: {value!r} is not allowed; {allowed}")
        self.key, self.value, self.allowed = key, value, allowed

    def __reduce__(self) -> tuple[type[BadInput], tuple[str, object, str]]:
        return type(self), (self.key, self.value, self.allowed)


class RunFailed(Exception):
    """A run that began well cannot go on (a client failed, a disk is full): one line; exit code 1."""

    exit_code = 1
