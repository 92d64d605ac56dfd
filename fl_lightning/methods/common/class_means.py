"""Means by class of features (what the classifier sees) and of soft predictions: upload, merging
and use.

Classes are C, the width of a feature is d. A class without samples has a zero row; `known` (C,)
marks the others.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.core import Client, Payload, RunContext, Server, Tensors
from fl_lightning.methods.common.basics import norms, wide


def no_means(run: RunContext, names: Sequence[str]) -> Tensors:
    """What the server knows at first: `means.NAME` (C, d or C) for each of `names`, and
    `means.known` (C,)."""
    classes = run.data.num_classes
    dtype = torch.promote_types(run.dtype, torch.float32)
    width = {"features": run.feature_width, "predictions": classes}
    tables = {f"means.{name}": torch.zeros(classes, width[name], dtype=dtype) for name in names}
    return tables | {"means.known": torch.zeros(classes, dtype=torch.bool)}


def tell(payload: Payload, tables: Tensors, present: Tensor) -> None:
    """Put the rows of `tables` (C, ...) whose class is `present` (bool (C,)) into `payload`."""
    payload.statistics["classes"] = present.nonzero()[:, 0].int()
    payload.extra |= {name: table[present] for name, table in tables.items()}


def laid_out(payload: Payload, run: RunContext) -> Tensors:
    """The means that `payload` brought, by class again (C, ...), and `known`, on the device; empty
    if it has none."""
    if "features" not in payload.extra:
        return {}
    classes = payload.statistics["classes"].long()
    tables = {}
    for name in [name for name in ("features", "predictions") if name in payload.extra]:
        rows = payload.extra[name]
        table = torch.zeros(run.data.num_classes, rows.shape[1], dtype=rows.dtype)
        table[classes] = rows
        tables[name] = table.to(run.device)
    known = torch.zeros(run.data.num_classes, dtype=torch.bool)
    known[classes] = True
    return tables | {"known": known.to(run.device)}


@torch.no_grad()
def class_means(
    client: Client,
    temperature: float = 1.0,
    bounded: Callable[[Tensor], Tensor] = lambda features: features,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the client's model, over its training data: mean features (C, d) and predictions (C, C),
    and samples (C,).

    Args:
        client: at its visit; the passes are in evaluation mode.
        temperature: T of the predictions softmax(z / T).
        bounded: features of single samples (batch, d) as they enter the mean.

    Returns:
        On the CPU; features and predictions in 32 bits at least, counts int64.
    """
    run = client.run
    classes = client.run.data.num_classes
    dtype = torch.promote_types(run.dtype, torch.float32)
    sums = torch.zeros(
        classes, client.group.feature_width + classes + 1, device=run.device, dtype=dtype
    )
    for features, scores, y in client.passes(client.data.train):
        soft = (wide(scores)[:, :classes] / temperature).softmax(1)
        one = torch.ones(len(y), 1, device=y.device, dtype=dtype)
        sums.index_add_(0, y, torch.cat([bounded(wide(features)), soft, one], 1))
    counts = sums[:, -1]
    mean = (sums[:, :-1] / counts.clamp_min(1)[:, None]).cpu()
    return mean[:, :-classes], mean[:, -classes:], counts.long().cpu()


def no_uploads(run: RunContext) -> Tensors:
    """What no client has told yet, for `last_uploads`: `last.features` (N, C, d) and `last.counts`
    (N, C)."""
    of_class = no_means(run, ["features"])["means.features"]
    features = torch.zeros(run.clients, *of_class.shape, dtype=of_class.dtype)
    return {
        "last.features": features,
        "last.counts": torch.zeros(features.shape[:2], dtype=torch.int32),
    }


def last_uploads(server: Server) -> Sequence[Tensors]:
    """The class means that the server works with, of each client: this round's uploads or, where it
    has `no_uploads`, what every client told last, in this round or an earlier one."""
    if "last.counts" not in server.memory:
        return [*server.statistics.values()]
    features, counts = (server.memory[f"last.{name}"] for name in ("features", "counts"))
    for client, tensors in server.statistics.items():
        classes = tensors["classes"].long()
        counts[client] = 0
        counts[client, classes] = tensors["counts"].to(counts)
        features[client, classes] = tensors["features"].to(features)
    return [
        {"classes": (own > 0).nonzero()[:, 0], "counts": own[own > 0], "features": means[own > 0]}
        for own, means in zip(counts, features, strict=True)
        if own.any()
    ]


def distance_to_means(
    features: Tensor,
    labels: Tensor,
    means: Tensors,
    distance: Literal["means", "norm", "squared"],
) -> Tensor:
    """Distance of a batch of `features` (batch, d) to their class's mean, shape (); an unknown
    class adds 0.

    `norm` and `squared`: the mean over the batch; `means`: the sum over its classes of the norm of
    their mean gap.
    """
    gap = wide(features) - means["features"][labels]
    if distance == "means":
        known = means["known"]
        sums = torch.zeros_like(means["features"], dtype=gap.dtype).index_add(0, labels, gap)
        counts = by_class(labels, len(known)).clamp_min(1)
        return (norms(sums / counts[:, None]) * known).sum()
    each = gap.square().mean(1) if distance == "squared" else norms(gap)
    return (each * means["known"][labels]).mean()


def by_class(labels: Tensor, classes: int) -> Tensor:
    """How many of the labels are of each class, (classes,): `bincount`, which `torch.func` cannot
    stack."""
    return labels.new_zeros(classes).index_add(0, labels, torch.ones_like(labels))
