"""Who holds which samples: pure functions of label arrays.

A partition takes (train_labels [n], test_labels [m], clients, data, rng) and returns two lists of
`clients` ascending index arrays, for train and for test. No sample is dealt twice. A client has one
class mix, for training (of which a stratified share becomes validation) and for test, as far as
whole samples allow.

Every client gets at least `least(data)` training samples and one test sample: where the draw gives
fewer, samples move to it from the clients that hold most, which always ends, instead of drawing
again, which for small alpha may not.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fl_lightning.configuration.components import Component
from fl_lightning.configuration.config import DataConfig, check
from fl_lightning.data.counts import class_sizes, fill_in_turn, holders, share_out, top_up
from fl_lightning.data.sampling import apportion, draw, stratified, systematic
from fl_lightning.foundation.errors import BadInput

NATURAL = "natural"
Shares = list[np.ndarray]
Partition = Callable[
    [np.ndarray, np.ndarray, int, DataConfig, np.random.Generator], tuple[Shares, Shares]
]


@dataclass(frozen=True)
class Groups:
    """Which group each sample belongs to, for the natural partition."""

    train: np.ndarray
    """int64 [n]."""
    test: np.ndarray
    """int64 [m]."""
    names: list[str]


def least(data: DataConfig) -> int:
    """Samples a client needs so that `data.min_samples` are left for training once all else is held
    back."""
    need = data.min_samples
    for share in (data.validation, data.own_test):
        if share:
            need = max(need + 1, math.ceil(need / (1 - share)))
    return need


def deal(
    train_labels: np.ndarray,
    test_labels: np.ndarray,
    clients: int,
    data: DataConfig,
    rng: np.random.Generator,
    groups: Groups | None = None,
) -> tuple[Shares, Shares]:
    """Deal by the partition that `data` names; raise `BadInput` when there are too few samples for
    `clients`."""
    if data.partition == NATURAL:
        return _natural(groups, clients, data)
    train_size = len(train_labels)
    test_size = len(test_labels)
    need = least(data)
    why = (
        f"{train_size} training samples are in use and each client needs {need} (data.min_samples, "
        f"data.fraction)"
    )
    check(
        "federation.clients",
        clients,
        train_size >= clients * need,
        f"it can be at most {train_size // need}: {why}",
    )
    why = f"each client needs a test sample and {test_size} are in use (data.fraction)"
    check(
        "federation.clients", clients, test_size >= clients, f"it can be at most {test_size}: {why}"
    )
    shared_out = _find(data.partition)
    try:
        train, test = shared_out(train_labels, test_labels, clients, data, rng)
    except BadInput:
        raise
    except Exception as error:  # a user's function can raise anything
        raise BadInput(
            "data.partition", data.partition, f"it failed: {type(error).__name__}: {error}"
        ) from error
    if data.partition not in BUILT_IN:
        train = _checked(data.partition, "train", train, train_size, clients, need)
        test = _checked(data.partition, "test", test, test_size, clients, 1)
    return train, test


def dirichlet(
    train_labels: np.ndarray,
    test_labels: np.ndarray,
    clients: int,
    data: DataConfig,
    rng: np.random.Generator,
) -> tuple[Shares, Shares]:
    """Label skew by Dirichlet draws, smaller `data.alpha` less alike.

    by class (also None): each class is distributed over the clients by a draw from Dir(alpha 1_N)
    (Yurochkin et al., 2019). by client: each client draws its class mix from Dir(alpha p), p the
    class shares of the data (Hsu et al., 2019). Free sizes: every sample is dealt out. Equal sizes:
    clients fill up in turn from what is left, as Hsu et al. do, and fewer than N training and fewer
    than N test samples stay out.
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
    mass = np.nan_to_num(mass)  # a draw for a minute alpha may underflow to 0 / 0
    if data.sizes == "equal":
        train = fill_in_turn(mass, train_sizes)
        test = fill_in_turn(train, test_sizes)
        return draw(train, train_labels, rng), draw(test, test_labels, rng)
    return _free_sizes(mass, train_labels, test_labels, data, rng)


