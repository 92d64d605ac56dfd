"""Pictures of who holds which classes, how a client weighs the others' layers, and who receives from whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fl_lightning.drawing.heatmap import heatmap, top
from fl_lightning.record import RelationView


def draw_split(counts: np.ndarray) -> np.ndarray:
    """Classes × clients, training samples by client and class (N, classes); uint8 (height, width, 3)."""
    clients, classes = (list(range(number)) for number in counts.shape)
    return heatmap(counts.T, classes, clients, "Training samples by client and class", "client", "class")


def draw_relation(view: RelationView, clients: Sequence[int], t: int) -> dict[str, np.ndarray]:
    """`client-000` and so on of the receivers `clients`, and `overview` of all; uint8 (height, width, 3)."""
    images = {f"client-{client:03d}": draw_client(view, client, t) for client in clients}
    return images | {"overview": draw_overview(view.rows.mean(axis=1), view.receivers, view.sources, view.layers, t)}


def draw_client(view: RelationView, client: int, round: int) -> np.ndarray:
    """Layers × sources: what `client` receives, layer by layer; uint8 (height, width, 3)."""
    values = view.rows[view.receivers.index(client)]
    own = np.broadcast_to(np.array(view.sources) == client, values.shape)
    title = f"Round {round}: how much client {client} receives of each client's layers"
    return heatmap(values, view.layers, view.sources, title, "source client", "layer", high=top(values, own))


def draw_overview(
    values: np.ndarray, receivers: Sequence[int], sources: Sequence[int], layers: Sequence[str], round: int
) -> np.ndarray:
    """Receivers × sources, mean over the layers; uint8 (height, width, 3)."""
    own = np.array(receivers)[:, None] == np.array(sources)
    scope = f"mean over {len(layers)} layers" if len(layers) > 1 else layers[0]
    title = f"Round {round}: who receives from whom ({scope})"
    labels = ("source client", "receiving client")
    return heatmap(values, receivers, sources, title, *labels, high=top(values, own))
