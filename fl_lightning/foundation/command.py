"""The command that this process runs, for messages that say how to go on."""

from __future__ import annotations

import shlex

words: list[str] = []
"""What was typed behind `fl-train`; empty where a script runs."""


def line(*default: str) -> str:
    """Return the command line as it was typed; in a script that of `default`."""
    return shlex.join(["fl-train", *(words or default)])
