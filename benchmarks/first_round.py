"""A callback that ends the process when the first round begins: what a run costs before it starts."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

from fl_lightning.callbacks.base import Observer
from fl_lightning.core.run import RunContext


class FirstRound(Observer):
    """Writes CPU seconds and peak memory so far to `path`, and leaves at once."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_round_start(self, run: RunContext, round: int, cohort: list[int]) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.path.write_text(json.dumps({"seconds": time.process_time(), "peak_mib": peak}))
        os._exit(0)
