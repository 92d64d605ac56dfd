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
    held_out = []
    for indices in shares:
        count = max(1, math.floor(share * len(indices) + 1e-9))
        held_out.append(indices[_last(spans[indices], count)])
    judged = spans[np.concatenate(held_out)]
    trained = []
    for indices, last in zip(shares, held_out, strict=True):
        rest = np.setdiff1d(indices, last, assume_unique=True)
        trained.append(rest[~overlapping(spans[rest], judged)])
    return trained, held_out


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
    begins = np.floor(rng.random(len(sizes)) * sizes).astype(np.int64)
    begin = np.repeat(begins, sizes)
    place = np.arange(len(spans)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    stretch = np.empty(len(spans), np.int64)
    stretch[order] = (place + begin) % size * count // size
    tests = [indices[stretch[indices] == number] for indices in shares]
    judged = spans[np.concatenate(tests)]
    trained = []
    for indices in shares:
        rest = indices[stretch[indices] != number]
        trained.append(rest[~overlapping(spans[rest], judged)])
    return trained, tests


def overlapping(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Which of the windows `ours` [n, 3] share a sample with one of `theirs`; bool [n]."""
    ends = [int(spans[:, 2].max(initial=0)) for spans in (ours, theirs)]
    longest = max(ends) + 1
    begin = ours[:, 0] * longest + ours[:, 1]
    end = ours[:, 0] * longest + ours[:, 2]
    first = theirs[:, 0] * longest + theirs[:, 1]
    after = theirs[:, 0] * longest + theirs[:, 2]
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
