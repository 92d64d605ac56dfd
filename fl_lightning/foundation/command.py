"""The command line of this process, for messages that tell the user how to continue."""

from __future__ import annotations

import shlex

words: list[str] = []
"""Words typed behind `fl-train`; empty in a script."""


def line(*default: str) -> str:
    """Return the `fl-train` command line as it was typed; in a script, `fl-train` followed by the
    words `default`."""
    return shlex.join(["fl-train", *(words or default)])
