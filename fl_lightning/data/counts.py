"""Whole samples by client and class, (N, C): dealt out by weights, topped up, held by so many
clients."""

import numpy as np
from numpy import ndarray

from fl_lightning.data.sampling import apportion


def class_sizes(
    train_labels: ndarray,
    test_labels: ndarray,
) -> tuple[ndarray, ndarray]:
    """Samples of each class, [C], for training and for test."""
    largest = max(train_labels.max(), test_labels.max())
    classes = 1 + int(largest)
    return np.bincount(train_labels, minlength=classes), np.bincount(test_labels, minlength=classes)


def share_out(
    mass: ndarray,
    class_sizes: ndarray,
) -> ndarray:
    """Counts [N, C]: each class dealt out whole, in proportion to its column of `mass`."""
    columns = []
    for column, size in zip(mass.T, class_sizes, strict=True):
        columns.append(apportion(column, size))
    return np.stack(columns, axis=1)


def fill_in_turn(
    mass: ndarray,
    class_sizes: ndarray,
) -> ndarray:
    """Counts [N, C] with equal row sums: each client takes by its row of `mass` from the classes
    not yet used up."""
    size = int(class_sizes.sum()) // len(mass)
    left = class_sizes.copy()
    counts = np.zeros(mass.shape, np.int64)
    for client, row in enumerate(mass):
        short = size
        while short:
            weights = np.where(left > 0, row, 0)
            shares = apportion(weights if weights.any() else left, short)
            take = np.minimum(shares, left)
            counts[client] += take
            left -= take
            short -= int(take.sum())
    return counts


def top_up(
    counts: ndarray,
    size: int,
    weights: ndarray,
    keep: int = 0,
    strict: bool = False,
) -> bool:
    """Move samples in `counts` [N, C], in place, until every row adds up to `size`; return whether
    that could be done.

    A poor client is given classes in the order of its row of `weights` (none where that is 0), each
    from the largest client that can spare it: donors stay at `size`, and at `keep` samples of the
    class. Where that does not suffice it is given whatever the largest client has most of, unless
    `strict`.
    """
    sizes = counts.sum(1)
    for poor in np.flatnonzero(sizes < size):
        by_weight = np.argsort(-weights[poor], kind="stable")
        fitting = [c for c in by_weight if weights[poor, c] > 0]
        while sizes[poor] < size:
            for c in fitting:
                spare = np.minimum(counts[:, c] - keep, sizes - size)
                sizes_of_donors = np.where(spare > 0, sizes, -1)
                donor = int(np.argmax(sizes_of_donors))
                if spare[donor] > 0:
                    break
            else:
                if strict:
                    return False
                donor = int(np.argmax(sizes))
                c = np.argmax(counts[donor])
                spare = np.minimum(counts[:, c], sizes - size)
            moved = min(int(spare[donor]), size - int(sizes[poor]))
            counts[donor, c] -= moved
            counts[poor, c] += moved
            sizes[donor] -= moved
            sizes[poor] += moved
    return True


def holders(
    room: ndarray,
    clients: int,
    k: int,
    rng: np.random.Generator,
) -> ndarray:
    """Which classes each client holds, 0 or 1 [N, C]: k in each row and at most `room` [C] in each
    column."""
    quota = np.zeros_like(room)
    places = clients * k
    while places:
        open_classes = np.flatnonzero(quota < room)
        if places < len(open_classes):
            open_classes = rng.choice(open_classes, places, replace=False)
        step = max(1, places // len(open_classes))
        before = quota.sum()
        quota[open_classes] = np.minimum(quota[open_classes] + step, room[open_classes])
        places -= int(quota.sum() - before)
    holds = np.zeros((clients, len(room)), np.int64)
    for client in range(clients):
        # Largest remaining quota first (ties at random): no class can then be left with more places
        # than clients.
        order = quota + rng.random(len(quota))
        chosen = np.argsort(-order)[:k]
        holds[client, chosen] = 1
        quota[chosen] -= 1
    return holds
