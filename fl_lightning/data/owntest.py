"""Each client's own test part: a share of its samples (`data.client_test`), or one of its folds
(`data.folds`)."""

from collections.abc import Sequence

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from fl_lightning.configuration.config import DataConfig, check
from fl_lightning.data import partition, units, windows
from fl_lightning.data.sampling import stratified
from fl_lightning.data.source import SamplePool
from fl_lightning.foundation.rng import numpy_rng

Shares = partition.Shares


def cut(
    pool: SamplePool,
    dealt: Shares,
    data: DataConfig,
    seed: int,
    fold: int,
    names: Sequence[str],
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
        trains, tests = cut_off(pool, dealt, data.own_test, rng, by_chance=True)
        least = data.least_test_positives
        if least is None or pool.spans is not None:
            return trains, tests
        pairs = []
        for train, test in zip(trains, tests, strict=True):
            pairs.append(_topped_up(train, test, pool.strata, least, rng))
        return [train for train, _ in pairs], [test for _, test in pairs]
    units_of_clients = [_independent(pool.part(share)) for share in dealt]
    kind = "samples" if pool.units is None else "units"
    for name, unit in zip(names, units_of_clients, strict=True):
        count = len(np.unique(unit))
        is_enough = count >= data.folds or data.min_samples == 1
        problem = f"{name} has {count} {kind}: at most that many folds"
        check("data.folds", data.folds, is_enough, problem)
    if pool.spans is not None:
        return windows.fold(dealt, pool.spans, data.folds, fold, rng)
    trains = []
    tests = []
    for share, unit in zip(dealt, units_of_clients, strict=True):
        fold_of_sample = units.folds(unit, pool.strata[share], data.folds, rng)
        if len(np.unique(unit)) < data.folds:
            fold_of_sample = _one_unit_tested(unit, fold)
        trains.append(share[fold_of_sample != fold])
        tests.append(share[fold_of_sample == fold])
    return trains, tests


def as_pools(
    pool: SamplePool,
    dealt: Shares,
    data: DataConfig,
    seed: int,
    fold: int,
    names: Sequence[str],
) -> tuple[SamplePool, SamplePool, Shares, Shares]:
    """Returns the training and the test samples that `cut` makes, each as a pool, and each client's
    places in both."""
    trains, tests = cut(pool, dealt, data, seed, fold, names)
    tested = np.sort(np.concatenate(tests))
    trained = np.setdiff1d(np.arange(len(pool.labels)), tested, assume_unique=True)
    if pool.spans is not None:  # windows that overlap a test's are not in the normalisation either
        trained = np.sort(np.concatenate(trains))
    trains = [np.searchsorted(trained, share) for share in trains]
    tests = [np.searchsorted(tested, share) for share in tests]
    return pool.part(trained), pool.part(tested), trains, tests


def _independent(pool: SamplePool) -> ndarray:
    """The number of what each of a client's samples is of: a unit, or a row with its copies."""
    if pool.units is not None:
        return pool.units
    if pool.spans is not None or not len(pool.labels):
        return pool.numbers
    row = pool.read(np.arange(1))
    if row.ndim != 2 or row.dtype == np.int64:
        return pool.numbers
    return units.copies(np.column_stack([pool.read_all(), pool.labels]))


def _one_unit_tested(unit: ndarray, fold: int) -> ndarray:
    """`fold` for the samples of one unit, which it tests; -1 for all others.

    For clients with fewer units than folds: the folds take the units in turn, so that some units
    are tested in several.
    """
    kinds = np.unique(unit)
    return np.where(unit == kinds[fold % len(kinds)], fold, -1)


def thinned(
    trains: Shares,
    labels: ndarray,
    share: float,
    least: int,
    rng: Generator,
) -> Shares:
    """A share of each client's training samples, with its class mix, at least `least` where it has
    as many."""
    thinner = []
    for indices in trains:
        size = max(least, round(share * len(indices)))
        size = min(len(indices), size)
        thinner.append(indices[stratified(labels[indices], size, rng)])
    return thinner


def cut_off(
    pool: SamplePool,
    shares: Shares,
    share: float,
    rng: Generator,
    by_chance: bool = False,
) -> tuple[Shares, Shares]:
    """Split each client's samples into the rest and a `share` that is cut off: drawn with its class
    mix, or of windows the last in time.

    `by_chance`: for a test part, whose size is rounded up or down at random (`partition.cut_off`);
    else for a validation part.
    """
    if pool.spans is not None:
        return windows.cut_off_last(shares, pool.spans, share)
    if pool.units is None or not share:
        return partition.cut_off(shares, pool.strata, share, rng, by_chance)
    fewest = min(len(np.unique(pool.units[index])) for index in shares)
    key = "data.client_test" if by_chance else "data.validation"  # validation is never by chance
    problem = "some client has samples of one unit, and none would be left for training"
    check(key, share, fewest > 1, problem)
    rests = []
    parts_cut_off = []
    for index in shares:
        rest_places, cut_places = units.by_unit(pool.units[index], pool.strata[index], share, rng)
        rests.append(index[rest_places])
        parts_cut_off.append(index[cut_places])
    return rests, parts_cut_off


def _topped_up(
    train: ndarray,
    test: ndarray,
    labels: ndarray,
    least: int,
    rng: Generator,
) -> tuple[ndarray, ndarray]:
    """A client's parts with `least` test samples of every class that has as many beside one for
    training.

    What a rare class gains, the class with most test samples gives back to training: sizes stay.
    """
    for kind in np.unique(labels[train]):
        while (labels[test] == kind).sum() < least:
            if (labels[train] == kind).sum() < 2:
                break
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
    labels: ndarray,
    tests: Sequence[ndarray],
    class_names: Sequence[str],
    least: int | None,
    names: Sequence[str],
) -> None:
    """Raise `BadInput` unless each client's test part holds `least` samples of every class (None:
    any)."""
    if least is None:
        return
    key = "data.least_test_positives"
    requirement = "targets that are no classes have no positives: set it to null"
    check(key, least, bool(class_names) and labels.ndim == 1, requirement)
    for name, indices in zip(names, tests, strict=True):
        sizes = np.bincount(labels[indices], minlength=len(class_names))
        rarest = int(sizes.argmin())
        problem = f"{name} has {sizes[rarest]} test samples of class {class_names[rarest]}"
        remedy = "lower it, take fewer data.folds or a larger data.client_test"
        check(key, least, sizes[rarest] >= least, f"{problem}: {remedy}")