def _free_sizes(
    mass: np.ndarray,
    train_labels: np.ndarray,
    test_labels: np.ndarray,
    data: DataConfig,
    rng: np.random.Generator,
) -> tuple[Shares, Shares]:
    """Every sample dealt out, each class in proportion to its column of `mass` [N, C]."""
    train_sizes, test_sizes = class_sizes(train_labels, test_labels)
    train = share_out(mass, train_sizes)
    top_up(train, least(data), weights=train.copy())
    test = share_out(train, test_sizes)
    top_up(test, 1, weights=train)
    return draw(train, train_labels, rng), draw(test, test_labels, rng)


def hsu(
    train_labels: np.ndarray,
    test_labels: np.ndarray,
    clients: int,
    data: DataConfig,
    rng: np.random.Generator,
) -> tuple[Shares, Shares]:
    """The "latent Dirichlet" partition of Hsu, Qi, Brown (2019): `dirichlet` by client, with equal
    sizes."""
    return dirichlet(
        train_labels, test_labels, clients, replace(data, by="client", sizes="equal"), rng
    )


def mixture(
    train_labels: np.ndarray,
    test_labels: np.ndarray,
    clients: int,
    data: DataConfig,
    rng: np.random.Generator,
) -> tuple[Shares, Shares]:
    """A mixture of `data.groups` Dirichlet distributions: client i is of group i modulo that
    (`FederatedData.groups`).

    A group draws a class mix m from Dir(alpha), each of its clients one of its own from
    Dir(concentration m). A class is distributed in proportion to the clients' mixes, without a
    rest. Ours; clients that are alike in groups are what clustered methods look for (Ghosh et al.,
    NeurIPS 2020).
    """
    check(
        "data.groups",
        data.groups,
        data.groups <= clients,
        f"it can be at most {clients}: a group has a client",
    )
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
    train_labels: np.ndarray,
    test_labels: np.ndarray,
    clients: int,
    data: DataConfig,
    rng: np.random.Generator,
) -> tuple[Shares, Shares]:
    """Every client holds exactly `data.classes_per_client` classes, after the shards of McMahan et
    al. (2017).

    Each class has as many holders as any other (give or take one), who share it equally. With fewer
    than C places (clients * classes_per_client) some classes have no holder and stay out.
    """
    k = data.classes_per_client
    key = "data.classes_per_client"
    train_sizes = class_sizes(train_labels, test_labels)[0]
    classes = int(np.count_nonzero(train_sizes))
    check(key, k, k <= classes, f"the data have {classes} classes")
    room = np.minimum(train_sizes, clients)
    if room.sum() < clients * k:
        raise BadInput(
            key,
            k,
            f"some classes have too few samples for {clients} clients to hold that many each",
        )
    holds = holders(room, clients, k, rng)
    train = share_out(holds, np.where(holds.any(0), train_sizes, 0))
    return _of_held_classes(train, holds, train_labels, test_labels, data, rng)


def lognormal(
    train_labels: np.ndarray,
    test_labels: np.ndarray,
    clients: int,
    data: DataConfig,
    rng: np.random.Generator,
) -> tuple[Shares, Shares]:
    """Client u holds classes u, u + 1, ... (`data.classes_per_client` of C, modulo C) in lognormal
    counts (KT-pFL).

    As its code has it, a client asks for 10 samples of each of its classes, and for a share of the
    class by a lognormal draw (deviation 2, over all N k draws of the class) and 300 to 600 more,
    both twice with up to 20 clients. Where a class has fewer than its holders ask for (there, late
    clients keep 10), all of them get less in proportion: ours.
    """
    k = data.classes_per_client
    key = "data.classes_per_client"
    train_sizes = class_sizes(train_labels, test_labels)[0]
    present = np.flatnonzero(train_sizes)
    check(key, k, k <= len(present), f"the data have {len(present)} classes")
    client, place = np.divmod(np.arange(clients * k), k)
    owned = (client + place) % len(present)
    draws = rng.lognormal(0, 2, (len(present), clients, k))
    shares = (draws / draws.sum((1, 2), keepdims=True))[owned, client, place]
    more = np.floor(shares * np.maximum(train_sizes[present][owned] - clients, 0)) + rng.integers(
        300, 601, len(owned)
    )
    weights = np.zeros((clients, len(train_sizes)), np.int64)
    weights[client, present[owned]] = 10 + more * (2 if clients <= 20 else 1)
    train = share_out(weights, np.minimum(weights.sum(0), train_sizes))
    return _of_held_classes(train, weights, train_labels, test_labels, data, rng)


