"""Dealing things out in whole numbers, and drawing so that the class mix is kept."""

from functools import lru_cache

import numpy as np
from numpy import ndarray
from numpy.random import Generator


def apportion(weights: ndarray, total: int) -> ndarray:
    """`total` units in proportion to `weights` [n], in whole numbers that add up to it.

    Largest remainders are rounded up, ties in order. Weights that are all zero count as equal.
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
    """How many of `counts` [n] units of each kind are among `total` drawn from all of them, by
    systematic sampling.

    The units lie in a row, kind after kind, N in all; unit j (from 0) is drawn where floor(((j + 1)
    total + start) / N) is above floor((j total + start) / N). With `start` drawn evenly from 0 to N
    - 1 each unit is drawn with probability total / N, so a kind has counts total / N, rounded down
    or up, and that many in the mean (Madow, 1949).
    """
    ends = np.concatenate([[0], np.cumsum(counts)])
    sizes: ndarray = np.diff((ends * total + start) // ends[-1])
    return sizes


def draw(
    counts: ndarray,
    labels: ndarray,
    rng: Generator,
) -> list[ndarray]:
    """Random samples of each class for `counts` [N, C], as ascending indices of each of N
    shares."""
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
    """`count` indices of `labels` with the class mix of the whole, ascending."""
    counts = apportion(np.bincount(labels), count)
    [index] = draw(counts[None], labels, rng)
    return index


def split(
    labels: ndarray,
    test_share: float,
    rng: Generator,
) -> tuple[ndarray, ndarray]:
    """Train and test indices, ascending, each with the class mix of the whole."""
    test = stratified(labels, round(test_share * len(labels)), rng)
    train = np.setdiff1d(np.arange(len(labels)), test, assume_unique=True)
    return train, test


def in_turn(
    labels: ndarray,
    shares: int,
    rng: Generator,
    drawn_first: bool = False,
) -> ndarray:
    """The share of each sample, int64 [n], from 0: class after class, within a class in random
    order, dealt in turn.

    Any two shares differ by at most one sample, and by at most one of each class. The first goes to
    share 0, or to one that is drawn.
    """
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    start = rng.integers(shares) if drawn_first else 0
    share = np.empty(len(labels), np.int64)
    share[order] = (np.arange(len(labels)) + start) % shares
    return share


@lru_cache(maxsize=128)  # every epoch of every client asks; what it gives is not to be written to
def batch_sizes(
    samples: int,
    batch_size: int,
    whole_last: bool,
) -> list[int]:
    """Samples in each batch of a pass; with `whole_last` no batch of one sample follows another."""
    full, rest = divmod(samples, batch_size)
    sizes = [batch_size] * full
    if rest == 1 and whole_last and full:
        sizes[-1] += 1
    elif rest:
        sizes.append(rest)
    return sizes
