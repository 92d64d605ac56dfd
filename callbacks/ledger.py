"""Pictures of a whole run: accuracy by round, how much travelled, which layers, and what accuracy that bought."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fl_lightning.callbacks.pictures import Pictures
from fl_lightning.config import check
from fl_lightning.core.run import Run
from fl_lightning.drawing import ledger
from fl_lightning.record import RelationView, RoundRecord
from fl_lightning.results.folder import RunFolder


class Ledger(Pictures):
    """Draw the bytes and the layers that travelled, by round; with a channel, accuracy against time.

    `figures/ledger-*.png` cover the whole run, rounds before a resume included. Those that would be one colour (every
    layer always travelled) are left out.
    """

    def __init__(self, every: int | None = None) -> None:
        """`every`: rounds between drawings, each over the one before; null: draw once, in the last round."""
        super().__init__()
        check("callbacks.ledger.every", every, every is None or every >= 1, "it must be at least 1, or null")
        self.every = every

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Have the pictures drawn; they are in `record.images`."""
        due = record.round == run.rounds or (self.every is not None and record.round % self.every == 0)
        if not run.is_main or not due or not run.layer_names:
            return
        rows = [row for row in RunFolder(run.folder).read_metrics() if row["round"] < record.round]
        rows.append({"round": record.round, **record.metrics})
        files = {name: run.folder / "figures" / f"ledger-{name}.png" for name in ledger.NAMES}
        bare = replace(record, images={}, relation=RelationView(np.zeros((0, 0, 0)), [], [], []))
        record.images |= self.have_drawn(
            "ledger", ledger.draw, run.folder.absolute(), bare, rows, run.judge, files=files
        )
