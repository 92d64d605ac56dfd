"""Global prototypes of classes that the server learns from clients' class means (FedTGP: Zhang et
al., AAAI 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, one_hot

from fl_lightning.core import Server
from fl_lightning.foundation.rng import generator

LEARNED = ("embedding", "inner", "inner_bias", "outer", "outer_bias")
"""What the server learns: an embedding of each class (C, d), and two linear layers with a ReLU
between them."""


def prototypes(theta: Mapping[str, Tensor]) -> Tensor:
    """The global prototypes (C, d) that `theta` (tensors by `LEARNED`) gives."""
    hidden = linear(theta["embedding"], theta["inner"], theta["inner_bias"]).relu()
    return linear(hidden, theta["outer"], theta["outer_bias"])


def adaptive_margin(uploaded: Tensor, classes: Tensor, most: float) -> float:
    """Greatest distance of a class's mean upload to its nearest other; `most` at most, and where
    there is one class.

    `uploaded` (n, d) are class means of clients, of `classes` (n,).
    """
    centres = torch.stack([uploaded[classes == c].mean(0) for c in classes.unique()])
    gaps = torch.cdist(centres, centres).fill_diagonal_(torch.inf).min(1).values
    return min(float(gaps.max()), most)


def margin_loss(known: Tensor, uploaded: Tensor, classes: Tensor, margin: float) -> Tensor:
    """Cross entropy of minus the distances of `uploaded` (n, d), of `classes` (n,), to the
    prototypes `known` (C, d), of which the own class's counts as longer by `margin`, shape ()."""
    distance = torch.cdist(uploaded, known, compute_mode="donot_use_mm_for_euclid_dist")
    return cross_entropy(-(distance + margin * one_hot(classes, len(known))), classes)


def untrained(means: Tensor, draws: torch.Generator) -> dict[str, Tensor]:
    """What the server begins with, as torch does: a normal embedding, and layers uniform within 1 /
    sqrt(d).

    `means` (C, d): of the type and width that it is to have.
    """
    d = means.shape[1]
    theta = [torch.randn(means.shape, generator=draws)]
    theta += [
        (2 * torch.rand(shape, generator=draws) - 1) / d**0.5
        for shape in ((d, d), (d,), (d, d), (d,))
    ]
    return {f"prototypes.{name}": t.to(means) for name, t in zip(LEARNED, theta, strict=True)}


def learn(
    server: Server,
    uploads: Sequence[Mapping[str, Tensor]],
    most: float,
    epochs: int,
    lr: float | None,
) -> None:
    """Train the prototypes by SGD on clients' class means, and make them `means.features`; without
    any they stay.

    Args:
        server: in aggregation.
        uploads: `classes` and `features` of each client; batches are as large as the clients'.
        most: the greatest margin.
        epochs: passes over the uploads.
        lr: None: the clients'.
    """
    memory, config = server.memory, server.run.config
    if not any(len(one["classes"]) for one in uploads):
        return
    classes = torch.cat([one["classes"].long() for one in uploads])
    means = torch.cat([one["features"] for one in uploads]).to(memory["means.features"])
    margin = adaptive_margin(means, classes, most)
    theta = {name: memory[f"prototypes.{name}"].clone().requires_grad_() for name in LEARNED}
    optimizer = torch.optim.SGD(theta.values(), lr or config.optimizer.lr)
    draws = generator(config.seed, "prototypes", server.round)
    for _ in range(epochs):
        for batch in torch.randperm(len(classes), generator=draws).split(
            config.federation.batch_size
        ):
            optimizer.zero_grad()
            margin_loss(prototypes(theta), means[batch], classes[batch], margin).backward()
            optimizer.step()
            server.flops += 3 * theta["embedding"].numel() * (4 * means.shape[1] + 3 * len(batch))
    memory |= {f"prototypes.{name}": t.detach() for name, t in theta.items()}
    memory["means.features"] = prototypes(theta).detach()
