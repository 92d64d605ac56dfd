"""Differences between the clients of a federation: in label mix, inputs and sample numbers."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy import ndarray

from fl_lightning.data.federated import FederatedData

MOST_CLIENTS = 200
"""Largest number of clients that are compared, evenly spaced by number: pairs grow with the
square."""
MOST_SAMPLES = 100
"""Training samples of a client that are projected: with so many, means differ by a tenth of a
deviation by chance."""
DIRECTIONS = 16
"""Number of random directions, which are the same in every run."""


@dataclass(frozen=True)
class Heterogeneity:
    """Distances between clients' data."""

    clients: list[int]
    """Numbers of the compared clients, n of them."""
    pairs: dict[str, ndarray]
    """Distances by measure, (n, n) float32: `jensen_shannon` and `hellinger` (0 to 1) of label
    mixes; `feature_shift` and `feature_shift_within` (in standard deviations) of inputs, the latter
    nan for two clients without a common class."""
    gini: float
    """Gini coefficient of the numbers of training samples: 0 if all clients have equally many,
    towards 1 if one has all."""

    def summary(self) -> dict[str, float]:
        """Return the values for `summary.json`: means over pairs of clients, and the Gini
        coefficient."""
        apart = ~np.eye(len(self.clients), dtype=bool)
        summary = {}
        for name, table in self.pairs.items():
            values = table[apart & np.isfinite(table)]
            if len(values):
                summary[f"heterogeneity_{name}"] = float(values.mean(dtype=np.float64))
        return summary | {"heterogeneity_quantity_gini": self.gini}


def measure(data: FederatedData) -> Heterogeneity:
    """Measure the distances between the clients' training samples, as they are in the first round.

    For `feature_shift`, inputs are projected on `DIRECTIONS` fixed random directions, and divided
    in each direction by the standard deviation over all clients. In one direction, two clients are
    sqrt((difference of means)^2 + (difference of deviations)^2) apart, the 2-Wasserstein distance
    of two normal distributions; the shift is the root mean square over the directions. Two clients
    with a hundred samples each of the same normal distribution are about 0.17 apart.

    `feature_shift_within` uses the squared distances between the two clients' means of each class
    that both have, less the value expected if the distributions were equal. It is the root of their
    mean, weighted by the smaller number of samples. It is near 0 if only the label mixes differ,
    and large if a label means something else at each client.
    """
    count = min(data.clients, MOST_CLIENTS)
    places = np.linspace(0, data.clients - 1, count).round()
    clients = places.astype(int).tolist()
    directions = _directions(data)
    projected = [_projected(data, client, directions) for client in clients]
    unit = np.concatenate([z for z, _ in projected]).std(axis=0)
    unit[unit == 0] = 1
    scaled = [(z / unit, y) for z, y in projected]
    pairs = {"feature_shift": _shift([z for z, _ in scaled])}
    if data.task == "classification":
        counts = data.class_counts[clients].astype(np.float64)
        sizes = counts.sum(axis=1, keepdims=True)
        mixes = counts / np.maximum(sizes, 1)
        label_mixes = {
            "jensen_shannon": np.stack([_jensen_shannon(mix, mixes) for mix in mixes]),
            "hellinger": np.stack([_hellinger(mix, mixes) for mix in mixes]),
        }
        pairs = label_mixes | pairs
        if scaled[0][1].ndim == 1:
            pairs["feature_shift_within"] = _shift_within(scaled, data.num_classes)
    tables = {name: table.astype(np.float32) for name, table in pairs.items()}
    return Heterogeneity(clients, tables, gini(np.array(data.train_sizes)))


def gini(sizes: ndarray) -> float:
    """Return the Gini coefficient of numbers that are not negative, (n,)."""
    ordered = np.sort(sizes.astype(np.float64))
    n = len(sizes)
    total = ordered.sum()
    if n == 0 or total == 0:
        return 0.0
    ranks = 2 * np.arange(1, n + 1) - n - 1
    return float(ranks @ ordered / (n * total))


def _jensen_shannon(
    p: ndarray,
    q: ndarray,
) -> ndarray:
    """Return the distances (n,) of a distribution (C,) from n others: the root of the divergence in
    bits.

    Written out, since scipy's takes a second to import and every run measures.
    """
    middle = (p + q) / 2
    divergence = np.zeros(len(q))
    for mix in (p, q):
        with np.errstate(divide="ignore", invalid="ignore"):
            bits = mix * np.log2(mix / middle)
        divergence += np.where(mix > 0, bits, 0).sum(axis=1)
    return np.sqrt(np.maximum(divergence / 2, 0))


def _hellinger(
    p: ndarray,
    q: ndarray,
) -> ndarray:
    """Return Hellinger's distances (n,) of a distribution (C,) from n others."""
    differences = np.sqrt(p) - np.sqrt(q)
    squares = np.square(differences).sum(axis=1)
    return np.sqrt(squares / 2)


def _directions(data: FederatedData) -> torch.Tensor:
    """Draw the fixed directions: float64 (numbers of an input, DIRECTIONS); for texts float32, a
    row for each token."""
    generator = torch.Generator().manual_seed(0)
    if data.vocabulary:
        return torch.randn(data.vocabulary, DIRECTIONS, generator=generator)
    return torch.randn(
        math.prod(data.input_shape), DIRECTIONS, generator=generator, dtype=torch.float64
    )


def _projected(
    data: FederatedData,
    client: int,
    directions: torch.Tensor,
) -> tuple[ndarray, ndarray]:
    """Project a client's first samples on the directions; return float64 (m, DIRECTIONS), and their
    labels."""
    x, y = data.first_samples(client, MOST_SAMPLES)
    if data.vocabulary:  # a text is the mean of its tokens
        return directions[x].mean(dim=1).double().numpy(), y.numpy()
    return (x.flatten(1).double() @ directions).numpy(), y.numpy()


def _shift(projected: list[ndarray]) -> ndarray:
    """Return `feature_shift` (n, n): distances between the clients' means and deviations."""
    means = [z.mean(axis=0) for z in projected]
    deviations = [z.std(axis=0) for z in projected]
    moments = np.concatenate([means, deviations], axis=1)
    squares = [np.square(row - moments).sum(axis=1) for row in moments]
    return np.sqrt(np.stack(squares) / DIRECTIONS)


def _shift_within(
    projected: list[tuple[ndarray, ndarray]],
    classes: int,
) -> ndarray:
    """Return `feature_shift_within` (n, n): distances between the means of the classes that two
    clients share; nan if they share none."""
    n = len(projected)
    counts = np.zeros((n, classes))
    means = np.zeros((n, classes, DIRECTIONS))
    scatter = 0.0
    for client, (z, y) in enumerate(projected):
        np.add.at(counts[client], y, 1)
        np.add.at(means[client], y, z)
        means[client] /= np.maximum(counts[client], 1)[:, None]
        scatter += np.square(z - means[client][y]).sum()
    freedom = max(counts.sum() - (counts > 0).sum(), 1)  # of the variance within a client's class
    variance = scatter / (freedom * DIRECTIONS)
    chance = variance / np.maximum(counts, 1)
    squared = np.zeros((n, n))
    for client in range(n):
        weight = np.minimum(counts[client], counts)
        distances = np.square(means[client] - means).mean(axis=2)
        beyond_chance = distances - chance[client] - chance
        with np.errstate(invalid="ignore"):
            total = (weight * beyond_chance).sum(axis=1)
            squared[client] = total / weight.sum(axis=1)
    np.fill_diagonal(squared, 0)
    return np.sqrt(np.maximum(squared, 0))
