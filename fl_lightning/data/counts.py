"""Sample counts by client and class, [N, C]: apportioned by weights, topped up to a minimum."""

import numpy as np
from numpy import ndarray

from fl_lightning.data.sampling import apportion


def class_sizes(
    train_labels: ndarray,
    test_labels: ndarray,
) -> tuple[ndarray, ndarray]:
    """Return the number of training samples and of test samples of each class, [C] each."""
    largest = max(train_labels.max(), test_labels.max())
    classes = 1 + int(largest)
    return np.bincount(train_labels, minlength=classes), np.bincount(test_labels, minlength=classes)


def share_out(
    mass: ndarray,
    class_sizes: ndarray,
) -> ndarray:
    """Return counts [N, C] that share out whole classes.

    Args:
        mass: weights [N, C]; clients get samples of a class in proportion to its column.
        class_sizes: samples of each class, [C].
    """
    columns = []
    for column, size in zip(mass.T, class_sizes, strict=True):
        columns.append(apportion(column, size))
    return np.stack(columns, axis=1)


def fill_in_turn(
    mass: ndarray,
    class_sizes: ndarray,
) -> ndarray:
    """Return counts [N, C] that give each client the same number of samples.

    The clients choose in the order of their numbers, from the samples that earlier ones have left.
    A client gets samples in proportion to its weights. If a class runs out, the client's other
    classes make up for it; if all of these run out, the classes that have samples left.

    Args:
        mass: weights [N, C].
        class_sizes: samples of each class, [C].
    """
    size = int(class_sizes.sum()) // len(mass)
    remaining = class_sizes.copy()
    counts = np.zeros(mass.shape, np.int64)
    for client, row in enumerate(mass):
        short = size
        while short:
            weights = np.where(remaining > 0, row, 0)
            shares = apportion(weights if weights.any() else remaining, short)
            take = np.minimum(shares, remaining)
            counts[client] += take
            remaining -= take
            short -= int(take.sum())
    return counts


def top_up(
    counts: ndarray,
    size: int,
    weights: ndarray,
    keep: int = 0,
    strict: bool = False,
) -> bool:
    """Move samples within `counts` [N, C], in place, until every client has at least `size`; return
    whether that succeeded.

    A client with fewer samples receives samples of its classes, those with the largest weights
    first. They come from the largest client that can give some and keep at least `size` samples in
    all and `keep` samples of the class. If no client can, the largest client gives samples of its
    most frequent class, even if the receiver's weight for that class is 0.

    Args:
        counts: samples by client and class.
        size: smallest number of samples of a client.
        weights: each client's weights for the classes, [N, C].
        keep: number of samples of the class that a giving client keeps at least.
        strict: return False if no client can give samples of a class with positive weight.
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
    """Choose `k` classes for each client at random; return [N, C], 1 where the client holds the
    class, else 0.

    Args:
        room: largest number of clients that may hold each class, [C].
        clients: number of clients, N.
        k: number of classes of each client.
        rng: for the random choices.
    """
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
        # largest remaining quota first, ties at random: otherwise a class could keep more places
        # than there are clients left
        order = quota + rng.random(len(quota))
        chosen = np.argsort(-order)[:k]
        holds[client, chosen] = 1
        quota[chosen] -= 1
    return holds
