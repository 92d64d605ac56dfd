"""Callbacks that note the time: of each round of a rank, and of what a run costs before its first
round begins."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

from fl_lightning.callbacks.base import Observer
from fl_lightning.core import RoundRecord, RunContext


class Stamps(Observer):
    """Writes `PATH.RANK` at the end, JSON of [clock, CPU seconds of the process] when each round
    has ended."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.stamps: list[tuple[float, float]] = []

    def on_round_end(self, run: RunContext, record: RoundRecord) -> None:
        self.stamps.append((time.time(), time.process_time()))

    def on_close(self, run: RunContext) -> None:
        Path(f"{self.path}.{run.rank}").write_text(json.dumps(self.stamps))


class FirstRound(Observer):
    """Writes CPU seconds and peak memory to `path` when the first round begins, and ends the
    process."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_round_start(self, run: RunContext, round: int, cohort: list[int]) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.path.write_text(json.dumps({"seconds": time.process_time(), "peak_mib": peak}))
        os._exit(0)
