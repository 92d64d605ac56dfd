"""Each client's own test part: a share of its samples (`data.client_test`), or one of its folds
(`data.folds`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fl_lightning.configuration.config import DataConfig, check
from fl_lightning.data import partition, windows
from fl_lightning.data.sampling import in_turn, stratified
from fl_lightning.data.source import Pool
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.rng import numpy_rng

Shares = partition.Shares


def cut(
    pool: Pool, dealt: Shares, data: DataConfig, seed: int, fold: int, names: Sequence[str]
) -> tuple[Shares, Shares]:
    """Split what each client was dealt (places in `pool`) into its training and its test samples.

    Args:
        pool: of all clients.
        dealt: each client's places, ascending.
        data: says how.
        seed: what the draw depends on; with folds the number of the cycle.
        fold: which of the folds is the test part.
        names: of the clients.

    Raises:
        BadInput: a client has fewer samples than folds, unless `data.min_samples` is 1: it then
            tests each of them in several folds.
    """
    rng = numpy_rng(seed, "data.client_test")
    if data.folds is None:
        trains, tests = hold_out(
            pool,
            dealt,
            data.own_test,
            rng,
            by_chance=True,
        )
        if data.least_test_positives is not None and pool.spans is None:
            least = data.least_test_positives
            both = zip(trains, tests, strict=True)
            pairs = [_topped_up(*pair, pool.strata, least, rng) for pair in both]
            return [train for train, _ in pairs], [test for _, test in pairs]
        return trains, tests
    for name, indices in zip(names, dealt, strict=True):
        valid = len(indices) >= data.folds or data.min_samples == 1
        check(
            "data.folds",
            data.folds,
            valid,
            f"{name} has {len(indices)} samples: at most that many folds",
        )
    if pool.spans is not None:
        return windows.fold(dealt, pool.spans, data.folds, fold, rng)
    cuts = [in_turn(pool.strata[indices], data.folds, rng, drawn_first=True) for indices in dealt]
    cuts = [of if len(of) >= data.folds else _of_few(len(of), fold) for of in cuts]
    pairs = [
        (indices[of != fold], indices[of == fold]) for indices, of in zip(dealt, cuts, strict=True)
    ]
    return [train for train, _ in pairs], [test for _, test in pairs]


def _of_few(samples: int, fold: int) -> np.ndarray:
    """The fold of each of so few samples that there is not one for each: this fold tests one, the
    others none."""
    return np.where(
        np.arange(samples) == fold % samples,
        fold,
        -1,
    )


def thinned(
    trains: Shares, labels: np.ndarray, share: float, least: int, rng: np.random.Generator
) -> Shares:
    """A share of each client's training samples, with its class mix, at least `least` where it has
    as many."""
    sizes = [min(len(indices), max(least, round(share * len(indices)))) for indices in trains]
    return [
        indices[stratified(labels[indices], size, rng)]
        for indices, size in zip(trains, sizes, strict=True)
    ]


def hold_out(
    pool: Pool, shares: Shares, share: float, rng: np.random.Generator, by_chance: bool = False
) -> tuple[Shares, Shares]:
    """A share of each client's samples held out: drawn with its class mix, or of windows the last
    in time."""
    if pool.spans is not None:
        return windows.hold_out(shares, pool.spans, share)
    return partition.hold_out(shares, pool.strata, share, rng, by_chance)


def _topped_up(
    train: np.ndarray, test: np.ndarray, labels: np.ndarray, least: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A client's parts with `least` test samples of every class that has as many beside one for
    training.

    What a rare class gains, the class with most test samples gives back to training: sizes stay.
    """
    for kind in np.unique(labels[train]):
        while (labels[test] == kind).sum() < least and (labels[train] == kind).sum() > 1:
            sizes = np.bincount(labels[test])
            most = int(sizes.argmax())
            if sizes[most] <= least:
                break
            new = rng.choice(train[labels[train] == kind])
            back = rng.choice(test[labels[test] == most])
            train = np.sort(np.append(train[train != new], back))
            test = np.sort(np.append(test[test != back], new))
    return train, test


def check_positives(
    labels: np.ndarray,
    tests: Sequence[np.ndarray],
    class_names: Sequence[str],
    least: int | None,
    names: Sequence[str],
) -> None:
    """Raise `BadInput` unless each client's test part holds `least` samples of every class (None:
    any)."""
    if least is None:
        return
    if not class_names or labels.ndim > 1:
        raise BadInput(
            "data.least_test_positives",
            least,
            "targets that are no classes have no positives: null",
        )
    for name, indices in zip(names, tests, strict=True):
        sizes = np.bincount(labels[indices], minlength=len(class_names))
        rarest = int(sizes.argmin())
        problem = f"{name} has {sizes[rarest]} test samples of class {class_names[rarest]}"
        requirement = f"{problem}: lower it, take fewer data.folds or a larger data.client_test"
        check("data.least_test_positives", least, sizes[rarest] >= least, requirement)