def _of_held_classes(
    train: np.ndarray,
    weights: np.ndarray,
    train_labels: np.ndarray,
    test_labels: np.ndarray,
    data: DataConfig,
    rng: np.random.Generator,
) -> tuple[Shares, Shares]:
    """Samples for the counts `train` [N, C], topped up within the classes of `weights`, and for
    tests of those."""
    clients = len(train)
    k = data.classes_per_client
    if not top_up(
        train,
        least(data),
        weights=weights,
        keep=1,
        strict=True,
    ):
        problem = (
            f"lower it: some client's {k} classes, shared by {clients} clients, have too few "
            f"samples for that"
        )
        raise BadInput("data.min_samples", data.min_samples, problem)
    test = share_out(
        train,
        np.where(
            train.any(0),
            np.bincount(test_labels, minlength=train.shape[1]),
            0,
        ),
    )
    if not top_up(test, 1, weights=train, strict=True):
        problem = "the classes of some client have too few test samples for one each"
        raise BadInput("federation.clients", clients, problem)
    return draw(train, train_labels, rng), draw(test, test_labels, rng)


def _natural(
    groups: Groups | None,
    clients: int,
    data: DataConfig,
) -> tuple[Shares, Shares]:
    """Client i holds the i-th group."""
    if groups is None:
        problem = (
            "the data have no groups: it needs a source that has (fl-train list sources), or "
            "data.group_column"
        )
        raise BadInput("data.partition", NATURAL, problem)
    column = data.group_column
    of = "group of the data" if column is None else f"value of {column!r} (data.group_column)"
    problem = f"it must be {len(groups.names)}: a client for each {of}"
    check("federation.clients", clients, clients == len(groups.names), problem)
    train, test = (
        [np.flatnonzero(part == i) for i in range(clients)] for part in (groups.train, groups.test)
    )
    for name, ours, theirs in zip(groups.names, train, test, strict=True):
        problem = f"the client {name!r} has {len(ours)} training samples, of at least {least(data)}"
        check(
            "data.min_samples",
            data.min_samples,
            len(ours) >= least(data),
            problem,
        )
        problem = (
            f"the client {name!r} has no test sample: data.client_test sets a share of each "
            f"client's samples apart"
        )
        check("data.client_test", data.client_test, len(theirs) > 0, problem)
    return train, test


def keep(
    train: Shares,
    labels: np.ndarray,
    data: DataConfig,
    rng: np.random.Generator,
) -> Shares:
    """At most `data.samples_per_class` of each class in a client's share, and of the whole
    `data.samples_per_client`, with its class mix; the rest to `data.rest_to`.

    Raises:
        BadInput: fewer than every client needs, or there is no such client.
    """
    size = data.samples_per_client
    heir = data.rest_to
    most = data.samples_per_class
    if most is not None:
        train = [
            indices[
                draw(np.minimum(np.bincount(labels[indices]), most)[None], labels[indices], rng)[0]
            ]
            for indices in train
        ]
        fewest = min(map(len, train))
        need = least(replace(data, client_test=None, folds=None))
        problem = (
            f"some client keeps {fewest} samples, and each needs {need} (data.min_samples, "
            f"data.validation)"
        )
        check("data.samples_per_class", most, fewest >= need, problem)
    if size is None:
        return train
    if size < (need := least(replace(data, client_test=None, folds=None))):
        problem = (
            f"it must be at least {need}: each client needs that many (data.min_samples, "
            f"data.validation)"
        )
        raise BadInput("data.samples_per_client", size, problem)
    if heir is not None and heir >= len(train):
        raise BadInput("data.rest_to", heir, f"clients are numbered 0 to {len(train) - 1}")
    kept = [
        share if len(share) <= size else share[stratified(labels[share], size, rng)]
        for share in train
    ]
    if heir is not None:
        others = np.concatenate(
            [share for client, share in enumerate(kept) if client != heir] or [train[0][:0]]
        )
        kept[heir] = np.setdiff1d(
            np.concatenate(train),
            others,
            assume_unique=True,
        )
    return kept


