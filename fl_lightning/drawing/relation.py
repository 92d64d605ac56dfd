"""Pictures of who holds which classes, how a client weighs the others' layers, and who receives
from whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fl_lightning.drawing.heatmap import heatmap
from fl_lightning.results.record import RelationView


def draw_split(
    counts: np.ndarray, names: Sequence[str] = (), classes: Sequence[str] = ()
) -> np.ndarray:
    """Classes × clients, training samples by client and class (N, classes); uint8 (height, width,
    3).

    `names` of clients and of `classes`; numbers where there are none.
    """
    rows, columns = called(range(counts.shape[1]), classes), called(range(len(counts)), names)
    title = "Training samples by client and class"
    return heatmap(
        counts.T,
        rows,
        columns,
        title,
        "client",
        "class",
        counts=True,
        numbers=True,
    )


def called(numbers: Sequence[int], names: Sequence[str]) -> list[int | str]:
    """Labels of these places: names that are no numbers, else numbers, which a picture thins where
    they would collide."""
    if not names:
        return list(numbers)
    chosen = [names[number] for number in numbers]
    # as they are written: not 007
    if all(name.isdecimal() and str(int(name)) == name for name in names):
        return [int(name) for name in chosen]
    return [*chosen]


def draw_overview(view: RelationView, t: int, names: Sequence[str] = ()) -> np.ndarray:
    """Receivers × sources, mean over the layers; uint8 (height, width, 3)."""
    receivers, sources = called(view.receivers, names), called(view.sources, names)
    scope = f"mean over {len(view.layers)} layers" if len(view.layers) > 1 else view.layers[0]
    title = f"Round {t}: who receives from whom ({scope})"
    values = view.rows.mean(axis=1)
    return heatmap(
        values,
        receivers,
        sources,
        title,
        "source client",
        "receiving client",
    )


def draw_client(
    view: RelationView,
    client: int,
    t: int,
    names: Sequence[str] = (),
) -> np.ndarray:
    """Layers × sources: what `client` receives, layer by layer; uint8 (height, width, 3)."""
    values, sources = view.rows[view.receivers.index(client)], called(view.sources, names)
    [name] = called([client], names)
    title = f"Round {t}: how much client {name} receives of each client's layers"
    return heatmap(
        values,
        view.layers,
        sources,
        title,
        "source client",
        "layer",
        numbers=True,
    )
