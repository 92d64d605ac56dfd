"""Groups of clients planted in the data, with different tasks, so that the right partners are
known.

Client i is in group i modulo `data.groups`, whatever the seed. Clustered federated learning is
tested on such data: with rotated images in IFCA (Ghosh et al., NeurIPS 2020), with permuted labels
in CFL (Sattler et al., TNNLS 2020). Labels shifted by the group's number are ours: any two groups
disagree about every class. With `data.drift_every` clients change groups as rounds go by, as in
FedDrift (Jothimurugesan et al., AISTATS 2023), where each client has times of its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from fl_lightning.configuration.config import DataConfig, check
from fl_lightning.data.source import Source
from fl_lightning.foundation.metric import NO_TARGET
from fl_lightning.foundation.rng import numpy_rng


@dataclass(frozen=True)
class Tasks:
    """Planted groups: how their labels and images differ, and the group of each client."""

    groups: int
    turned: bool
    """Whether the images of each group are rotated by another angle."""
    tables: ndarray | None
    """The new class of each class in each group, int64 [groups, classes]; None: labels are not
    changed."""
    every: int | None
    """Number of rounds after which every second client of a group moves to the next group; None:
    never."""

    def group(
        self,
        client: int,
        round: int = 1,
    ) -> int:
        """Return the group of a client in a round."""
        moves = 0 if self.every is None else max(round - 1, 0) // self.every
        return (client + moves * (client // self.groups % 2)) % self.groups

    def angle(self, group: int) -> float:
        """Return the degrees by which a group's images are rotated, counter-clockwise: 360 g / G in
        group g of G."""
        return 360 * group / self.groups if self.turned else 0.0

    def relabelled(
        self,
        labels: ndarray,
        from_group: int | None,
        to_group: int,
    ) -> ndarray:
        """Return a client's labels [n] after it has moved from one group (None: the data as read)
        to another.

        Positions without a target (`NO_TARGET`) stay as they are.
        """
        if self.tables is None:
            return labels
        is_target = labels != NO_TARGET
        classes = labels[is_target]
        if from_group is not None:
            classes = np.argsort(self.tables[from_group])[classes]
        moved = labels.copy()
        moved[is_target] = self.tables[to_group][classes]
        return moved

    def drift(
        self,
        everyone: Iterable[tuple[int, ndarray, ndarray, ndarray]],
        train: ndarray,
        test: ndarray,
        from_round: int,
        to_round: int,
    ) -> None:
        """Change all labels, in place, from the tasks of one round to those of another.

        Args:
            everyone: number of each client, and its indices for training and validation (into
                `train`) and for test (into `test`).
            train: labels of the training samples.
            test: labels of the test samples.
            from_round: the round whose labels they are.
            to_round: the round whose labels they become.
        """
        for number, *indices in everyone:
            groups = self.group(number, from_round), self.group(number, to_round)
            for labels, index in zip((train, train, test), indices, strict=True):
                labels[index] = self.relabelled(labels[index], *groups)


def tasks(
    data: DataConfig,
    clients: int,
    classes: int,
    seed: int,
) -> Tasks | None:
    """Build the planted groups that `data.planted` asks for; None if it asks for none.

    Raises:
        BadInput: more groups than clients, or than classes by which labels can be shifted.
    """
    if data.planted == "none":
        return None
    most = clients
    why = "each group needs a client"
    if data.planted == "labels" and classes < clients:
        most = classes
        why = "each group shifts the labels by another number, and there are no more classes"
    check("data.groups", data.groups, data.groups <= most, f"it can be at most {most}: {why}")
    tables = None
    classes_in_order = np.arange(classes)
    if data.planted == "labels":
        tables = (classes_in_order + np.arange(data.groups)[:, None]) % classes
    elif data.planted == "permuted":
        rng = numpy_rng(seed, "data.planted")
        permuted = [rng.permutation(classes) for _ in range(data.groups - 1)]
        tables = np.stack([classes_in_order, *permuted])
    return Tasks(
        data.groups,
        data.planted == "rotation",
        tables,
        data.drift_every,
    )


def true_groups(
    data: DataConfig,
    clients: int,
    planted: Tasks | None,
    source: Source,
    natural: bool,
) -> list[int]:
    """Return the true group of every client: the planted group, mixture or domain; all 0 without
    groups.

    Args:
        data: the configuration.
        clients: number of clients.
        planted: the planted groups, if any.
        source: of the samples.
        natural: whether the clients are the source's natural groups.
    """
    if planted is not None:
        return [planted.group(client) for client in range(clients)]
    if data.partition == "mixture":
        return [client % data.groups for client in range(clients)]
    if natural and source.domains is not None:
        return source.domains[:clients]
    return [0] * clients


def relabelled(
    labels: ndarray,
    shares: Sequence[ndarray],
    groups: Sequence[int],
    planted: Tasks | None,
) -> ndarray:
    """Return a copy of `labels` [n] with each client's labels changed to those of its group.

    Args:
        labels: of all samples.
        shares: each client's indices.
        groups: each client's group.
        planted: the planted groups, if any.
    """
    if planted is None or planted.tables is None:
        return labels
    labels = labels.copy()
    for share, group in zip(shares, groups, strict=True):
        labels[share] = planted.relabelled(labels[share], None, group)
    return labels