def iid(
    train_labels: np.ndarray,
    test_labels: np.ndarray,
    clients: int,
    data: DataConfig,
    rng: np.random.Generator,
) -> tuple[Shares, Shares]:
    """Shuffle and cut into shares whose sizes differ by at most one."""
    pools = (rng.permutation(len(train_labels)), rng.permutation(len(test_labels)))
    train, test = ([np.sort(share) for share in np.array_split(pool, clients)] for pool in pools)
    return train, test


BUILT_IN: dict[str, Partition] = {
    "dirichlet": dirichlet,
    "hsu": hsu,
    "pathological": pathological,
    "lognormal": lognormal,
    "mixture": mixture,
    "rotated": iid,
    "iid": iid,
}
"""The partitions by name; `rotated` deals like iid, and the images are turned by `angles` when they
are read."""


def angles(clients: int) -> list[float]:
    """Degrees by which the rotated partition turns each client's images, counter-clockwise: 360 i /
    N, as in FEDORA."""
    return [360 * client / clients for client in range(clients)]


def hold_out(
    train: Shares,
    labels: np.ndarray,
    share: float,
    rng: np.random.Generator,
    by_chance: bool = False,
) -> tuple[Shares, Shares]:
    """Split each client's training share into what is left for training and a stratified share that
    is held out.

    Of client i's n_i samples m_i = floor(share * n_i) are held out, and at least one, unless
    `share` is 0. Of n_ik samples of class k these are m_i n_ik / n_i, rounded to the largest
    remainders: the same number with every seed, and of a small class always none. With `by_chance`
    (`data.client_test`) it is rounded down or up at random, so that its mean over seeds is exact:
    `sampling.systematic`.
    """
    if share == 0:
        return train, [np.empty(0, np.int64) for _ in train]
    sizes = np.array([len(indices) for indices in train])
    pooled = np.concatenate(train)
    owner = np.repeat(np.arange(len(train)), sizes)
    classes = int(labels.max()) + 1
    group = owner * classes + labels[pooled]
    counts = np.bincount(group, minlength=len(train) * classes)
    takes = np.maximum(1, np.floor(share * sizes + 1e-9)).astype(np.int64)
    rows = counts.reshape(len(train), classes)
    order = rng.permutation(len(pooled))
    starts = rng.integers(0, sizes) if by_chance else sizes
    each = zip(
        rows,
        takes.tolist(),
        starts.tolist(),
        strict=True,
    )
    kinds = [
        systematic(row, take, start) if by_chance else apportion(row, take)
        for row, take, start in each
    ]
    takes = np.concatenate(kinds)
    order = order[np.argsort(group[order], kind="stable")]
    place = np.arange(len(pooled)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_out = np.zeros(len(pooled), bool)
    is_out[order[place < np.repeat(takes, counts)]] = True
    cuts = np.cumsum(sizes)[:-1]
    parts = list(
        zip(
            np.split(pooled, cuts),
            np.split(is_out, cuts),
            strict=True,
        )
    )
    return [indices[~out] for indices, out in parts], [indices[out] for indices, out in parts]


def _find(name: str) -> Partition:
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


def _checked(
    name: str,
    part: str,
    shares: Shares,
    total: int,
    clients: int,
    size: int,
) -> Shares:
    """What a user's function returned, as sorted index arrays, or `BadInput`."""

    def refuse(what: str) -> BadInput:
        return BadInput("data.partition", name, f"what it returned for {part} {what}")

    try:
        arrays = [np.asarray(share) for share in shares]
    except (TypeError, ValueError) as error:
        raise refuse("must be a list of index arrays") from error
    if len(arrays) != clients:
        raise refuse(f"must be a list of {clients} index arrays, but has the length {len(arrays)}")
    if any(array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) for array in arrays):
        raise refuse("must be one-dimensional arrays of whole numbers")
    pooled = np.concatenate(arrays)
    if len(pooled) and (pooled.min() < 0 or pooled.max() >= total):
        raise refuse(f"must index {total} samples, but lies in {pooled.min()} to {pooled.max()}")
    if len(np.unique(pooled)) < len(pooled):
        raise refuse("deals some sample twice")
    smallest = int(np.argmin([len(array) for array in arrays]))
    if len(arrays[smallest]) < size:
        raise refuse(
            f"gives client {smallest} {len(arrays[smallest])} samples, but each needs {size}"
        )
    return [np.sort(array).astype(np.int64) for array in arrays]
