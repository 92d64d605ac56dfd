"""Partitions of the samples among clients: pure functions of label arrays.

A partition is called with (train_labels [n], test_labels [m], clients, data, rng) and returns two
lists of `clients` ascending index arrays, for training and for test. No sample is dealt twice. A
client has the same class mix in both, as far as whole samples allow.

Every client gets at least `samples_needed(data)` training samples and one test sample: clients that
would get fewer receive samples from those that hold most. Drawing again until all have enough might
never end for small alpha.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from fl_lightning.configuration.components import Component
from fl_lightning.configuration.config import DataConfig, check
from fl_lightning.data.counts import class_sizes, fill_in_turn, holders, share_out, top_up
from fl_lightning.data.sampling import apportion, draw, stratified, systematic
from fl_lightning.foundation.errors import BadInput

NATURAL = "natural"
Shares = list[ndarray]
Partition = Callable[[ndarray, ndarray, int, DataConfig, Generator], tuple[Shares, Shares]]


@dataclass(frozen=True)
class Groups:
    """The group of each sample, for the natural partition."""

    train: ndarray
    """int64 [n]."""
    test: ndarray
    """int64 [m]."""
    names: list[str]


def samples_needed(data: DataConfig) -> int:
    """Return how many training samples a client must be dealt so that `data.min_samples` remain
    after its validation and own test parts are cut off."""
    need = data.min_samples
    for share in (data.validation, data.own_test):
        if share:
            need = max(need + 1, math.ceil(need / (1 - share)))
    return need


def deal(
    train_labels: ndarray,
    test_labels: ndarray,
    clients: int,
    data: DataConfig,
    rng: Generator,
    groups: Groups | None = None,
) -> tuple[Shares, Shares]:
    """Deal the samples out by the partition `data.partition`; return each client's training and
    test indices.

    Raises:
        BadInput: there are too few samples for `clients`, or a user's function fails.
    """
    if data.partition == NATURAL:
        return _natural(groups, clients, data)
    train_size = len(train_labels)
    test_size = len(test_labels)
    need = samples_needed(data)
    most_clients = train_size // need
    problem = (
        f"it can be at most {most_clients}: {train_size} training samples are in use and each "
        f"client needs {need} (data.min_samples, data.fraction)"
    )
    check("federation.clients", clients, clients <= most_clients, problem)
    problem = (
        f"it can be at most {test_size}: each client needs a test sample and {test_size} are in "
        f"use (data.fraction)"
    )
    check("federation.clients", clients, clients <= test_size, problem)
    function = _partition(data.partition)
    try:
        train, test = function(train_labels, test_labels, clients, data, rng)
    except BadInput:
        raise
    except Exception as error:  # a user's function can raise anything
        problem = f"it raised {type(error).__name__}: {error}"
        raise BadInput("data.partition", data.partition, problem) from error
    if data.partition not in BUILT_IN:
        train = _checked_shares(data.partition, "train", train, train_size, clients, need)
        test = _checked_shares(data.partition, "test", test, test_size, clients, 1)
    return train, test


def dirichlet(
    train_labels: ndarray,
    test_labels: ndarray,
    clients: int,
    data: DataConfig,
    rng: Generator,
) -> tuple[Shares, Shares]:
    """Label skew by Dirichlet draws; the smaller `data.alpha`, the more the clients differ.

    With `data.by: class` (the default), a draw from the symmetric Dirichlet distribution Dir(alpha,
    ..., alpha) gives the N clients' shares of each class (Yurochkin et al., 2019). With
    `data.by: client`, each client draws its class mix from Dir(alpha p), where p is the class mix
    of the data (Hsu et al., 2019).

    With `data.sizes: free`, all samples are dealt out. With `data.sizes: equal`, all clients get
    the same number: they choose in turn from the samples that are left, as in Hsu et al.; fewer
    than N training samples and fewer than N test samples go to no client.
    """
    train_sizes, test_sizes = class_sizes(train_labels, test_labels)
    present = np.flatnonzero(train_sizes)
    mass = np.zeros((clients, len(train_sizes)))
    if data.by != "client":
        draws = rng.dirichlet(np.full(clients, data.alpha), size=len(present))
        mass[:, present] = draws.T * train_sizes[present]
    else:
        mass[:, present] = rng.dirichlet(
            data.alpha * train_sizes[present] / train_sizes.sum(), size=clients
        )
    mass = np.nan_to_num(mass)  # a draw for a tiny alpha may underflow to 0 / 0
    if data.sizes == "equal":
        train = fill_in_turn(mass, train_sizes)
        test = fill_in_turn(train, test_sizes)
        return draw(train, train_labels, rng), draw(test, test_labels, rng)
    return _free_sizes(mass, train_labels, test_labels, data, rng)


def _free_sizes(
    mass: ndarray,
    train_labels: ndarray,
    test_labels: ndarray,
    data: DataConfig,
    rng: Generator,
) -> tuple[Shares, Shares]:
    """Deal out every sample, each class in proportion to its column of `mass` [N, C]."""
    train_sizes, test_sizes = class_sizes(train_labels, test_labels)
    train = share_out(mass, train_sizes)
    top_up(train, samples_needed(data), weights=train.copy())
    test = share_out(train, test_sizes)
    top_up(test, 1, weights=train)
    return draw(train, train_labels, rng), draw(test, test_labels, rng)


def hsu(
    train_labels: ndarray,
    test_labels: ndarray,
    clients: int,
    data: DataConfig,
    rng: Generator,
) -> tuple[Shares, Shares]:
    """The "latent Dirichlet" partition of Hsu, Qi, Brown (2019): `dirichlet` by client, with equal
    sizes."""
    return dirichlet(
        train_labels, test_labels, clients, replace(data, by="client", sizes="equal"), rng
    )


def mixture(
    train_labels: ndarray,
    test_labels: ndarray,
    clients: int,
    data: DataConfig,
    rng: Generator,
) -> tuple[Shares, Shares]:
    """Mixture of `data.groups` Dirichlet distributions; client i is in group i modulo
    `data.groups`.

    Each group draws a class mix m from Dir(alpha), and each of its clients a mix from
    Dir(concentration m), with `data.concentration`. All samples of a class are dealt out, in
    proportion to the clients' mixes. Ours; clustered methods look for such groups (Ghosh et al.,
    NeurIPS 2020).
    """
    requirement = f"it can be at most {clients}: each group needs a client"
    check("data.groups", data.groups, data.groups <= clients, requirement)
    train_sizes, _ = class_sizes(train_labels, test_labels)
    present = np.flatnonzero(train_sizes)
    centres = rng.dirichlet(np.full(len(present), data.alpha), size=data.groups)
    mixes = [
        rng.dirichlet(np.maximum(data.concentration * centres[i % data.groups], 1e-6))
        for i in range(clients)
    ]
    mass = np.zeros((clients, len(train_sizes)))
    mass[:, present] = np.nan_to_num(np.array(mixes))
    return _free_sizes(mass, train_labels, test_labels, data, rng)


def pathological(
    train_labels: ndarray,
    test_labels: ndarray,
    clients: int,
    data: DataConfig,
    rng: Generator,
) -> tuple[Shares, Shares]:
    """Every client holds exactly `data.classes_per_client` classes, after the shards of McMahan et
    al. (2017).

    Two classes differ by at most one in their number of holders, and the holders of a class share
    it equally. If clients * classes_per_client is less than the number of classes, the classes
    without a holder stay out.
    """
    k = data.classes_per_client
    key = "data.classes_per_client"
    train_sizes = class_sizes(train_labels, test_labels)[0]
    classes = int(np.count_nonzero(train_sizes))
    check(key, k, k <= classes, f"the training data have only {classes} classes: lower it")
    room = np.minimum(train_sizes, clients)
    problem = f"the classes have too few samples to give {clients} clients that many each: lower it"
    check(key, k, room.sum() >= clients * k, problem)
    holds = holders(room, clients, k, rng)
    train = share_out(holds, np.where(holds.any(0), train_sizes, 0))
    return _of_held_classes(train, holds, train_labels, test_labels, data, rng)


def lognormal(
    train_labels: ndarray,
    test_labels: ndarray,
    clients: int,
    data: DataConfig,
    rng: Generator,
) -> tuple[Shares, Shares]:
    """Client u holds the classes u, u + 1, ... (`data.classes_per_client` of C, modulo C) in
    lognormal counts (KT-pFL).

    As in KT-pFL's code, a client asks for three amounts of each of its classes: 10 samples; a share
    of the class (a lognormal draw of deviation 2, divided by the sum of all clients' draws for the
    class); and a uniform draw from 300 to 600 samples. With up to 20 clients, the share and the
    uniform draw are doubled.

    If a class has fewer samples than its holders ask for, all of them get less, in proportion
    (ours; in KT-pFL's code the last clients get only 10).
    """
    k = data.classes_per_client
    key = "data.classes_per_client"
    train_sizes = class_sizes(train_labels, test_labels)[0]
    present = np.flatnonzero(train_sizes)
    problem = f"the training data have only {len(present)} classes: lower it"
    check(key, k, k <= len(present), problem)
    client, place = np.divmod(np.arange(clients * k), k)
    owned = (client + place) % len(present)
    draws = rng.lognormal(0, 2, (len(present), clients, k))
    shares = draws / draws.sum((1, 2), keepdims=True)
    rest = np.maximum(train_sizes[present][owned] - clients, 0)
    fixed = rng.integers(300, 601, len(owned))
    more = np.floor(shares[owned, client, place] * rest) + fixed
    weights = np.zeros((clients, len(train_sizes)), np.int64)
    weights[client, present[owned]] = 10 + more * (2 if clients <= 20 else 1)
    train = share_out(weights, np.minimum(weights.sum(0), train_sizes))
    return _of_held_classes(train, weights, train_labels, test_labels, data, rng)


def _of_held_classes(
    train: ndarray,
    weights: ndarray,
    train_labels: ndarray,
    test_labels: ndarray,
    data: DataConfig,
    rng: Generator,
) -> tuple[Shares, Shares]:
    """Draw the training samples for the counts `train` [N, C], and test samples in the same
    proportions.

    Clients with too few samples get more of their classes, those with positive `weights`.
    """
    clients = len(train)
    k = data.classes_per_client
    is_enough = top_up(train, samples_needed(data), weights=weights, keep=1, strict=True)
    problem = (
        f"lower it: the {k} classes of some client, shared by {clients} clients, have too few "
        f"samples"
    )
    check("data.min_samples", data.min_samples, is_enough, problem)
    test_sizes = np.bincount(test_labels, minlength=train.shape[1])
    test = share_out(train, np.where(train.any(0), test_sizes, 0))
    is_enough = top_up(test, 1, weights=train, strict=True)
    problem = "some client's classes have too few test samples to give each holder one: lower it"
    check("federation.clients", clients, is_enough, problem)
    return draw(train, train_labels, rng), draw(test, test_labels, rng)


def _natural(
    groups: Groups | None,
    clients: int,
    data: DataConfig,
) -> tuple[Shares, Shares]:
    """Give the i-th group to client i."""
    if groups is None:
        problem = (
            "the data have no groups: choose a source that has (fl-train list sources), or name a "
            "data.group_column"
        )
        raise BadInput("data.partition", NATURAL, problem)
    column = data.group_column
    kind = "group of the data" if column is None else f"value of {column!r} (data.group_column)"
    requirement = f"it must be {len(groups.names)}: a client for each {kind}"
    check("federation.clients", clients, clients == len(groups.names), requirement)
    train = [np.flatnonzero(groups.train == client) for client in range(clients)]
    test = [np.flatnonzero(groups.test == client) for client in range(clients)]
    need = samples_needed(data)
    for name, train_share, test_share in zip(groups.names, train, test, strict=True):
        count = len(train_share)
        problem = f"the client {name!r} has {count} training samples and needs {need}: lower it"
        check("data.min_samples", data.min_samples, count >= need, problem)
        problem = (
            f"the client {name!r} has no test sample: set it to the share of each client's "
            f"samples that becomes its test part"
        )
        check("data.client_test", data.client_test, len(test_share) > 0, problem)
    return train, test


def cap(
    train: Shares,
    labels: ndarray,
    data: DataConfig,
    rng: Generator,
) -> Shares:
    """Limit each client's training samples to `data.samples_per_class` of each class, and then to
    `data.samples_per_client` in all; the second limit keeps the client's class mix.

    The second limit does not hold for the client `data.rest_to`, which also gets the samples that
    this limit takes from the other clients.

    Raises:
        BadInput: a client would have fewer samples than it needs, or `data.rest_to` is no client.
    """
    need = samples_needed(replace(data, client_test=None, folds=None))
    most_of_class = data.samples_per_class
    if most_of_class is not None:
        capped = []
        for share in train:
            counts = np.minimum(np.bincount(labels[share]), most_of_class)
            [index] = draw(counts[None], labels[share], rng)
            capped.append(share[index])
        train = capped
        fewest = min(map(len, train))
        problem = (
            f"some client would keep {fewest} samples, and each needs {need} (data.min_samples, "
            f"data.validation): raise it"
        )
        check("data.samples_per_class", most_of_class, fewest >= need, problem)
    size = data.samples_per_client
    if size is None:
        return train
    requirement = (
        f"it must be at least {need}: each client needs that many (data.min_samples, "
        f"data.validation)"
    )
    check("data.samples_per_client", size, size >= need, requirement)
    capped_shares = []
    for share in train:
        is_small = len(share) <= size
        capped_shares.append(share if is_small else share[stratified(labels[share], size, rng)])
    heir = data.rest_to
    if heir is not None:
        requirement = f"clients are numbered 0 to {len(train) - 1}: choose one"
        check("data.rest_to", heir, heir < len(train), requirement)
        nothing = train[0][:0]
        other_shares = [share for client, share in enumerate(capped_shares) if client != heir]
        others_samples = np.concatenate([nothing, *other_shares])
        capped_shares[heir] = np.setdiff1d(
            np.concatenate(train), others_samples, assume_unique=True
        )
    return capped_shares


def iid(
    train_labels: ndarray,
    test_labels: ndarray,
    clients: int,
    data: DataConfig,
    rng: Generator,
) -> tuple[Shares, Shares]:
    """Shuffle, and cut into shares whose sizes differ by at most one."""
    shares = []
    for labels in (train_labels, test_labels):
        parts = np.array_split(rng.permutation(len(labels)), clients)
        shares.append([np.sort(part) for part in parts])
    return shares[0], shares[1]


BUILT_IN: dict[str, Partition] = {
    "dirichlet": dirichlet,
    "hsu": hsu,
    "pathological": pathological,
    "lognormal": lognormal,
    "mixture": mixture,
    "rotated": iid,
    "iid": iid,
}
"""Partitions by name; `rotated` deals like `iid`, and its images are rotated by `angles` when they
are read."""


def angles(clients: int) -> list[float]:
    """Return the degrees by which the rotated partition rotates each client's images,
    counter-clockwise: 360 i / N, as in FEDORA."""
    return [360 * client / clients for client in range(clients)]


def cut_off(
    train: Shares,
    labels: ndarray,
    share: float,
    rng: Generator,
    by_chance: bool = False,
) -> tuple[Shares, Shares]:
    """Cut a stratified share off each client's training samples; return each client's remaining
    indices, and the indices that were cut off.

    Of client i's n_i samples, m_i = floor(share * n_i) are cut off, and at least one (none if
    `share` is 0): of its n_ik samples of class k, m_i n_ik / n_i, rounded by largest remainders.
    This rounding is the same with every seed, so a small class may never lose a sample. With
    `by_chance` (for `data.client_test`) the rounding is random, and right on average over seeds
    (`sampling.systematic`).
    """
    if share == 0:
        return train, [np.empty(0, np.int64) for _ in train]
    sizes = np.array([len(indices) for indices in train])
    pooled = np.concatenate(train)
    owner = np.repeat(np.arange(len(train)), sizes)
    classes = int(labels.max()) + 1
    group = owner * classes + labels[pooled]
    counts = np.bincount(group, minlength=len(train) * classes)
    totals = np.floor(share * sizes + 1e-9).astype(np.int64)
    totals = np.maximum(1, totals)
    order = rng.permutation(len(pooled))
    starts = rng.integers(0, sizes) if by_chance else sizes
    counts_of_clients = counts.reshape(len(train), classes)
    test_counts = []
    draws = zip(counts_of_clients, totals.tolist(), starts.tolist(), strict=True)
    for row, total, start in draws:
        test_counts.append(systematic(row, total, start) if by_chance else apportion(row, total))
    order = order[np.argsort(group[order], kind="stable")]
    begins = np.cumsum(counts) - counts
    place = np.arange(len(pooled)) - np.repeat(begins, counts)
    is_out = np.zeros(len(pooled), bool)
    test_counts_of_group = np.repeat(np.concatenate(test_counts), counts)
    is_out[order[place < test_counts_of_group]] = True
    parts = np.split(is_out, np.cumsum(sizes)[:-1])
    rest = []
    cut = []
    for indices, out in zip(train, parts, strict=True):
        rest.append(indices[~out])
        cut.append(indices[out])
    return rest, cut


def _partition(name: str) -> Partition:
    """Return the partition that `data.partition` names, or imports."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    choices = (
        f"choose among {', '.join([*BUILT_IN, NATURAL])}, or give the import path of a function"
    )
    check("data.partition", name, name.find(".") > 0, choices)
    try:
        function: Partition = Component(name).load()
    except (ImportError, AttributeError) as error:
        raise BadInput("data.partition", name, f"{error}; {choices}") from error
    check("data.partition", name, callable(function), f"it is not a function; {choices}")
    return function


