"""The command that this process runs, for messages that say how to go on."""

from __future__ import annotations

import shlex

words: list[str] = []
"""What was typed behind `fl-train`; empty where a script runs."""


def line(*default: str) -> str:
    """Returns the command line as it was typed; in a script the one that `default` gives."""
    return shlex.join(["fl-train", *(words or default)])
