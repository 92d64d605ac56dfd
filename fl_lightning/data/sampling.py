"""Apportionment in whole numbers, and stratified draws."""

from functools import lru_cache

import numpy as np
from numpy import ndarray
from numpy.random import Generator


def apportion(weights: ndarray, total: int) -> ndarray:
    """Divide `total` units in proportion to `weights` [n], into whole numbers with this sum.

    Largest remainders are rounded up, ties in order. If all weights are zero, they count as equal.
    """
    weights = np.asarray(weights, dtype=np.float64)
    mass = weights.sum()
    count = len(weights)
    shares = weights / mass if mass > 0 else np.full(count, 1 / count)
    exact = shares * total
    counts = np.floor(exact).astype(np.int64)
    rest = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:rest]] += 1
    return counts


def systematic(
    counts: ndarray,
    total: int,
    start: int,
) -> ndarray:
    """Return how many units of each kind systematic sampling draws (Madow, 1949), int64 [n].

    A kind gets its share, total * count / N of N units, rounded down or up; with `start` drawn
    uniformly from 0 to N - 1, it gets exactly this share on average. The method: sort the N units
    by kind, and draw unit j (from 0) if floor(((j + 1) total + start) / N) is greater than
    floor((j total + start) / N).

    Args:
        counts: number of units of each kind, [n].
        total: number of units to draw.
        start: offset of the draw, 0 to N - 1.
    """
    ends = np.concatenate([[0], np.cumsum(counts)])
    sizes: ndarray = np.diff((ends * total + start) // ends[-1])
    return sizes


def draw(
    counts: ndarray,
    labels: ndarray,
    rng: Generator,
) -> list[ndarray]:
    """Draw random samples for each share; return ascending indices for each.

    Args:
        counts: number of samples of each class that each share gets, [N, C].
        labels: class of each sample.
        rng: for the draw.
    """
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    class_sizes = np.bincount(labels, minlength=counts.shape[1])
    owner = np.full(len(labels), -1)
    owners = np.arange(len(counts))
    starts = np.cumsum(class_sizes) - class_sizes
    for column, start in zip(counts.T, starts, strict=True):
        end = start + column.sum()
        owner[order[start:end]] = np.repeat(owners, column)
    dealt = np.flatnonzero(owner >= 0)
    dealt = dealt[np.argsort(owner[dealt], kind="stable")]
    ends = np.cumsum(counts.sum(1))
    return np.split(dealt, ends[:-1])


def stratified(
    labels: ndarray,
    count: int,
    rng: Generator,
) -> ndarray:
    """Draw `count` indices of `labels` with the class mix of the whole; ascending."""
    counts = apportion(np.bincount(labels), count)
    [index] = draw(counts[None], labels, rng)
    return index


def split(
    labels: ndarray,
    test_share: float,
    rng: Generator,
) -> tuple[ndarray, ndarray]:
    """Return train and test indices, ascending, each with the class mix of the whole."""
    test = stratified(labels, round(test_share * len(labels)), rng)
    train = np.setdiff1d(np.arange(len(labels)), test, assume_unique=True)
    return train, test


def in_turn(
    labels: ndarray,
    shares: int,
    rng: Generator,
    drawn_first: bool = False,
) -> ndarray:
    """Return the number of the share that each sample goes to, int64 [n], from 0: samples are
    sorted by class, in random order within a class, and dealt to the shares in turn.

    Any two shares differ by at most one sample, and by at most one of each class. The first sample
    goes to share 0, or to a random share if `drawn_first`.
    """
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    start = rng.integers(shares) if drawn_first else 0
    share = np.empty(len(labels), np.int64)
    share[order] = (np.arange(len(labels)) + start) % shares
    return share


@lru_cache(maxsize=128)  # every epoch of every client calls it; the list is not to be changed
def batch_sizes(
    samples: int,
    batch_size: int,
    whole_last: bool,
) -> list[int]:
    """Return the number of samples in each batch of a pass; with `whole_last` a single last sample
    joins the batch before it."""
    full, rest = divmod(samples, batch_size)
    sizes = [batch_size] * full
    if rest == 1 and whole_last and full:
        sizes[-1] += 1
    elif rest:
        sizes.append(rest)
    return sizes
