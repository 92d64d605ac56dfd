"""Reads docstrings."""

from __future__ import annotations

import inspect


def first_paragraph(docstring: str | None) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join(inspect.cleandoc(docstring or "").partition("\n\n")[0].split())
