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
    """Split each client's samples into training and test samples; return indices into `pool`.

    Args:
        pool: samples of all clients.
        dealt: each client's indices, ascending.
        data: the configuration.
        seed: for the draws; with folds the number of the cycle.
        fold: number of the fold that is the test part.
        names: names of the clients.

    Raises:
        BadInput: a client has fewer samples (or units) than folds. With `data.min_samples` 1 this
            is allowed: a sample is then tested in several folds.
    """
    rng = numpy_rng(seed, "data.client_test")
    if data.folds is None:
        trains, tests = split_off(pool, dealt, data.own_test, rng, by_chance=True)
        least = data.least_test_positives
        if least is None or pool.spans is not None:
            return trains, tests
        pairs = []
        for train, test in zip(trains, tests, strict=True):
            pairs.append(_topped_up(train, test, pool.strata, least, rng))
        return [train for train, _ in pairs], [test for _, test in pairs]
    units_of_clients = [_unit_ids(pool.part(share)) for share in dealt]
    kind = "samples" if pool.units is None else "units"
    for name, unit in zip(names, units_of_clients, strict=True):
        count = len(np.unique(unit))
        is_enough = count >= data.folds or data.min_samples == 1
        problem = f"{name} has {count} {kind}: set it to at most that number"
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
    """Split as `cut` does; return the training and the test samples as pools, and each client's
    indices into them."""
    trains, tests = cut(pool, dealt, data, seed, fold, names)
    tested = np.sort(np.concatenate(tests))
    trained = np.setdiff1d(np.arange(len(pool.labels)), tested, assume_unique=True)
    if pool.spans is not None:  # without windows that overlap test windows
        trained = np.sort(np.concatenate(trains))
    trains = [np.searchsorted(trained, share) for share in trains]
    tests = [np.searchsorted(tested, share) for share in tests]
    return pool.part(trained), pool.part(tested), trains, tests


def _unit_ids(pool: SamplePool) -> ndarray:
    """Return the number of the unit of each sample; equal rows of a table (copies) count as one
    unit."""
    if pool.units is not None:
        return pool.units
    if pool.spans is not None or not len(pool.labels):
        return pool.sample_ids
    row = pool.read(np.arange(1))
    if row.ndim != 2 or row.dtype == np.int64:
        return pool.sample_ids
    return units.copies(np.column_stack([pool.read_all(), pool.labels]))


def _one_unit_tested(unit: ndarray, fold: int) -> ndarray:
    """Return `fold` for the samples of one unit, and -1 for all others.

    This serves clients with fewer units than folds: the folds take the units in turn, so some units
    are tested in several folds.
    """
    kinds = np.unique(unit)
    return np.where(unit == kinds[fold % len(kinds)], fold, -1)


def subsampled(
    trains: Shares,
    labels: ndarray,
    share: float,
    least: int,
    rng: Generator,
) -> Shares:
    """Draw a share of each client's training samples, with its class mix.

    Args:
        trains: each client's indices.
        labels: class of each sample.
        share: share that stays.
        least: smallest number that stays, if the client has as many.
        rng: for the draw.
    """
    subsamples = []
    for indices in trains:
        size = max(least, round(share * len(indices)))
        size = min(len(indices), size)
        subsamples.append(indices[stratified(labels[indices], size, rng)])
    return subsamples


def split_off(
    pool: SamplePool,
    shares: Shares,
    share: float,
    rng: Generator,
    by_chance: bool = False,
) -> tuple[Shares, Shares]:
    """Split a share off each client's samples; return each client's remaining indices, and the
    indices that were split off.

    The share is drawn with the client's class mix, in whole units if there are any. Of windows, the
    last ones in time are split off.

    Args:
        pool: samples of all clients.
        shares: each client's indices into `pool`.
        share: share of a client's samples to split off, 0 to 1.
        rng: for the draw.
        by_chance: for test parts, whose class sizes are rounded up or down at random
            (`partition.cut_off`); validation parts always get the same sizes.
    """
    if pool.spans is not None:
        return windows.cut_off_last(shares, pool.spans, share)
    if pool.units is None or not share:
        return partition.cut_off(shares, pool.strata, share, rng, by_chance)
    fewest = min(len(np.unique(pool.units[index])) for index in shares)
    key = "data.client_test" if by_chance else "data.validation"
    problem = "some client has only one unit and would have no training samples: do without it"
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
    """Exchange samples between a client's parts until its test part has `least` samples of every
    class.

    The class with most test samples gives as many back to training, so the sizes stay. A class
    keeps one training sample, and may therefore stay below `least`.
    """
    for kind in np.unique(labels[train]):
        while (labels[test] == kind).sum() < least:
            if (labels[train] == kind).sum() < 2:
                break
            sizes = np.bincount(labels[test])
            most_frequent = int(sizes.argmax())
            if sizes[most_frequent] <= least:
                break
            new_index = rng.choice(train[labels[train] == kind])
            returned_index = rng.choice(test[labels[test] == most_frequent])
            train = np.sort(np.append(train[train != new_index], returned_index))
            test = np.sort(np.append(test[test != returned_index], new_index))
    return train, test


def check_positives(
    labels: ndarray,
    tests: Sequence[ndarray],
    class_names: Sequence[str],
    least: int | None,
    names: Sequence[str],
) -> None:
    """Raise `BadInput` if a client has fewer than `least` test samples of some class
    (`data.least_test_positives`); None: no minimum."""
    if least is None:
        return
    key = "data.least_test_positives"
    requirement = "it needs labels that are classes: set it to null"
    check(key, least, bool(class_names) and labels.ndim == 1, requirement)
    for name, indices in zip(names, tests, strict=True):
        sizes = np.bincount(labels[indices], minlength=len(class_names))
        rarest = int(sizes.argmin())
        problem = f"{name} has {sizes[rarest]} test samples of class {class_names[rarest]}"
        remedy = "lower it, take fewer data.folds or a larger data.client_test"
        check(key, least, sizes[rarest] >= least, f"{problem}: {remedy}")
