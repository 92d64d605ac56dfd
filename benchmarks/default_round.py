"""A round as it comes, with every kind of model scored, against a hand-written loop that scores once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bare import STEPPERS, BareFedAvg
from measure import Row, compared, interleaved
from workloads import Workload

from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.kapc import KAPC

GOALS = {"mnist-cnn-b10": {"FedAvg": 1.05, "KAPC": 1.15}, "mnist-cnn-b64": {"FedAvg": 1.10, "KAPC": 1.15}}
"""Of the rows, by workload and method."""
TESTS = 0.25
"""Share of each client's samples that is its test part, drawn from training and test data together."""


def as_it_comes(workload: Workload, pairs: int) -> list[Row]:
    """Rounds of FedAvg (before, after, global) and KAPC (before, after) against the faster hand loop of FedAvg."""
    workload = replace(workload, data=replace(workload.data, client_test=TESTS))
    data, source = workload.load()
    methods = {"FedAvg": FedAvg(), "KAPC": KAPC()}
    with tempfile.TemporaryDirectory() as folder:
        federations = {name: workload.federation(m, data, Path(folder), judge="auto") for name, m in methods.items()}
        rounds: dict[str, Callable[[int], Any]] = {name: fed.round for name, fed in federations.items()}
        rounds |= {s: BareFedAvg(workload.config(), data, workload.initial(data), s).round for s in STEPPERS}
        counts = dict.fromkeys(rounds, 0)

        def take(side: str) -> None:
            counts[side] += 1
            rounds[side](counts[side])

        seconds = interleaved({side: partial(take, side) for side in rounds}, pairs)
    floor = min(STEPPERS, key=lambda s: median(seconds[s]))
    goals = GOALS.get(workload.name, {})
    rows = []
    for name in methods:
        ratios = [a / b for a, b in zip(seconds[name], seconds[floor], strict=True)]
        note = f"{source}; lowest to highest {min(ratios):.2f} to {max(ratios):.2f}"
        goal = f"<= {goals[name]}" if name in goals else ""
        what, against = f"a default round of {name}", f"bare loop that scores once ({floor})"
        rows.append(compared(f"default-{workload.name}", what, seconds[name], against, seconds[floor], 1, goal, note))
    return rows
