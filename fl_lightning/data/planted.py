"""Groups of clients planted in the data, whose tasks differ: it is known whose models should be mixed.

Client i is in group i modulo `data.groups`, whatever the seed. Clustered federated learning is tried on such data:
rotations in IFCA (Ghosh et al., NeurIPS 2020), permuted labels in CFL (Sattler et al., TNNLS 2020; there at random:
moved on by g, any two groups disagree about every class).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fl_lightning.config import DataConfig, check


def groups(data: DataConfig, clients: int, classes: int) -> list[int]:
    """The group of every client; all 0 where none are planted.

    Raises:
        BadInput: more groups than clients, or than labels can be moved on by.
    """
    if data.planted == "none":
        return [0] * clients
    most, why = clients, "a group has a client at least"
    if data.planted == "labels" and classes < clients:
        most, why = classes, "labels are moved on by another number in each group, and there are no more classes"
    check("data.groups", data.groups, data.groups <= most, f"it can be at most {most}: {why}")
    return [client % data.groups for client in range(clients)]


def angles(data: DataConfig, groups: Sequence[int]) -> list[float]:
    """Degrees by which each client's images are turned, counter-clockwise: 360 g / G in group g of G."""
    return [360 * group / data.groups if data.planted == "rotation" else 0.0 for group in groups]


def relabelled(labels: np.ndarray, shares: Sequence[np.ndarray], groups: Sequence[int], classes: int) -> np.ndarray:
    """A copy of `labels` [n] in which those of a client in group g, at its indices in `shares`, are moved on by g."""
    labels = labels.copy()
    for share, group in zip(shares, groups, strict=True):
        labels[share] = (labels[share] + group) % classes
    return labels
