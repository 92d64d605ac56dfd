"""Dealing things out in whole numbers, and drawing so that the class mix is kept."""

from functools import lru_cache

import numpy as np


def apportion(weights: np.ndarray, total: int) -> np.ndarray:
    """`total` units in proportion to `weights` [n], in whole numbers that add up to it.

    Largest remainders are rounded up, ties in order. Weights that are all zero count as equal.
    """
    weights = np.asarray(weights, dtype=np.float64)
    mass = weights.sum()
    shares = weights / mass if mass > 0 else np.full(len(weights), 1 / len(weights))
    exact = shares * total
    counts = np.floor(exact).astype(np.int64)
    rest = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:rest]] += 1
    return counts


def systematic(
    counts: np.ndarray,
    total: int,
    start: int,
) -> np.ndarray:
    """How many of `counts` [n] units of each kind are among `total` drawn from all of them, by
    systematic sampling.

    The units lie in a row, kind after kind, N in all; unit j (from 0) is drawn where floor(((j + 1)
    total + start) / N) is above floor((j total + start) / N). With `start` drawn evenly from 0 to N
    - 1 each unit is drawn with probability total / N, so a kind has counts total / N, rounded down
    or up, and that many in the mean (Madow, 1949).
    """
    ends = np.concatenate([[0], np.cumsum(counts)])
    sizes: np.ndarray = np.diff((ends * total + start) // ends[-1])
    return sizes


def draw(
    counts: np.ndarray,
    labels: np.ndarray,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Random samples of each class for `counts` [N, C], as ascending indices of each of N
    shares."""
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    class_sizes = np.bincount(labels, minlength=counts.shape[1])
    owner = np.full(len(labels), -1)
    owners = np.arange(len(counts))
    for column, start in zip(
        counts.T,
        np.cumsum(class_sizes) - class_sizes,
        strict=True,
    ):
        owner[order[start : start + column.sum()]] = np.repeat(owners, column)
    dealt = np.flatnonzero(owner >= 0)
    dealt = dealt[np.argsort(owner[dealt], kind="stable")]
    return np.split(dealt, np.cumsum(counts.sum(1))[:-1])


def stratified(
    labels: np.ndarray,
    count: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """`count` indices of `labels` with the class mix of the whole, ascending."""
    return draw(apportion(np.bincount(labels), count)[None], labels, rng)[0]


def split(
    labels: np.ndarray, test_share: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Train and test indices, ascending, each with the class mix of the whole."""
    test = stratified(labels, round(test_share * len(labels)), rng)
    return np.setdiff1d(
        np.arange(len(labels)),
        test,
        assume_unique=True,
    ), test


def in_turn(
    labels: np.ndarray, shares: int, rng: np.random.Generator, drawn_first: bool = False
) -> np.ndarray:
    """The share of each sample, int64 [n], from 0: class after class, within a class in random
    order, dealt in turn.

    Any two shares differ by at most one sample, and by at most one of each class. The first goes to
    share 0, or to one that is drawn.
    """
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    share = np.empty(len(labels), np.int64)
    share[order] = (np.arange(len(labels)) + (rng.integers(shares) if drawn_first else 0)) % shares
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
