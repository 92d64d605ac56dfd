"""Pictures of the relation cube: how each client weighs the others' layers, and who receives from whom."""

from __future__ import annotations

import numpy as np

from fl_lightning.callbacks.base import Observer
from fl_lightning.config import are_numbers, check
from fl_lightning.core import RelationView, RoundRecord, Run
from fl_lightning.drawing import heatmap, save_png, top


class Heatmaps(Observer):
    """Draw layers × clients for chosen receivers (as figure 2 of KAPC does), and receivers × sources over all layers.

    Colours run from 0 to the greatest weight, or to 1.5 times the greatest weight given to *another* client where that
    is less: a client's own weight is often so much greater that, with it on the scale, the rest would be one colour.
    """

    def __init__(self, every: int = 1, clients: list[int] | None = None, png: bool = True) -> None:
        """`every`: rounds between pictures (the last round always has them). `clients`: whose rows to draw; None: 0, 1
        and 2 where they take part, else the first three of the cohort. `png`: also write `figures/` in the run folder.
        """
        check("callbacks.heatmaps.every", every, every >= 1, "it must be at least 1")
        check("callbacks.heatmaps.clients", clients, are_numbers(clients), "it must be a list of client numbers")
        self.every, self.clients, self.png = every, clients, png

    def on_fit_start(self, run: Run) -> None:
        """Raise `BadInput` for a client that does not exist."""
        for client in self.clients or []:
            known = 0 <= client < run.clients
            check("callbacks.heatmaps.clients", client, known, f"clients are numbered 0 to {run.clients - 1}")

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Add the pictures to `record.images`, and write them."""
        due = record.round % self.every == 0 or record.round == run.rounds
        if not run.is_main or not due or record.relation.rows.size == 0:
            return
        pictures = {
            f"client-{client:03d}": draw_client(record.relation, client, record.round)
            for client in self._chosen(record.relation.receivers)
        }
        pictures["overview"] = draw_overview(record.relation, record.round)
        for name, picture in pictures.items():
            record.images[f"relation/{name}"] = picture
            if self.png:
                save_png(picture, run.folder / "figures" / f"round-{record.round:04d}-{name}.png")

    def _chosen(self, receivers: list[int]) -> list[int]:
        if self.clients is not None:
            return [client for client in self.clients if client in receivers]
        return [0, 1, 2] if {0, 1, 2} <= set(receivers) else receivers[:3]


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
