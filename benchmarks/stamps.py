"""A callback that notes when each round of a rank ends: by the clock, and in CPU seconds of the process."""

from __future__ import annotations

import json
import time
from pathlib import Path

from fl_lightning.callbacks.base import Observer
from fl_lightning.core.run import RunContext
from fl_lightning.record import RoundRecord


class Stamps(Observer):
    """Writes `PATH.RANK`, JSON of [clock, CPU] pairs, at the end."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.stamps: list[tuple[float, float]] = []

    def on_round_end(self, run: RunContext, record: RoundRecord) -> None:
        self.stamps.append((time.time(), time.process_time()))

    def on_close(self, run: RunContext) -> None:
        Path(f"{self.path}.{run.rank}").write_text(json.dumps(self.stamps))
