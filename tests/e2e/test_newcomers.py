"""Clients that are held out: whatever the method, they get the same model on two processes, and after a break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_lightning import catalogue

from .test_contract import NEEDS

HELD = "--data.held_out_clients 0.2 --evaluation.newcomer_samples [0,5]"


@pytest.mark.slow
def test_unseen_clients_on_two_processes_and_after_a_break(
    fit: Callable[..., Path], small: Callable[..., list[str]], on_ranks: Callable[..., None], record: Any
) -> None:
    cases = {name: f"--method {name} {NEEDS.get(name, '')} {HELD}" for name in catalogue.table("methods")}
    on_ranks(2, *(small(f"{name}-two", flags) for name, flags in cases.items()))
    for name, flags in cases.items():
        one = record(fit(name, flags))
        assert len(one.newcomers) == 2, name
        assert record(Path("runs") / f"{name}-two") == one, f"{name}: two processes"
        fit(f"{name}-parts", flags, "--federation.rounds 2")
        assert record(fit(f"{name}-parts", flags, "--resume")) == one, f"{name}: resumed"
