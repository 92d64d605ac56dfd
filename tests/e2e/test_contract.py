"""What every method of the project must hold, new ones included: neither processes nor a break change a number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_lightning import catalogue

PUBLIC = "--data.public held_back --method.samples 24"
NEEDS = {
    **dict.fromkeys(("fedora", "fedfomo", "knnper"), "--data.validation 0.2"),
    "lgfedavg": "--method.layers 1",
    **dict.fromkeys(("fedmd", "simpfd", "topkpfd", "ktpfl"), PUBLIC),
    **dict.fromkeys(("feddf", "pfeddf"), f"{PUBLIC} --method.steps 5"),
}
"""What a method asks for beyond the defaults."""
SHARES = ("1.0", "0.5")
CASES = {
    f"{method}-{share}": f"--method {method} --federation.participation {share} {NEEDS.get(method, '')}"
    for method in catalogue.table("methods")
    for share in SHARES
}


@pytest.mark.slow
def test_every_method_on_two_processes_and_in_two_parts(
    fit: Callable[..., Path], small: Callable[..., list[str]], on_ranks: Callable[..., None], record: Any
) -> None:
    assert len(CASES) == 2 * len(catalogue.table("methods")) >= 20
    whole, half = "--federation.rounds 4", "--federation.rounds 2"
    for name, flags in CASES.items():
        fit(f"{name}-begun", flags, half)
    on_ranks(
        2,
        *(small(f"{name}-two", flags, whole) for name, flags in CASES.items()),
        *(small(f"{name}-begun", flags, whole, "--resume") for name, flags in CASES.items()),
    )
    for name, flags in CASES.items():
        one = record(fit(name, flags, whole))
        assert one.weights, name
        fit(f"{name}-parts", flags, half)
        assert record(fit(f"{name}-parts", flags, whole, "--resume")) == one, f"{name}: resumed"
        for other in ("two", "begun"):
            assert record(Path("runs") / f"{name}-{other}") == one, f"{name}: {other}"
