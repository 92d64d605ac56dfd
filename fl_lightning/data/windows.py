"""Windows of recordings, split in time: no sample of a recording lies in two parts.

A window is (recording, first sample, the one after the last); int64 [n, 3] are `spans`.
"""

import math
from collections.abc import Sequence

import numpy as np

from fl_lightning.data.sampling import apportion
from fl_lightning.data.source import TEST_SHARE


def cut(
    lengths: Sequence[int],
    window: int,
    step: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Spans of all windows of recordings for training, and for test: those of each one's last
    `TEST_SHARE`.

    A window that would reach over the border is in neither.
    """
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for number, length in enumerate(lengths):
        border = length - round(TEST_SHARE * length)
        for part, (begin, end) in zip(
            parts,
            ((0, border), (border, length)),
            strict=True,
        ):
            starts = np.arange(begin, end - window + 1, step)
            part.append(np.stack([np.full(len(starts), number), starts, starts + window], axis=1))
    train, test = (np.concatenate(part).astype(np.int64) for part in parts)
    return train, test


Shares = Sequence[np.ndarray]


def hold_out(
    shares: Shares, spans: np.ndarray, share: float
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split each client's windows into what is left for training and the last ones of each of its
    recordings.

    These are floor(share * n_i) of client i's n_i, and at least one, unless `share` is 0. Windows
    left that overlap one that any client holds out are dropped.
    """
    if share == 0:
        return list(shares), [np.empty(0, np.int64) for _ in shares]
    last = [
        indices[_last(spans[indices], max(1, math.floor(share * len(indices) + 1e-9)))]
        for indices in shares
    ]
    left = [
        np.setdiff1d(indices, out, assume_unique=True)
        for indices, out in zip(shares, last, strict=True)
    ]
    out = np.concatenate(last)
    return [indices[~overlapping(spans[indices], spans[out])] for indices in left], last


def fold(
    shares: Shares, spans: np.ndarray, count: int, number: int, rng: np.random.Generator
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split each client's windows into those for training and fold `number` of `count`: a stretch
    of each recording.

    The windows of a recording lie in a ring that begins at one that is drawn, and are cut into
    `count` stretches, as equal as may be. Windows left that overlap one that any client holds out
    are dropped.
    """
    order = np.lexsort((spans[:, 1], spans[:, 0]))
    _, sizes = np.unique(spans[order, 0], return_counts=True)
    size = np.repeat(sizes, sizes)
    begin = np.repeat(np.floor(rng.random(len(sizes)) * sizes).astype(np.int64), sizes)
    place = np.arange(len(spans)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    of = np.empty(len(spans), np.int64)
    of[order] = (place + begin) % size * count // size
    tests = [indices[of[indices] == number] for indices in shares]
    left = [indices[of[indices] != number] for indices in shares]
    out = spans[np.concatenate(tests)]
    return [indices[~overlapping(spans[indices], out)] for indices in left], tests


def overlapping(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Which of the windows `ours` [n, 3] share a sample with one of `theirs`; bool [n]."""
    longest = max((int(spans[:, 2].max(initial=0)) for spans in (ours, theirs)), default=0) + 1
    (begin, end), (first, after) = (
        (s[:, 0] * longest + s[:, 1], s[:, 0] * longest + s[:, 2]) for s in (ours, theirs)
    )
    order = np.argsort(first, kind="stable")
    # as far as those reach that begin before
    reach = np.maximum.accumulate(np.concatenate([[-1], after[order]]))
    return reach[np.searchsorted(first[order], end, "left")] > begin


def _last(spans: np.ndarray, count: int) -> np.ndarray:
    """Places of the last windows, in proportion to each recording's, `count` in all; bool [n]."""
    order = np.lexsort((spans[:, 1], spans[:, 0]))
    _, sizes = np.unique(spans[order, 0], return_counts=True)
    ends = np.cumsum(sizes)
    chosen = np.zeros(len(spans), bool)
    for end, take in zip(
        ends.tolist(),
        apportion(sizes, count).tolist(),
        strict=True,
    ):
        chosen[order[end - take : end]] = True
    return chosen
