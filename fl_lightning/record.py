"""What a round leaves behind: its numbers, who received whom, and what travelled. Read without torch."""

from __future__ import annotations

from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

KINDS = ("parameters", "buffers", "statistics", "other")
"""What bytes are counted as. Papers print parameters alone; buffers are normalisation's running statistics, statistics
are numbers about a client's data or training, other is what a method exchanges beside models (prototypes,
predictions)."""


@dataclass
class RelationView:
    """The cohort's part of the relation cube, ready to be drawn: who received whom in a round, layer by layer.

    `rows[a, l, b]` is the weight of client `sources[b]`'s layer `layers[l]` in what client `receivers[a]` receives.
    """

    rows: np.ndarray
    receivers: list[int]
    layers: list[str]
    sources: list[int]


PATIENCE = 180.0
"""Seconds to wait for pictures, at most: a run's last ones take some 2 of CPU time, on a crowded machine many more. A
process that has died is noticed at once."""


class Picture:
    """A picture that is drawn beside the training: uint8 (height, width, 3), once it is there."""

    def __init__(self, done: Future[dict[str, np.ndarray]], name: str) -> None:
        self._done, self._name = done, name

    @property
    def ready(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._done.done()

    @property
    def failure(self) -> str:
        """Why it is not there; empty where it is, or where there was nothing to draw."""
        if not self.ready:
            return "they take too long"
        return str(self._done.exception() or "")

    def wait(self, seconds: float) -> None:
        """Wait so long, at most, until it is ready."""
        wait([self._done], max(seconds, 0.0))

    def array(self, seconds: float = PATIENCE) -> np.ndarray | None:
        """The picture, waited for so long at most; None if there is none: a failure, or nothing to see."""
        self.wait(seconds)
        return None if self.failure else self._done.result().get(self._name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """For numpy. Raises `LookupError` if there is none."""
        if (found := self.array()) is None:
            raise LookupError(f"there is no picture {self._name}")
        return np.asarray(found, dtype)


@dataclass
class RoundRecord:
    """One round, as every rank sees it after the exchange of results. Observers may add metrics and images."""

    round: int
    cohort: list[int]
    metrics: dict[str, float]
    """The row of `metrics.csv`, without `round`; a value not measured in this round is absent."""
    clients: list[dict[str, float]]
    """The rows of `clients.csv` in the order of client numbers, each with `client`."""
    relation: RelationView
    layers: list[str]
    """The layers of all architectures, as they stand in `traffic` and `sent`."""
    traffic: np.ndarray
    """Bytes that travelled, int64 (clients, 2, L + 1, 4): download and upload of each row of `clients`, by layer (the
    last: what is beside the model) and kind (`KINDS`)."""
    sent: np.ndarray
    """Bool (clients, 2, L): layers whose own parameters travelled, in each direction."""
    images: dict[str, np.ndarray | Picture] = field(default_factory=dict)
    """Pictures by name, uint8 arrays of shape (height, width, 3), or `np.asarray` waits for one; loggers pass them on.
    Rank 0 only."""
    failures: list[dict[str, int | str]] = field(default_factory=list)
    """The rows of `failures.csv`: `client`, `stage`, `reason`, `outcome` of whatever went wrong and was borne."""
