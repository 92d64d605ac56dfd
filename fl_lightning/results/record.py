"""The record of a round: its numbers, its relation and its traffic. Can be read without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

KINDS = ("parameters", "buffers", "statistics", "other")
"""Kinds of bytes that are counted. Papers report parameters only. Buffers are the running
statistics of normalisation; statistics are numbers about a client's data or training; other is
everything that a method sends beside models (prototypes, predictions)."""


@dataclass
class RelationView:
    """The cohort's part of the relation cube in one round.

    In `rows` [receivers, layers, sources], `rows[a, l, b]` is the weight of client `sources[b]` in
    layer `layers[l]` of the model that client `receivers[a]` receives.
    """

    rows: np.ndarray
    receivers: list[int]
    layers: list[str]
    sources: list[int]


@dataclass
class RoundRecord:
    """Results of one round, the same on every rank. Observers may add metrics and images."""

    round: int
    cohort: list[int]
    metrics: dict[str, float]
    """Row of `metrics.csv`, without `round`; values that were not measured in this round are
    absent."""
    clients: list[dict[str, float]]
    """Rows of `clients.csv`, in the order of client numbers, each with `client`."""
    relation: RelationView
    layers: list[str]
    """Layers of all architectures, in the order of `traffic` and `sent`."""
    traffic: np.ndarray
    """Bytes sent, int64 (clients, 2, L + 1, 4): download and upload of each row of `clients`, by
    layer (the last: everything beside the model) and kind (`KINDS`)."""
    sent: np.ndarray
    """Whether a layer's own parameters were sent, in each direction, bool (clients, 2, L)."""
    images: dict[str, np.ndarray] = field(default_factory=dict)
    """Pictures by name: uint8 arrays (height, width, 3), or objects that `np.asarray` turns into
    one when it is drawn; loggers pass them on. Only on rank 0."""
    failures: list[dict[str, int | str]] = field(default_factory=list)
    """Rows of `failures.csv`: `client`, `stage`, `reason` and `outcome` of each failure that the
    run survived."""
