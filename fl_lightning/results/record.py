"""What a round leaves behind: its numbers, who received whom, and what travelled. Read without
torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

KINDS = ("parameters", "buffers", "statistics", "other")
"""What bytes are counted as. Papers print parameters alone; buffers are normalisation's running
statistics, statistics are numbers about a client's data or training, other is what a method
exchanges beside models (prototypes, predictions)."""


@dataclass
class RelationView:
    """The cohort's part of the relation cube, ready to be drawn: who received whom in a round,
    layer by layer.

    `rows[a, l, b]` is the weight of client `sources[b]`'s layer `layers[l]` in what client
    `receivers[a]` receives.
    """

    rows: np.ndarray
    receivers: list[int]
    layers: list[str]
    sources: list[int]


@dataclass
class RoundRecord:
    """One round, as every rank sees it after the exchange of results. Observers may add metrics and
    images."""

    round: int
    cohort: list[int]
    metrics: dict[str, float]
    """The row of `metrics.csv`, without `round`; a value not measured in this round is absent."""
    clients: list[dict[str, float]]
    """The rows of `clients.csv` in the order of client numbers, each with `client`."""
    relation: RelationView
    layers: list[str]
    """The layers of all architectures, in the order of `traffic` and `sent`."""
    traffic: np.ndarray
    """Bytes that travelled, int64 (clients, 2, L + 1, 4): download and upload of each row of
    `clients`, by layer (the last: what is beside the model) and kind (`KINDS`)."""
    sent: np.ndarray
    """Bool (clients, 2, L): layers whose own parameters travelled, in each direction."""
    images: dict[str, np.ndarray] = field(default_factory=dict)
    """Pictures by name, uint8 arrays of shape (height, width, 3), or `np.asarray` waits for one;
    loggers pass them on. Rank 0 only."""
    failures: list[dict[str, int | str]] = field(default_factory=list)
    """The rows of `failures.csv`: `client`, `stage`, `reason`, `outcome` of each failure that the
    run survived."""
