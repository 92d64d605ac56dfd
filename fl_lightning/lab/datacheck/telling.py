"""A run that begins with what is odd about its table's columns."""

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
    """Says the worst findings of `check-data` once nothing has been refused."""

    def on_fit_start(self, run: RunContext) -> None:
        """Read the table's silos and compare them: of 100,000 rows it takes some seconds."""
        if run.is_main:
            for line in silos.warning_lines(run.config.data):
                log.say(line)


def assembled(
    fabric: Fabric, config: Config, folder: Path, callbacks: list[Callback]
) -> Federation:
    """The federation of `config`, which says its findings (`put_together` of `run.fit`)."""
    from fl_lightning.run import assemble

    return assemble(
        fabric,
        config,
        folder,
        [*callbacks, ColumnFindings()],
    )
