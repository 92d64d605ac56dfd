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
    known = torch.zeros(run.data.num_classes, dtype=torch.bool)
    known[classes] = True
    tables = {"known": known}
    for name, rows in payload.extra.items():
        empty = rows.new_zeros(len(known), rows.shape[1])
        tables[name] = empty.index_copy(0, classes, rows)
    return {name: table.to(run.device) for name, table in tables.items()}


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
    classes = run.data.num_classes
    dtype = torch.promote_types(run.dtype, torch.float32)
    width = client.group.feature_width + classes + 1
    sums = torch.zeros(classes, width, device=run.device, dtype=dtype)
    for features, scores, y in client.passes(client.data.train):
        predictions = (wide(scores)[:, :classes] / temperature).softmax(1)
        one = torch.ones(len(y), 1, device=y.device, dtype=dtype)
        sums.index_add_(0, y, torch.cat([bounded(wide(features)), predictions, one], 1))
    counts = sums[:, -1]
    means = (sums[:, :-1] / counts.clamp_min(1)[:, None]).cpu()
    return means[:, :-classes], means[:, -classes:], counts.long().cpu()


def no_uploads(run: RunContext) -> Tensors:
    """What no client has told yet, for `last_uploads`: `last.features` (N, C, d) and `last.counts`
    (N, C)."""
    of_class = no_means(run, ["features"])["means.features"]
    features = torch.zeros(run.clients, *of_class.shape, dtype=of_class.dtype)
    counts = torch.zeros(features.shape[:2], dtype=torch.int32)
    return {"last.features": features, "last.counts": counts}


def last_uploads(server: Server) -> Sequence[Tensors]:
    """The class means that the server works with, of each client: this round's uploads or, where it
    has `no_uploads`, what every client told last, in this round or an earlier one."""
    memory = server.memory
    if "last.counts" not in memory:
        return list(server.statistics.values())
    features = memory["last.features"]
    counts = memory["last.counts"]
    for client, upload in server.statistics.items():
        classes = upload["classes"].long()
        counts[client] = 0
        counts[client, classes] = upload["counts"].to(counts)
        features[client, classes] = upload["features"].to(features)
    uploads = []
    for client in counts.any(1).nonzero()[:, 0].tolist():
        classes = counts[client].nonzero()[:, 0]
        uploads.append(
            {
                "classes": classes,
                "counts": counts[client, classes],
                "features": features[client, classes],
            }
        )
    return uploads


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
    gaps = wide(features) - means["features"][labels]
    known = means["known"]
    if distance == "means":
        sums = torch.zeros_like(means["features"], dtype=gaps.dtype).index_add(0, labels, gaps)
        counts = by_class(labels, len(known)).clamp_min(1)
        return (norms(sums / counts[:, None]) * known).sum()
    distances = gaps.square().mean(1) if distance == "squared" else norms(gaps)
    return (distances * known[labels]).mean()


def by_class(labels: Tensor, classes: int) -> Tensor:
    """How many of the labels are of each class, (classes,): `bincount`, which `torch.func` cannot
    stack."""
    return labels.new_zeros(classes).index_add(0, labels, torch.ones_like(labels))
