"""Bytes between ranks in a round, from the tiles that the server mixes (fl_lightning/core/mixing.py)."""

from __future__ import annotations

from fl_lightning.planning.memory import Setup
from fl_lightning.planning.setting import cohorts

RESULT_BYTES = 1500
"""What one client's results come to when they are gathered (pickled), beside its table of bytes by layer."""


def traffic(setup: Setup) -> dict[str, float]:
    """Bytes of a round over all ranks, by what they are."""
    n, m, ranks, learns, widest = setup.sources, setup.receivers, setup.hardware.ranks, setup.learns, setup.widest
    if ranks == 1:
        return {}
    columns, away, tiles = float(widest.columns) * widest.item, 1 - 1 / ranks, sum(widest.tiles)
    more = setup.policy.exchanged
    bytes_by_part = {"models to the ranks of tiles": (1 + learns + more) * n * columns * away}
    if setup.policy.one_download:
        bytes_by_part["the mix to every rank"] = (1 + more) * columns * (ranks - 1)
    else:
        bytes_by_part["what clients receive"] = m * columns * away
    if learns:  # to the layer's rank, and all to all ranks
        bytes_by_part["inner products"] = (tiles * away + 2 * setup.layers * (ranks - 1)) * (n * n + n + 1.0) * 8
    bytes_by_part["results"] = len(cohorts(setup.config)[0]) * (RESULT_BYTES + 66.0 * (widest.layers + 1)) * (ranks - 1)
    return bytes_by_part
