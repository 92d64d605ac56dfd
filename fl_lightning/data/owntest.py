"""Each client's own test part: a share of its samples (`data.client_test`), or one of its folds
(`data.folds`)."""

from collections.abc import Sequence

import numpy as np

from fl_lightning.configuration.config import DataConfig, check
from fl_lightning.data import partition, units, windows
from fl_lightning.data.sampling import stratified
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
    independent = [_independent(pool.part(own)) for own in dealt]
    for name, own in zip(names, independent, strict=True):
        count = len(np.unique(own))
        kind = "samples" if pool.units is None else "units"
        valid = count >= data.folds or data.min_samples == 1
        requirement = f"{name} has {count} {kind}: at most that many folds"
        check("data.folds", data.folds, valid, requirement)
    if pool.spans is not None:
        return windows.fold(dealt, pool.spans, data.folds, fold, rng)
    pairs = []
    for own, unit in zip(dealt, independent, strict=True):
        of = units.folds(unit, pool.strata[own], data.folds, rng)
        if len(np.unique(unit)) < data.folds:
            of = _of_few(unit, fold)
        pairs.append((own[of != fold], own[of == fold]))
    return [train for train, _ in pairs], [test for _, test in pairs]


def _independent(own: Pool) -> np.ndarray:
    """The number of what each of a client's samples is of: a unit, or a row with its copies."""
    if own.units is not None:
        return own.units
    if own.spans is not None or not len(own.labels):
        return own.numbers
    rows = own.read(np.arange(1))
    if rows.ndim != 2 or rows.dtype == np.int64:
        return own.numbers
    return units.copies(np.column_stack([own.read_all(), own.labels]))


def _of_few(unit: np.ndarray, fold: int) -> np.ndarray:
    """The fold of each sample of so few units that there is not one for each: this fold tests one,
    the others none."""
    kinds = np.unique(unit)
    return np.where(unit == kinds[fold % len(kinds)], fold, -1)


def thinned(
    trains: Shares, labels: np.ndarray, share: float, least: int, rng: np.random.Generator
) -> Shares:
    """A share of each client's training samples, with its class mix, at least `least` where it has
    as many."""
    thinner = []
    for indices in trains:
        size = min(len(indices), max(least, round(share * len(indices))))
        thinner.append(indices[stratified(labels[indices], size, rng)])
    return thinner


def hold_out(
    pool: Pool, shares: Shares, share: float, rng: np.random.Generator, by_chance: bool = False
) -> tuple[Shares, Shares]:
    """A share of each client's samples held out: drawn with its class mix, or of windows the last
    in time."""
    if pool.spans is not None:
        return windows.hold_out(shares, pool.spans, share)
    if pool.units is not None and share:
        fewest = min(len(np.unique(pool.units[own])) for own in shares)
        key = "data.client_test" if by_chance else "data.validation"
        requirement = "some client has samples of one unit, and none would be left for training"
        check(key, share, fewest > 1, requirement)
        pairs = [
            (own, units.by_unit(pool.units[own], pool.strata[own], share, rng)) for own in shares
        ]
        return [own[left] for own, (left, _) in pairs], [own[out] for own, (_, out) in pairs]
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
