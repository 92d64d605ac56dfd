"""Clients that a method harms: less accurate than with training alone, by more than their test
samples can vary."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fl_lightning.foundation.metric import ACCURACY, FURTHER
from fl_lightning.lab.study import statistics
from fl_lightning.lab.study.cells import Cell

ONE_SIDED = 1.645
"""Standard errors: about 5 % of independent errors are beyond it where test samples are many. The
field's custom."""


def noise(ours: float, alone: float, tested: float) -> float:
    """What the difference of two accuracies on the same `tested` samples may be by chance,
    one-sided at 5 %.

    The variance is that of two independent proportions, (a (1 - a) + b (1 - b)) / n: an upper bound
    where both models are wrong about the same samples. One sample is never enough. With few samples
    more than 5 % are beyond it, if the errors of the two models are independent: up to 10.9 % with
    3 samples, 10.2 with 7, 7.5 with 8 to 30. That another training would score otherwise is left
    out.
    """
    variance = (ours * (1 - ours) + alone * (1 - alone)) / tested
    return max(ONE_SIDED * math.sqrt(variance), 1 / tested) + statistics.EQUAL


def share_harmed(cell: Cell, alone: Cell | None) -> float | None:
    """Share of clients that are harmed; None where training alone has not been run.

    Of other scores than accuracy the noise is not known: every client that is worse off counts.
    """
    if alone is None or cell.label == alone.label:
        return None
    common = cell.scores.keys() & alone.scores.keys()
    sizes = test_sizes(cell) if cell.metric == ACCURACY.name else {}
    worse = 0
    for client in common:
        ours, theirs, tested = cell.scores[client], alone.scores[client], sizes.get(client, 0.0)
        floor = noise(ours, theirs, tested) if tested else statistics.EQUAL
        worse += theirs - ours > floor
    return worse / len(common) if common else None


def test_sizes(cell: Cell) -> dict[int, float]:
    """Test samples by client, where the run folder has them and clients were scored on them."""
    if cell.run.setting("data.score_on") == "validation":
        return {}
    return {
        int(row["client"]): row["test_samples"]
        for row in cell.run.rows("split")
        if "test_samples" in row
    }


def harm_notes(cells: Sequence[Cell]) -> list[str]:
    """What `harmed` counts, and over whom a further metric is a mean."""
    if not cells:
        return []
    if all(test_sizes(cell) for cell in cells) and cells[0].metric == ACCURACY.name:
        return [
            "harmed: below training alone by more than the noise of the client's test samples "
            "alone. "
            "The noise of training is left out, so it is no test: of clients that lose nothing 14 "
            "to 44 % were counted where the same method was trained with another seed"
        ]
    notes = [
        "harmed: every client below training alone counts; how much is noise is not known here"
    ]
    if cells[0].metric in FURTHER:
        entered = [(len(cell.scores), len(cell.run.rows("final"))) for cell in cells]
        least = [cell.run.summary.get("least_test_class") for cell in cells]
        known = [int(count) for count in least if isinstance(count, int)]
        few = (
            f"; the rarest class of a client's test part has {min(known)} samples" if known else ""
        )
        low, high = min(n for n, _ in entered), max(n for n, _ in entered)
        who = f"{low}" if low == high else f"{low} to {high}"
        notes.append(
            f"{cells[0].metric}: means are over {who} of {max(n for _, n in entered)} clients{few}"
        )
    return notes
