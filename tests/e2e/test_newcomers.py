"""Clients that are held out: by each kind of rule they get the same model on two processes, and after a break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .test_contract import NEEDS

RULES = ("fedavg", "fedem", "fedmd", "fedrep", "fesem", "kapc", "knnper", "local", "perfedavg", "pfedhn")
"""One method for each kind of rule; tests/test_newcomers.py has them all, in one process."""
HELD = "--data.held_out_clients 0.2 --evaluation.newcomer_samples [0,5]"


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_unseen_clients_on_two_processes_and_after_a_break(
    fit: Callable[..., Path], small: Callable[..., list[str]], on_ranks: Callable[..., None], record: Any, name: str
) -> None:
    flags = f"--method {name} {NEEDS.get(name, '')} {HELD}"
    on_ranks(2, small("two", flags))
    one = record(fit("one", flags))
    assert len(one.newcomers) == 2
    assert record(Path("runs/two")) == one, "two processes"
    fit("parts", flags, "--federation.rounds 2")
    assert record(fit("parts", flags, "--resume")) == one, "resumed"
