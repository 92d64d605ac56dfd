"""What is frozen lies once on every rank, and nowhere else, whatever the number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

FLAGS = (
    "--model fl_own_models.Frozen --callbacks checkpoint,fl_own_models.Where "
    "--callbacks.checkpoint.seconds 0"
    " --federation.participation 0.6 --optimizer.momentum 0.5 --optimizer.keep_state true"
)
WEIGHT, BIAS, VECTOR = 4 * 9 * 10, 10, 384
"""Numbers of the classifier, which is all that trains of `Frozen`, and of its vector (blocks begin
at multiples of 16). The momentum that stays with a client has a tensor of each of the first two
lengths."""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["kapc", "fedavg"])
def test_frozen_parts_lie_once_on_each_of_two_ranks(
    method: str,
    fit: Callable[..., Path],
    small: Callable[..., list[str]],
    on_ranks: Callable[..., None],
    record: Any,
    table: Any,
    workplace: Path,
) -> None:
    flags = f"{FLAGS} --method {method}"
    one = fit("one", flags, "--federation.rounds 4")
    on_ranks(
        2,
        small("two", flags, "--federation.rounds 2"),
        small("two", flags, "--federation.rounds 4 --resume"),
    )
    two = one.with_name("two")
    assert record(two) == record(one)
    initial = load_file(two / "checkpoints" / "initial.safetensors")
    frozen = {
        name.removeprefix("0.frozen."): t.tolist()
        for name, t in initial.items()
        if ".frozen." in name
    }
    assert {"conv.weight", "conv.bias", "norm.weight", "norm.bias", "norm.running_mean"} <= {
        *frozen
    }
    clients: list[int] = []
    for rank in (0, 1):
        noted = [json.loads((workplace / f"two-{rank}-{t}.json").read_text()) for t in (1, 2, 3, 4)]
        for first, second in (noted[:2], noted[2:]):  # in the same place, as it was
            assert first["frozen"] == second["frozen"]
        for after in noted:
            assert {name: held for name, (_, held) in after["frozen"].items()} == frozen
            assert after["lengths"] == [BIAS, WEIGHT, VECTOR]
        clients += noted[-1]["clients"]
    assert sorted(clients) == sorted(
        {int(row["client"]) for row in table(two, "clients.csv") if row["accuracy_after"]}
    )
    for row in table(two):
        assert int(row["upload_parameter_bytes"]) == 3 * 4 * (WEIGHT + BIAS)
    rows = [
        f for f in (two / "checkpoints").rglob("*.safetensors") if f.name != "initial.safetensors"
    ]
    held = [(name, t.numel()) for file in rows for name, t in load_file(file).items()]
    assert len(rows) >= 6 and not [
        name for name, _ in held if "frozen" in name or "conv" in name or "norm" in name
    ]
    assert {size for name, size in held if name != "fields.relation"} == {WEIGHT, BIAS, VECTOR}, (
        held
    )
