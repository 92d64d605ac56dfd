"""Pictures of who holds which classes, how a client weighs the others' layers, and who receives from whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fl_lightning.drawing.heatmap import heatmap, top
from fl_lightning.record import RelationView


def draw_split(counts: np.ndarray, names: Sequence[str] = (), classes: Sequence[str] = ()) -> np.ndarray:
    """Classes × clients, training samples by client and class (N, classes); uint8 (height, width, 3).

    `names` of clients and of `classes`; numbers where there are none.
    """
    rows, columns = called(range(counts.shape[1]), classes), called(range(len(counts)), names)
    return heatmap(counts.T, rows, columns, "Training samples by client and class", "client", "class")


def called(numbers: Sequence[int], names: Sequence[str]) -> list[int | str]:
    """Labels: names that are no numbers, else numbers, which a picture thins where they would collide."""
    numeric = all(name.isdecimal() and str(int(name)) == name for name in names)  # as they are written: not 007
    return [int(names[n]) if numeric and names else names[n] if names else n for n in numbers]


def draw_relation(
    view: RelationView, clients: Sequence[int], t: int, names: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """`client-000` and so on of the receivers `clients`, and `overview`: receivers × sources, mean over the layers;
    uint8 (height, width, 3)."""
    images = {f"client-{client:03d}": draw_client(view, client, t, names) for client in clients}
    receivers, sources = called(view.receivers, names), called(view.sources, names)
    values, own = view.rows.mean(axis=1), np.array(view.receivers)[:, None] == np.array(view.sources)
    scope = f"mean over {len(view.layers)} layers" if len(view.layers) > 1 else view.layers[0]
    title = f"Round {t}: who receives from whom ({scope})"
    labels = ("source client", "receiving client")
    return images | {"overview": heatmap(values, receivers, sources, title, *labels, high=top(values, own))}


def draw_client(view: RelationView, client: int, round: int, names: Sequence[str] = ()) -> np.ndarray:
    """Layers × sources: what `client` receives, layer by layer; uint8 (height, width, 3)."""
    values = view.rows[view.receivers.index(client)]
    own = np.broadcast_to(np.array(view.sources) == client, values.shape)
    title = f"Round {round}: how much client {called([client], names)[0]} receives of each client's layers"
    return heatmap(
        values, view.layers, called(view.sources, names), title, "source client", "layer", high=top(values, own)
    )
