"""Groups of clients planted in the data, whose tasks differ: it is known whose models should be
mixed.

Client i is in group i modulo `data.groups`, whatever the seed. Clustered federated learning is
tried on such data: rotations in IFCA (Ghosh et al., NeurIPS 2020), permuted labels in CFL (Sattler
et al., TNNLS 2020). Moved on by g they are ours: any two groups disagree about every class. With
`data.drift_every` clients change groups as rounds go by, as in FedDrift (Jothimurugesan et al.,
AISTATS 2023), there at times of each one's own.
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
    """Groups of clients planted in the data: how their labels and images differ, and which group a
    client is in."""

    groups: int
    turned: bool
    """Whether groups differ in how their images are turned."""
    tables: ndarray | None
    """The class that each becomes in a group, int64 [groups, classes]; None: labels are as they
    were."""
    every: int | None
    """Rounds after which each second client of a group goes over to the next; None: nobody does."""

    def group(
        self,
        client: int,
        round: int = 1,
    ) -> int:
        """The group that a client is in, in a round."""
        moves = 0 if self.every is None else max(round - 1, 0) // self.every
        return (client + moves * (client // self.groups % 2)) % self.groups

    def angle(self, group: int) -> float:
        """Degrees by which a group's images are turned, counter-clockwise: 360 g / G in group g of
        G."""
        return 360 * group / self.groups if self.turned else 0.0

    def relabelled(
        self,
        labels: ndarray,
        before: int | None,
        after: int,
    ) -> ndarray:
        """The labels [n] of a client that goes over from one group (None: the data as they are
        read) to another.

        What is no target stays so.
        """
        if self.tables is None:
            return labels
        is_target = labels != NO_TARGET
        classes = labels[is_target]
        if before is not None:
            classes = np.argsort(self.tables[before])[classes]
        moved = labels.copy()
        moved[is_target] = self.tables[after][classes]
        return moved

    def drift(
        self,
        everyone: Iterable[tuple[int, ndarray, ndarray, ndarray]],
        train: ndarray,
        test: ndarray,
        before: int,
        round: int,
    ) -> None:
        """Give all labels, in place, the meaning that they have in `round`; they have that of the
        round `before`.

        Args:
            everyone: number of each client, and its indices for training and validation (into
                `train`) and for `test`.
        """
        for number, *indices in everyone:
            groups = self.group(number, before), self.group(number, round)
            for labels, index in zip((train, train, test), indices, strict=True):
                labels[index] = self.relabelled(labels[index], *groups)


def tasks(
    data: DataConfig,
    clients: int,
    classes: int,
    seed: int,
) -> Tasks | None:
    """The planted groups that `data.planted` asks for; None: it asks for none.

    Raises:
        BadInput: more groups than clients, or than labels can be moved on by.
    """
    if data.planted == "none":
        return None
    most = clients
    why = "a group has a client at least"
    if data.planted == "labels" and classes < clients:
        most = classes
        why = "labels are moved on by another number in each group, and there are no more classes"
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


def truth(
    data: DataConfig,
    clients: int,
    planted: Tasks | None,
    source: Source,
    natural: bool,
) -> list[int]:
    """The true group of every client: planted, of its mixture, or of its domain; all 0 where there
    are none."""
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
    """A copy of `labels` [n] in which a client's, at its indices in `shares`, are those of its
    group."""
    if planted is None or planted.tables is None:
        return labels
    labels = labels.copy()
    for share, group in zip(shares, groups, strict=True):
        labels[share] = planted.relabelled(labels[share], None, group)
    return labels
