"""Data: loads the samples, deals them out to the clients and brings them to the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy import ndarray

from fl_lightning.configuration.config import DataConfig, check, held_out
from fl_lightning.data import identity, newcomers, owntest, partition, planted, public, units
from fl_lightning.data.columns import Columns, Preprocessing
from fl_lightning.data.federated import ClientData, FederatedData
from fl_lightning.data.load import SMOKE_TEST, SMOKE_TRAIN, load, per_class
from fl_lightning.data.part import Part, ResidentPart, Samples
from fl_lightning.data.sampling import stratified
from fl_lightning.data.source import HeldOut, SamplePool, Source
from fl_lightning.foundation.extras import require
from fl_lightning.foundation.named import composed
from fl_lightning.foundation.rng import numpy_rng

__all__ = ["ClientData", "FederatedData", "Part", "ResidentPart", "prepare"]


def prepare(
    data: DataConfig,
    clients: int,
    seed: int,
    smoke: bool = False,
    fit: bool = True,
) -> FederatedData:
    """Load the source `data.source`, split it among the clients, and compute the normalisation.

    All random choices depend on `seed` alone. With `data.folds`, fold `seed % folds` is the test
    part of the split that is drawn with the seed `seed // folds`.

    Args:
        data: which samples to load, and how to split them.
        clients: number of clients.
        seed: seed of the run.
        smoke: take few samples, lower `data.min_samples`, and replace data that are absent by
            noise.
        fit: whether to apply `data.impute` and `data.scale`. The normalisation is computed in
            either case.

    Raises:
        BadInput: the data are absent, malformed or too few.
    """
    if smoke:
        heir = None if data.rest_to is None else data.rest_to % clients
        data = replace(
            data,
            min_samples=min(2, data.min_samples),
            rest_to=heir,
            groups=min(clients, data.groups),
        )
    seed, fold = divmod(seed, data.folds) if data.folds else (seed, 0)
    keeps_digest = identity.is_seed_independent(data)
    data = replace(data, test_seed=seed if data.test_seed is None else data.test_seed)
    source, made_up = load(data, clients, smoke)
    tasks = planted.tasks(data, clients, len(source.class_names), _partition_seed(data, seed))
    is_natural = data.partition == partition.NATURAL
    groups = planted.true_groups(data, clients, tasks, source, is_natural)
    dealt = _deal(source, data, clients, seed, fold, smoke)
    angles = [0.0 if tasks is None else tasks.angle(group) for group in groups]
    if data.partition == "rotated":
        angles = partition.angles(clients)
    if any(angles):
        require("vision", "data.partition", data.partition)
    count = held_out(data.held_out_clients, clients, smoke)
    shares, held_out_clients = newcomers.hold_out(dealt.shares, angles, count, seed, data.held_out)
    trains, validations, tests = dealt.shares
    labels_train = planted.relabelled(
        dealt.train.labels, [*trains, *validations], [*groups, *groups], tasks
    )
    labels = labels_train, planted.relabelled(dealt.test.labels, tests, groups, tasks)
    unlabelled = public.load_pool(data, smoke)
    samples = _samples(
        source, dealt, labels, held_out_clients, data, unlabelled, made_up, seed, smoke, fit
    )
    if keeps_digest:
        digest = identity.digest(source, None if made_up else unlabelled, data.reads_test)
        samples["reading"] = replace(samples["reading"], digest=digest)
    held_out_numbers = {client.number for client in held_out_clients}
    return FederatedData(
        shares=shares,
        class_names=source.class_names,
        angles=[angle for c, angle in enumerate(angles) if c not in held_out_numbers],
        augment=data.augment,
        resident=data.resident,
        task=data.task,
        groups=[group for c, group in enumerate(groups) if c not in held_out_numbers],
        held_out=held_out_clients,
        vocabulary=source.vocabulary,
        drifting=tasks if data.drift_every is not None else None,
        **samples,
    )


def _samples(
    source: Source,
    dealt: _Dealt,
    labels: tuple[ndarray, ndarray],
    held_out_clients: list[HeldOut],
    data: DataConfig,
    unlabelled: SamplePool | None,
    made_up: bool,
    seed: int,
    smoke: bool,
    fit: bool,
) -> dict[str, Any]:
    """Read the samples, fit imputer and scaler, and normalise; return arguments of `FederatedData`.

    Args:
        labels: labels of the training and of the test samples, as planted groups change them.
        held_out_clients: clients whose samples are not used to fit.
        unlabelled: the public data set, if `data.public` names one.
    """
    train = dealt.train.read_all()
    test = train if dealt.test is dealt.train else dealt.test.read_all()
    _check_images(data, train.ndim)
    columns = source.reading.columns if not made_up else Columns.numbered(train.shape)
    fits = Preprocessing.from_config(data, columns, train) if fit else None
    public_samples = None
    if dealt.held_back is not None:
        public_samples = dealt.held_back.read_all()
    elif data.public is not None:
        public_samples, made_up = public.raw_samples(data, unlabelled, train, made_up, seed, smoke)
    if fits is not None:
        absent = [client.number for client in held_out_clients]
        shared = np.delete(np.arange(len(dealt.names)), absent)
        shared_samples = np.concatenate([dealt.shares[0][c] for c in shared])
        train, test = fits.fit_transform(train, test, dealt.shares, shared_samples, dealt.names)
    mean, std = _normalisation(data, train, dealt.shares, held_out_clients)

    def samples(
        raw: ndarray,
        targets: ndarray,
        pool: SamplePool | None = None,
    ) -> Samples:
        numbers = () if pool is None else (pool.sample_ids, pool.unit_ids, pool.lines)
        return Samples(torch.from_numpy(raw), torch.from_numpy(targets), mean, std, *numbers)

    def unowned_samples(raw: ndarray, targets: ndarray) -> Samples:
        values = raw if fits is None else fits.transformed(0, "all clients", raw)
        return samples(values, targets)

    test_samples = samples(test, labels[1], dealt.test)
    common = test_samples if dealt.common is dealt.test else None
    if common is None and dealt.common is not None:
        common = unowned_samples(dealt.common.read_all(), dealt.common.labels)
    names = client_names(source, data, len(dealt.names))
    return {
        "train": samples(train, labels[0], dealt.train),
        "test": test_samples,
        "public": None
        if public_samples is None
        else unowned_samples(public_samples, np.zeros(0, np.int64)),
        "common": common,
        "reading": replace(source.reading, client_names=names, columns=columns, preprocessing=fits),
        "made_up": made_up,
    }


def _normalisation(
    data: DataConfig,
    raw: ndarray,
    shares: Sequence[Sequence[ndarray]],
    held_out_clients: Sequence[HeldOut],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute mean and deviation of the training samples `raw`, without those of held-out clients.

    Returns 0 and 1 if `data.scale` has scaled the samples already. If each client has an imputer of
    its own (`data.fitted`), samples that no client holds are left out, since nothing has filled
    their cells.
    """
    if data.scale is not None:
        return torch.zeros(1), torch.ones(1)
    unseen = [index for client in held_out_clients for index in (client.train, client.validation)]
    if data.fitted == "own":
        dealt = [index for part in shares[:2] for index in part]
        owned = np.concatenate(dealt)
        unseen.append(np.setdiff1d(np.arange(len(raw)), owned))
    if unseen:
        raw = np.delete(raw, np.concatenate(unseen), 0)
    return normalisation(raw)


