"""Pictures of who holds which classes, how each client weighs the others' layers, and who receives from whom."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fl_lightning import log
from fl_lightning.callbacks.base import Observer
from fl_lightning.config import are_numbers, check
from fl_lightning.core import RelationView, RoundRecord, RunContext
from fl_lightning.drawing.heatmap import save_png
from fl_lightning.drawing.relation import draw_relation, draw_split
from fl_lightning.errors import MachineFailed
from fl_lightning.results.columns import spread
from fl_lightning.results.folder import RunFolder

DRAWN = 6
"""Rounds that are drawn unless told otherwise. The report shows up to a hundred from `relation/`, without pictures."""


class Heatmaps(Observer):
    """Draw layers × clients for chosen receivers (as figure 2 of KAPC does), and receivers × sources over all layers.

    Colours run from 0 to the greatest weight, or to 1.5 times the greatest weight given to *another* client where that
    is less: a client's own weight is often so much greater that, with it on the scale, the rest would be one colour.
    A round's pictures take some 30 ms. If they cannot be written, a run says so once and goes on.
    """

    stage = "draw"

    def __init__(self, every: int | None = None, clients: list[int] | None = None, png: bool = True) -> None:
        """`every`: rounds between pictures (the last round always has them); None: six rounds spread over the run, so
        that drawing costs a run nothing that shows, however many rounds it has. `clients`: whose rows to draw; None: 0,
        1 and 2 where they take part, else the first three of the cohort. `png`: also write `figures/` in the run
        folder.
        """
        fine = every is None or every >= 1
        check("callbacks.heatmaps.every", every, fine, "it must be at least 1, or null")
        check("callbacks.heatmaps.clients", clients, are_numbers(clients), "it must be a list of client numbers")
        self.every, self.clients, self.png = every, clients, png
        self._split_drawn = self._warned = False

    def on_fit_start(self, run: RunContext) -> None:
        """Raise `BadInput` for a client that does not exist. Draw what a run that is resumed was killed over."""
        for client in self.clients or []:
            known = 0 <= client < run.clients
            check("callbacks.heatmaps.clients", client, known, f"clients are numbered 0 to {run.clients - 1}")
        folder = RunFolder(run.folder)
        for t in range(1, run.resumed_from + 1 if run.is_main and self.png else 1):
            missing = self._due(run, t) and not self._file(run, f"round-{t:04d}-overview").exists()
            if missing and folder.relation_file(t).exists():
                self._relation(run, folder.read_relation(t), t)

    def on_round_end(self, run: RunContext, record: RoundRecord) -> None:
        """Draw the pictures into `record.images`."""
        if not run.is_main:
            return
        if run.data.task == "classification" and run.data.holds_all and not self._split_drawn:
            self._split_drawn = True
            split = draw_split(run.data.class_counts, run.data.client_names, run.data.class_names)
            self._save(run, "split", split)
            record.images["data/split"] = split
        if self._due(run, record.round):
            record.images |= self._relation(run, record.relation, record.round)

    def _relation(self, run: RunContext, view: RelationView, t: int) -> dict[str, np.ndarray]:
        """The pictures of round `t`."""
        if view.rows.size == 0:
            return {}
        images = draw_relation(view, self._chosen(view.receivers), t, run.data.client_names)
        for name, image in images.items():
            self._save(run, f"round-{t:04d}-{name}", image)
        return {f"relation/{name}": image for name, image in images.items()}

    def _save(self, run: RunContext, name: str, image: np.ndarray) -> None:
        try:
            if self.png:
                save_png(image, self._file(run, name))
        except (OSError, MachineFailed) as error:
            if not self._warned:
                log.say(f"callbacks.heatmaps: figures/{name}.png cannot be written ({error}); the run goes on")
            self._warned = True

    def _due(self, run: RunContext, round: int) -> bool:
        if self.every is None:
            return round in spread(run.rounds, DRAWN)
        return round % self.every == 0 or round == run.rounds

    def _file(self, run: RunContext, name: str) -> Path:
        return run.folder / "figures" / f"{name}.png"

    def _chosen(self, receivers: list[int]) -> list[int]:
        if self.clients is not None:
            return [client for client in self.clients if client in receivers]
        return [0, 1, 2] if {0, 1, 2} <= set(receivers) else receivers[:3]
