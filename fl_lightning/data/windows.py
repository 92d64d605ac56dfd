"""Windows of recordings, split in time: no sample of a recording lies in two parts.

`spans`, int64 [n, 3], hold for each window the recording, the first sample, and the one after the
last.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy import ndarray

from fl_lightning.data.sampling import apportion
from fl_lightning.data.source import TEST_SHARE


def cut(
    lengths: Sequence[int],
    window: int,
    step: int,
) -> tuple[ndarray, ndarray]:
    """Return the spans of all training windows and of all test windows, which lie in the last
    `TEST_SHARE` of each recording; no window crosses the border.

    Args:
        lengths: number of samples of each recording.
        window: number of samples of a window.
        step: number of samples from the start of a window to the start of the next.
    """
    trains = []
    tests = []
    for number, length in enumerate(lengths):
        border = length - round(TEST_SHARE * length)
        trains.append(_spans(number, 0, border, window, step))
        tests.append(_spans(number, border, length, window, step))
    return np.concatenate(trains), np.concatenate(tests)


def _spans(
    number: int,
    begin: int,
    end: int,
    window: int,
    step: int,
) -> ndarray:
    """Return the spans of the windows in one stretch of a recording, int64 [n, 3]."""
    starts = np.arange(begin, end - window + 1, step, dtype=np.int64)
    recording = np.full(len(starts), number)
    return np.stack([recording, starts, starts + window], axis=1)


Shares = Sequence[ndarray]


def cut_off_last(
    shares: Shares,
    spans: ndarray,
    share: float,
) -> tuple[list[ndarray], list[ndarray]]:
    """Cut the last windows of each recording off each client's windows; return each client's
    remaining windows, and those that were cut off.

    Of client i's n_i windows, floor(share * n_i) are cut off, and at least one (none if `share` is
    0). Remaining windows that overlap a window cut off at any client are dropped.

    Args:
        shares: indices of each client's windows.
        spans: spans of all windows, [n, 3].
        share: share of a client's windows to cut off.
    """
    if share == 0:
        return list(shares), [np.empty(0, np.int64) for _ in shares]
    held_out = []
    for indices in shares:
        count = max(1, math.floor(share * len(indices) + 1e-9))
        held_out.append(indices[_last(spans[indices], count)])
    rest = []
    for indices, out in zip(shares, held_out, strict=True):
        rest.append(np.setdiff1d(indices, out, assume_unique=True))
    return _apart(rest, held_out, spans), held_out


def _apart(
    rest: Shares,
    held_out: Shares,
    spans: ndarray,
) -> list[ndarray]:
    """Return each client's `rest` without windows that overlap a held-out window of any client."""
    held_out_spans = spans[np.concatenate(held_out)]
    return [indices[~overlapping(spans[indices], held_out_spans)] for indices in rest]


def fold(
    shares: Shares,
    spans: ndarray,
    count: int,
    number: int,
    rng: np.random.Generator,
) -> tuple[list[ndarray], list[ndarray]]:
    """Split each client's windows into training windows and those of fold `number` of `count`, a
    stretch of each recording.

    The windows of a recording form a ring with a random start, which is cut into `count` stretches
    of equal length, as far as possible. Training windows that overlap a held-out one, at any
    client, are dropped.
    """
    order, sizes = _in_time(spans)
    size = np.repeat(sizes, sizes)
    draws = rng.random(len(sizes))
    begins = np.floor(draws * sizes).astype(np.int64)
    begin = np.repeat(begins, sizes)
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    place = np.arange(len(spans)) - first
    stretch = np.empty(len(spans), np.int64)
    stretch[order] = (place + begin) % size * count // size
    tests = [indices[stretch[indices] == number] for indices in shares]
    rest = [indices[stretch[indices] != number] for indices in shares]
    return _apart(rest, tests, spans), tests


def _in_time(spans: ndarray) -> tuple[ndarray, ndarray]:
    """Return the order of the windows by recording and time, and the number of windows of each
    recording."""
    order = np.lexsort((spans[:, 1], spans[:, 0]))
    _, sizes = np.unique(spans[order, 0], return_counts=True)
    return order, sizes


def overlapping(
    ours: ndarray,
    theirs: ndarray,
) -> ndarray:
    """Return whether each of the windows `ours` [n, 3] shares a sample with one of `theirs`; bool
    [n]."""
    ends = np.concatenate([ours[:, 2], theirs[:, 2]])
    longest = 1 + int(ends.max(initial=0))
    begin = ours[:, 0] * longest + ours[:, 1]
    end = ours[:, 0] * longest + ours[:, 2]
    first = theirs[:, 0] * longest + theirs[:, 1]
    after = theirs[:, 0] * longest + theirs[:, 2]
    order = np.argsort(first, kind="stable")
    # the farthest end among the windows that begin earlier
    ends = np.concatenate([[-1], after[order]])
    reach = np.maximum.accumulate(ends)
    return reach[np.searchsorted(first[order], end, "left")] > begin


def _last(spans: ndarray, count: int) -> ndarray:
    """Mark the last windows of each recording, `count` in all, in proportion to the recordings'
    windows; bool [n]."""
    order, sizes = _in_time(spans)
    chosen = np.zeros(len(spans), bool)
    counts = apportion(sizes, count).tolist()
    ends = np.cumsum(sizes).tolist()
    for end, take in zip(ends, counts, strict=True):
        chosen[order[end - take : end]] = True
    return chosen