def _check_images(data: DataConfig, axes: int) -> None:
    """Raise `BadInput` if an option needs images and the samples are something else; `axes`:
    number of axes of the array of all samples, 4 for images."""
    needs_images_by_key = {
        "data.partition": data.partition == "rotated",
        "data.planted": data.planted == "rotation",
        "data.augment": data.augment != "none",
    }
    kind = "plain vectors" if axes == 2 else "series"
    problem = f"it needs images, but the samples are {kind}: choose another value"
    for key, needs_images in needs_images_by_key.items():
        value = getattr(data, key.removeprefix("data."))
        check(key, value, axes == 4 or not needs_images, problem)


@dataclass(frozen=True)
class _Dealt:
    """The samples in use, and the clients that hold them.

    If models are scored on validation data, no test sample is in use: `test` is `train`, and the
    shares for test are those for validation.
    """

    train: SamplePool
    test: SamplePool
    shares: tuple[partition.Shares, partition.Shares, partition.Shares]
    """Each client's indices for training and validation (into `train`) and for test (into
    `test`)."""
    names: list[str]
    """Names of the clients."""
    held_back: SamplePool | None
    common: SamplePool | None
    """The test set for all clients (`data.global_test`); it may be `test`."""


def _deal(
    source: Source,
    data: DataConfig,
    clients: int,
    seed: int,
    fold: int,
    smoke: bool,
) -> _Dealt:
    """Choose the samples in use and deal them out.

    In order: public samples are held back, the others dealt, each client's own test part cut off
    (`data.client_test`, `data.folds`), its training part reduced, and its validation part cut off.
    """
    partition_seed = _partition_seed(data, seed)
    train, test, held_back = _in_use(source, data, clients, partition_seed, smoke)
    common = test if data.global_test else None
    test = train if data.own_test else test
    groups = _groups(train, test, source.group_names[:clients] if smoke else source.group_names)
    names = client_names(source, data, clients) or [f"client {c}" for c in range(clients)]
    rng = numpy_rng(partition_seed, "partition")
    trains, tests = partition.deal(train.strata, test.strata, clients, data, rng, groups)
    if train.units is not None:
        _check_units(data, train, test, trains, names)
    if data.own_test:  # what was dealt as training data is all that a client has
        train, test, trains, tests = owntest.as_pools(train, trains, data, seed, fold, names)
    trains, validations = _training_parts(train, trains, data, seed)
    if held_back is not None:
        held_back = public.without_overlaps(held_back, (train, validations), (test, tests))
    if data.score_on == "validation":
        shares = trains, validations, validations
        return _Dealt(train, train, shares, names, held_back, None)
    least = data.least_test_positives
    owntest.check_positives(test.labels, tests, source.class_names, least, names)
    return _Dealt(
        train,
        test,
        (trains, validations, tests),
        names,
        held_back,
        common,
    )


