"""Prints suspicious columns of the table at the start of a run."""

from __future__ import annotations

from pathlib import Path

from lightning import Fabric

from fl_lightning.callbacks.base import Callback, Observer
from fl_lightning.configuration.config import Config
from fl_lightning.core import RunContext
from fl_lightning.data import silos
from fl_lightning.engine.federation import Federation
from fl_lightning.foundation import log


class ColumnFindings(Observer):
    """Prints the worst findings of `check-data` at the start of a run, after all settings have been
    checked."""

    def on_fit_start(self, run: RunContext) -> None:
        """Compare the silos' columns, which takes some seconds for 100,000 rows, and print the
        findings."""
        if run.is_main:
            for line in silos.warning_lines(run.config.data):
                log.say(line)


def assemble_with_findings(
    fabric: Fabric, config: Config, folder: Path, callbacks: list[Callback]
) -> Federation:
    """Builds the federation as `run.assemble` does, with the observer `ColumnFindings`."""
    from fl_lightning.run import assemble

    return assemble(
        fabric,
        config,
        folder,
        [*callbacks, ColumnFindings()],
    )
