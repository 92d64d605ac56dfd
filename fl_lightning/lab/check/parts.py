"""Parts with which methods are checked: a network with BatchNorm, a client that fails, and clients
with little data."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from fl_lightning.callbacks.base import Transform
from fl_lightning.configuration.config import DataConfig
from fl_lightning.core import Client, Payload

Shares = list[np.ndarray]
FEW = 6
"""Samples of a client with few: fewer than any batch, but enough for a validation part."""


class Normed(nn.Module):
    """A network with one hidden layer and BatchNorm, for samples of any shape."""

    head = "out"

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        width: int = 16,
    ) -> None:
        super().__init__()
        self.body = nn.Linear(math.prod(input_shape), width)
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns class scores."""
        scores: torch.Tensor = self.out(self.norm(self.body(x.flatten(1))).relu())
        return scores


class Failing(Transform):
    """The first `times` uploads of client `client` in round `at` (0: never) fail."""

    def __init__(
        self,
        at: int,
        client: int = 1,
        times: int = 99,
    ) -> None:
        self.at, self.client, self.left = at, client, times

    def on_upload(self, client: Client, payload: Payload) -> None:
        """Raise an error if this upload is to fail."""
        if client.id == self.client and client.round == self.at and self.left:
            self.left -= 1
            raise OSError("made to fail by fl-train check-method")


def one_class(
    train_labels: np.ndarray,
    test_labels: np.ndarray,
    clients: int,
    data: DataConfig,
    rng: np.random.Generator,
) -> tuple[Shares, Shares]:
    """A partition in which every client holds a single class."""
    classes = np.unique(train_labels)
    sharing = -(-clients // len(classes))

    def shares(labels: np.ndarray) -> Shares:
        pools = {c: np.flatnonzero(labels == classes[c % len(classes)]) for c in range(clients)}
        return [pools[c][c // len(classes) :: sharing] for c in range(clients)]

    return shares(train_labels), shares(test_labels)


def few_samples(
    train_labels: np.ndarray,
    test_labels: np.ndarray,
    clients: int,
    data: DataConfig,
    rng: np.random.Generator,
) -> tuple[Shares, Shares]:
    """A partition in which every client but client 0 has `FEW` training and `FEW` test samples.
    Client 0 has the rest, at most 100 * `FEW` of each."""

    def shares(labels: np.ndarray) -> Shares:
        order = rng.permutation(len(labels))
        few = [order[c * FEW : (c + 1) * FEW] for c in range(clients - 1)]
        return [order[(clients - 1) * FEW :][: 100 * FEW], *few]

    return shares(train_labels), shares(test_labels)