def _in_use(
    source: Source,
    data: DataConfig,
    clients: int,
    partition_seed: int,
    smoke: bool,
) -> tuple[SamplePool, SamplePool, SamplePool | None]:
    """Return the training, test and public samples in use; with `data.pooled` one pool serves for
    training and test."""
    train = source.train
    # If test samples are not read, the training pool takes their place; no model is scored on it,
    # since `_deal` returns the validation parts as test parts.
    test = source.test if data.reads_test else train
    if data.pooled:
        train = train.followed_by(test)
    most = SMOKE_TRAIN if smoke else None
    rng = numpy_rng(partition_seed, "data.train")
    used = _chosen_samples(train, data, data.fraction, clients, most, rng)
    held_back = None
    if data.public == public.HELD_BACK:
        used, public_index = public.hold_back(used, data, partition_seed, smoke)
        held_back = train.part(public_index)
    train = train.part(used)
    if data.pooled:
        return train, train, held_back
    share = data.fraction if data.test_fraction is None else data.test_fraction
    most = SMOKE_TEST if smoke else None
    used = _chosen_samples(
        test,
        data,
        share,
        clients,
        most,
        numpy_rng(partition_seed, "data.test"),
    )
    return train, test.part(used), held_back


def _training_parts(
    train: SamplePool,
    trains: partition.Shares,
    data: DataConfig,
    seed: int,
) -> tuple[partition.Shares, partition.Shares]:
    """Reduce each client's training part as `data` asks, and cut its validation part off; return
    both."""
    if data.train_share < 1:
        least = 1 + (data.validation > 0)  # one sample for validation
        rng = numpy_rng(seed, "data.train_share")
        trains = owntest.subsampled(trains, train.strata, data.train_share, least, rng)
    rng = numpy_rng(seed, "data.samples_per_client")
    trains = partition.cap(trains, train.strata, data, rng)
    rng = numpy_rng(seed, "data.validation")
    trains, validations = owntest.split_off(train, trains, data.validation, rng)
    if train.spans is not None:
        fewest = min(map(len, trains))
        problem = f"some client has only {fewest} windows that overlap no held-out window"
        remedy = "lower it, or data.validation"
        is_enough = fewest >= data.min_samples
        check("data.min_samples", data.min_samples, is_enough, f"{problem}: {remedy}")
    return trains, validations


def _groups(
    train: SamplePool,
    test: SamplePool,
    names: list[str],
) -> partition.Groups | None:
    """Return the groups of the samples; None if the training or the test pool has none."""
    if train.groups is None or test.groups is None:
        return None
    return partition.Groups(train.groups, test.groups, names)