def _checked_shares(
    name: str,
    part: str,
    shares: Shares,
    total: int,
    clients: int,
    size: int,
) -> Shares:
    """Check the shares that a user's function returned for a part; return them as sorted index
    arrays.

    Args:
        name: import path of the function.
        part: `train` or `test`.
        shares: the returned index arrays.
        total: number of samples of the part.
        clients: number of clients.
        size: fewest samples of a client.

    Raises:
        BadInput: the shares are no such arrays, or deal a sample twice.
    """

    def must(holds: bool, problem: str) -> None:
        check("data.partition", name, holds, f"the {part} shares that it returned {problem}")

    try:
        arrays = [np.asarray(share) for share in shares]
    except (TypeError, ValueError):
        arrays = []
        must(False, "must be a list of index arrays")
    count = len(arrays)
    must(count == clients, f"must be {clients} index arrays, not {count}")
    for array in arrays:
        are_numbers = array.ndim == 1 and np.issubdtype(array.dtype, np.integer)
        must(are_numbers, "must be one-dimensional arrays of whole numbers")
    pooled = np.concatenate(arrays)
    least_index = int(pooled.min(initial=0))
    greatest = int(pooled.max(initial=0))
    problem = f"must index {total} samples, but hold {least_index} to {greatest}"
    must(least_index >= 0 and greatest < total, problem)
    must(len(np.unique(pooled)) == len(pooled), "hold some sample twice")
    for client, array in enumerate(arrays):
        problem = f"give client {client} only {len(array)} samples, and each client needs {size}"
        must(len(array) >= size, problem)
    return [np.sort(array).astype(np.int64) for array in arrays]
