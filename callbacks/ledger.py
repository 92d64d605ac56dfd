"""The former callback `ledger`, kept as a name for one version: its pictures are made from the run folder now."""

from __future__ import annotations

from fl_lightning import log
from fl_lightning.callbacks.base import Observer
from fl_lightning.core import RunContext


class Ledger(Observer):
    """Draw nothing: `fl-train report RUN --figures png` draws bytes, accuracy and costs of any run."""

    def __init__(self, every: int | None = None) -> None:
        """`every`: not read."""

    def on_fit_start(self, run: RunContext) -> None:
        """Warn once."""
        if run.is_main:
            log.say(f"callbacks.ledger draws nothing any more; use: fl-train report {run.folder} --figures png")