def _check_units(
    data: DataConfig,
    train: SamplePool,
    test: SamplePool,
    shares: partition.Shares,
    names: list[str],
) -> None:
    """Raise `BadInput` if two clients, or two parts, have samples of one unit."""
    assert train.units is not None
    units.check_apart(data.unit_column, train.units, shares, names)
    problem = "public samples may come from the same units as clients' samples: set it to null"
    check("data.public", data.public, data.public != public.HELD_BACK, problem)
    if test.units is not None and data.reads_test and not data.own_test:
        shared = np.intersect1d(train.units, test.units).size
        problem = f"{shared} units are in both the training and the test part: set data.client_test"
        check("data.unit_column", data.unit_column, not shared, problem)


def _partition_seed(data: DataConfig, seed: int) -> int:
    """Return the seed of the partition among clients."""
    return seed if data.partition_seed is None else data.partition_seed


def client_names(
    source: Source,
    data: DataConfig,
    clients: int,
) -> list[str]:
    """Return the clients' names: `data.client_names` if it is set; else, with the natural
    partition, the names of the groups; else an empty list.

    Raises:
        BadInput: the length of `data.client_names` is not `clients`, or two names are equal.
    """
    natural = source.group_names[:clients] if data.partition == partition.NATURAL else []
    names = natural if data.client_names is None else [composed(name) for name in data.client_names]
    key = "data.root" if data.client_names is None else "data.client_names"
    value = data.root if data.client_names is None else names
    valid = data.client_names is None or len(names) == clients
    check(
        key,
        value,
        valid,
        f"{len(names)} names for {clients} clients: change federation.clients or the names",
    )
    for name, count in Counter(names).items():
        check(key, value, count == 1, f"{count} clients have the name {name!r}: rename all but one")
    return list(names)


def normalisation(raw: ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute mean and standard deviation of each channel or feature of `raw`, float32, [channels,
    1, 1] or [features].

    A constant channel gets the deviation 1. For token numbers (int64) the mean is 0 and the
    deviation 1, both of shape [1].
    """
    if raw.dtype == np.int64:
        return torch.zeros(1), torch.ones(1)
    axes = (0, *range(2, raw.ndim))
    # Around the first sample's mean, so that the difference of squares loses no digits; in blocks,
    # to save memory.
    origin = raw[:1].astype(np.float64).mean(axes, keepdims=True)
    total = np.zeros_like(origin)
    squares = np.zeros_like(origin)
    for start in range(0, len(raw), 1024):
        block = raw[start : start + 1024] - origin
        total += block.sum(axes, keepdims=True)
        squares += np.square(block, out=block).sum(axes, keepdims=True)
    count = raw.size / origin.size
    variance = squares / count - (total / count) ** 2
    std = np.sqrt(np.maximum(variance, 0))
    mean = origin + total / count
    std = np.where(std > 0, std, 1)
    center, spread = (torch.from_numpy(values[0].astype(np.float32)) for values in (mean, std))
    return center, spread


def _first(strata: ndarray, size: int) -> ndarray:
    """Return the indices of the first `size` samples of each stratum."""
    order = np.argsort(strata, kind="stable")
    first = np.searchsorted(strata[order], strata[order])
    return np.sort(order[np.arange(len(strata)) - first < size])


def _chosen_samples(
    pool: SamplePool,
    data: DataConfig,
    fraction: float,
    clients: int,
    smoke: int | None,
    rng: np.random.Generator,
) -> ndarray:
    """Return the indices of a stratified `fraction` of a pool, or in a smoke run of about `smoke`
    samples a client."""
    grouped = data.partition == partition.NATURAL and pool.groups is not None
    strata = pool.groups if grouped and pool.groups is not None else pool.strata
    if smoke is not None and grouped:
        first = np.flatnonzero(strata < clients)
        return first[_first(strata[first], smoke)]
    if smoke is not None:
        return _first(
            strata,
            per_class(
                int(strata.max()) + 1,
                smoke,
                clients,
            ),
        )
    if fraction == 1:
        return np.arange(len(strata))
    return stratified(
        strata,
        max(1, round(fraction * len(strata))),
        rng,
    )
