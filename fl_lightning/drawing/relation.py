"""Pictures of the data split, of the relation, and of one client's weights by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fl_lightning.drawing.heatmap import heatmap
from fl_lightning.results.record import RelationView


def draw_split(
    counts: np.ndarray,
    names: Sequence[str] = (),
    classes: Sequence[str] = (),
) -> np.ndarray:
    """Draw the training samples by class (rows) and client (columns), uint8 (height, width, 3).

    Args:
        counts: samples (N, classes).
        names: of clients; empty: numbers.
        classes: their names; empty: numbers.
    """
    rows = axis_labels(range(counts.shape[1]), classes)
    columns = axis_labels(range(len(counts)), names)
    return heatmap(
        counts.T,
        rows,
        columns,
        "Training samples by client and class",
        "client",
        "class",
        counts=True,
        numbers=True,
    )


def axis_labels(numbers: Sequence[int], names: Sequence[str]) -> list[int | str]:
    """Return the labels of `numbers`: their `names`; or numbers, if there are no names or all names
    are numbers (a picture thins out numbers that would overlap)."""
    if not names:
        return list(numbers)
    chosen = [names[number] for number in numbers]
    # names as 007 are no numbers
    if all(name.isdecimal() and str(int(name)) == name for name in names):
        return [int(name) for name in chosen]
    return [*chosen]


def draw_overview(view: RelationView, t: int, names: Sequence[str] = ()) -> np.ndarray:
    """Draw the weights of receivers × sources, mean over the layers; uint8 (height, width, 3).

    Args:
        view: the relation of a round.
        t: number of the round, for the title.
        names: names of all clients; empty: numbers.
    """
    receivers, sources = axis_labels(view.receivers, names), axis_labels(view.sources, names)
    scope = f"mean over {len(view.layers)} layers" if len(view.layers) > 1 else view.layers[0]
    title = f"Round {t}: who receives from whom ({scope})"
    return heatmap(
        view.rows.mean(axis=1),
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
    """Draw layers × sources: the weights with which `client` receives each layer; uint8 (height,
    width, 3).

    Args:
        view: the relation of a round.
        client: number of the receiver.
        t: number of the round, for the title.
        names: names of all clients; empty: numbers.
    """
    values, sources = view.rows[view.receivers.index(client)], axis_labels(view.sources, names)
    [name] = axis_labels([client], names)
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
