"""Pictures of who holds which classes, how each client weighs the others' layers, and who receives from whom."""

from __future__ import annotations

import numpy as np

from fl_lightning.callbacks.base import Observer
from fl_lightning.config import are_numbers, check
from fl_lightning.core import RelationView, RoundRecord, Run
from fl_lightning.drawing import heatmap, save_png, top
from fl_lightning.sections import spread

DRAWN = 6
"""Rounds that are drawn unless told otherwise. The report shows up to a hundred from `relation/`, without pictures."""


class Heatmaps(Observer):
    """Draw layers × clients for chosen receivers (as figure 2 of KAPC does), and receivers × sources over all layers.

    Colours run from 0 to the greatest weight, or to 1.5 times the greatest weight given to *another* client where that
    is less: a client's own weight is often so much greater that, with it on the scale, the rest would be one colour.
    """

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
        self._split_drawn = False

    def on_fit_start(self, run: Run) -> None:
        """Raise `BadInput` for a client that does not exist."""
        for client in self.clients or []:
            known = 0 <= client < run.clients
            check("callbacks.heatmaps.clients", client, known, f"clients are numbered 0 to {run.clients - 1}")

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Add the pictures to `record.images`, and write them."""
        if not run.is_main:
            return
        if run.data.task == "classification" and not self._split_drawn:
            self._split_drawn = True
            self._show(run, record, "data/split", "split", draw_split(run.data.class_counts))
        if not self._due(run, record.round) or record.relation.rows.size == 0:
            return
        pictures = {
            f"client-{client:03d}": draw_client(record.relation, client, record.round)
            for client in self._chosen(record.relation.receivers)
        }
        pictures["overview"] = draw_overview(record.relation, record.round)
        for name, picture in pictures.items():
            self._show(run, record, f"relation/{name}", f"round-{record.round:04d}-{name}", picture)

    def _due(self, run: Run, round: int) -> bool:
        if self.every is None:
            return round in spread(run.rounds, DRAWN)
        return round % self.every == 0 or round == run.rounds

    def _show(self, run: Run, record: RoundRecord, name: str, file: str, picture: np.ndarray) -> None:
        record.images[name] = picture
        if self.png:
            save_png(picture, run.folder / "figures" / f"{file}.png")

    def _chosen(self, receivers: list[int]) -> list[int]:
        if self.clients is not None:
            return [client for client in self.clients if client in receivers]
        return [0, 1, 2] if {0, 1, 2} <= set(receivers) else receivers[:3]


def draw_split(counts: np.ndarray) -> np.ndarray:
    """Classes × clients: training samples by client and class (N, classes); uint8 (height, width, 3)."""
    clients, classes = (list(range(number)) for number in counts.shape)
    return heatmap(counts.T, classes, clients, "Training samples by client and class", "client", "class")


def draw_client(view: RelationView, client: int, round: int) -> np.ndarray:
    """Layers × sources: what `client` receives, layer by layer; uint8 (height, width, 3)."""
    values = view.rows[view.receivers.index(client)]
    own = np.broadcast_to(np.array(view.sources) == client, values.shape)
    title = f"Round {round}: how much client {client} receives of each client's layers"
    return heatmap(values, view.layers, view.sources, title, "source client", "layer", high=top(values, own))


def draw_overview(view: RelationView, round: int) -> np.ndarray:
    """Receivers × sources, mean over the layers; uint8 (height, width, 3)."""
    values = view.rows.mean(axis=1)
    own = np.array(view.receivers)[:, None] == np.array(view.sources)
    layers = f"mean over {len(view.layers)} layers" if len(view.layers) > 1 else view.layers[0]
    title = f"Round {round}: who receives from whom ({layers})"
    labels = ("source client", "receiving client")
    return heatmap(values, view.receivers, view.sources, title, *labels, high=top(values, own))
