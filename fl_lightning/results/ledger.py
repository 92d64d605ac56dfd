"""The ledger of a run: bytes and layers sent in all of its rounds, from the files of `traffic/`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fl_lightning.results.folder import UNREADABLE, RunFolder


def unread_note(rounds: list[int]) -> list[str]:
    """Return the notes for a report: one that lists `rounds`, whose traffic cannot be read, or none
    if `rounds` is empty."""
    if not rounds:
        return []
    more = f" and {len(rounds) - 10} more" if len(rounds) > 10 else ""
    return [f"files that cannot be read: round {', '.join(map(str, rounds[:10]))}{more}"]


@dataclass
class Ledger:
    """Layers and bytes sent in the rounds whose traffic can be read. Direction 0 is the download, 1
    the upload."""

    rounds: list[int]
    layers: list[str]
    share: np.ndarray
    """Share of the cohort that sent or received each layer, (2, L, rounds), 0 to 1."""
    kinds: dict[str, tuple[int, int]]
    """Bytes downloaded and uploaded in these rounds, by kind."""


def read_ledger(folder: RunFolder) -> tuple[Ledger | None, list[int]]:
    """Return the ledger of a run (None without traffic), and the rounds whose file cannot be
    read."""
    rounds: list[int] = []
    damaged: list[int] = []
    shares: list[np.ndarray] = []
    layers: list[str] = []
    kinds: dict[str, np.ndarray] = {}
    for number in folder.traffic_rounds():
        try:
            traffic = folder.read_traffic(number)
            sizes = np.asarray(traffic.bytes, dtype=np.int64)
            sent = np.asarray(traffic.sent, dtype=bool)
        except UNREADABLE:
            damaged.append(number)
            continue
        clients, count = len(sent), len(traffic.layers)
        shape = (clients, 2, count + 1, len(traffic.kinds))
        fits = sent.shape == (clients, 2, count) and sizes.shape == shape
        if not clients or not fits or (layers and traffic.layers != layers):
            damaged.append(number)
            continue
        rounds.append(number)
        shares.append(sent.mean(axis=0))
        layers = traffic.layers
        by_kind = sizes.sum(axis=(0, 2)).T
        for kind, both in zip(traffic.kinds, by_kind, strict=True):
            kinds[str(kind)] = kinds.get(str(kind), 0) + both
    if not rounds:
        return None, damaged
    totals = {kind: (int(down), int(up)) for kind, (down, up) in kinds.items()}
    return Ledger(
        rounds,
        layers,
        np.stack(shares, axis=-1),
        totals,
    ), damaged
