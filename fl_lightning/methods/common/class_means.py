"""Means by class of features (what the classifier sees) and of soft predictions: upload, merging
and use.

Classes are C, the width of a feature is d. A class without samples has a zero row; `known` (C,)
marks the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.core import Client, Module, Payload, RunContext, Server
from fl_lightning.foundation import log
from fl_lightning.methods.common.basics import norms, wide

Tensors = dict[str, Tensor]


def no_means(run: RunContext, names: Sequence[str]) -> Tensors:
    """What the server knows at first: `means.NAME` (C, d or C) for each of `names`, and
    `means.known` (C,)."""
    classes, dtype = run.data.num_classes, torch.promote_types(run.dtype, torch.float32)
    width = {"features": run.feature_width, "predictions": classes}
    tables = {f"means.{name}": torch.zeros(classes, width[name], dtype=dtype) for name in names}
    return tables | {"means.known": torch.zeros(classes, dtype=torch.bool)}


def tell(payload: Payload, tables: Mapping[str, Tensor], present: Tensor) -> None:
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
    run, classes = client.run, client.run.data.num_classes
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


def last_uploads(server: Server) -> Sequence[Mapping[str, Tensor]]:
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


def merged(server: Server, names: Sequence[str], *, uniform: bool, forget: bool) -> Tensors:
    """What the server knows of `names` (`no_means`) after a round, from what clients `told`; a line
    says where no client has uploaded any class.

    Args:
        server: clients told it `classes`, `counts`, and the rows of each of `names`.
        names: of the tables.
        uniform: clients weigh the same; else by their samples of the class.
        forget: a class that no client uploaded is not known any more; else its mean stays.
    """
    updated: Tensors = {}
    memory = server.memory
    if server.run.is_main and not any(
        len(tensors["classes"]) for tensors in server.statistics.values()
    ):
        log.say(f"round {server.round}: no client uploaded the mean of any class")
    for name in names:
        known = memory[f"means.{name}"]
        total, weight = (
            torch.zeros_like(known, dtype=torch.float64),
            torch.zeros(len(known), dtype=torch.float64),
        )
        for tensors in last_uploads(server):
            classes, counts = tensors["classes"].long(), tensors["counts"].double()
            share = torch.ones_like(counts) if uniform else counts
            total.index_add_(0, classes, share[:, None] * tensors[name].double())
            weight.index_add_(0, classes, share)
        now = weight > 0
        mean = (total / weight.clamp_min(1e-30)[:, None]).to(known.dtype)
        updated[f"means.{name}"] = torch.where(now[:, None], mean, known)
        updated["means.known"] = now if forget else now | memory["means.known"]
    return updated


# ---------------------------------------------------------------- terms of the local loss


def distance_to_means(
    features: Tensor,
    labels: Tensor,
    means: Mapping[str, Tensor],
    distance: Literal["means", "norm", "squared"],
) -> Tensor:
    """Distance of a batch of `features` (batch, d) to their class's mean, shape (); an unknown
    class adds 0.

    `norm` and `squared`: the mean over the batch; `means`: the sum over its classes of the norm of
    their mean gap.
    """
    gap = wide(features) - means["features"][labels]
    if distance == "means":
        known, sums = (
            means["known"],
            torch.zeros_like(means["features"], dtype=gap.dtype).index_add(0, labels, gap),
        )
        counts = by_class(labels, len(known)).clamp_min(1)
        return (norms(sums / counts[:, None]) * known).sum()
    each = gap.square().mean(1) if distance == "squared" else norms(gap)
    return (each * means["known"][labels]).mean()


def by_class(labels: Tensor, classes: int) -> Tensor:
    """How many of the labels are of each class, (classes,): `bincount`, which `torch.func` cannot
    stack."""
    return labels.new_zeros(classes).index_add(0, labels, torch.ones_like(labels))


def distance_by_class(
    tensors: Mapping[str, Tensor], module: Module, batch: tuple[Tensor, Tensor]
) -> Tensor:
    """Sum over a batch's classes k of the mean of ||z - m_k||^2 / d over its samples of k, shape ()
    (FedAS).

    Args:
        tensors: `means` m, (C, d).
        module: whose features z (batch, d) are pulled.
        batch: of its inputs and labels.
    """
    (x, labels), means = batch, tensors["means"]
    module.model(x)
    gap = (wide(module.features) - means[labels]).square().mean(1)
    return (gap / by_class(labels, len(means))[labels]).sum()


def classifier_gap(
    module: Module, means: Mapping[str, Tensor], temperature: float, lam: float
) -> Tensor:
    """lam (1/C) sum_j ||softmax(G(H_j)/T) - Q_j|| over known classes, shape () (FedHKD, Eq. 11).

    G is the classifier.
    """
    G, known = module.head, means["known"]
    H = means["features"].to(module.features.dtype)
    # a call of G would count as the batch's features
    scores = torch.nn.functional.linear(H, G.weight, G.bias)
    soft = (wide(scores)[:, : module.num_classes] / temperature).softmax(1)
    gap: Tensor = lam * (norms(soft - means["predictions"]) * known).sum() / module.num_classes
    return gap


# ---------------------------------------------------------------- privacy


def within(features: Tensor, zeta: float, bound: Literal["norm", "coordinate"]) -> Tensor:
    """`features` (batch, d) with the norm, or each coordinate, brought within zeta."""
    if bound == "coordinate":
        return features.clamp(-zeta, zeta)
    norm: Tensor = features.norm(dim=1, keepdim=True)
    return features * (zeta / norm.clamp_min(1e-12)).clamp_max(1.0)


def noisy(
    features: Tensor, counts: Tensor, sigma: float, zeta: float, draws: torch.Generator
) -> Tensor:
    """Mean `features` (C, d) with Gaussian noise of sigma times the class's sensitivity 2 zeta / N
    on each number."""
    scale = 2 * zeta * sigma / counts.clamp_min(1)
    return features + scale[:, None] * torch.randn(
        features.shape, generator=draws, dtype=features.dtype
    )


def noise_multiplier(sigma: float, width: int, bound: Literal["norm", "coordinate"]) -> float:
    """The noise on a class's mean feature over its L2 sensitivity, when one of the class's N
    samples is replaced.

    Noise has the standard deviation sigma 2 zeta / N on each of the `width` coordinates. The mean
    moves by at most 2 zeta / N where norms are bounded by zeta, by 2 zeta sqrt(width) / N where
    coordinates are. A sample is in one class only, so classes do not add up.
    """
    return sigma if bound == "norm" else sigma / math.sqrt(width)


def gaussian_epsilon(sigma: float, rounds: int, delta: float) -> float:
    """Epsilon at `delta` of the Gaussian mechanism with noise multiplier `sigma`, composed `rounds`
    times.

    The composition is the Gaussian mechanism with sigma / sqrt(rounds), whose epsilon is known in
    closed form.
    """
    from dp_accounting import get_epsilon_gaussian

    return float(get_epsilon_gaussian(sigma / math.sqrt(rounds), delta))


def privacy_report(
    run: RunContext, sigma: float, bound: Literal["norm", "coordinate"], delta: float, *, safe: bool
) -> dict[str, Any]:
    """The privacy report, at `privacy_delta`, for one round (`..._round`) and for the run.

    `privacy_epsilon` is that of a class's whole mean feature; with `bound: coordinate`
    `privacy_epsilon_coordinate` is that of one of its coordinates, the others left aside (the
    paper's count). `privacy_covers` says so in words, and what the client uploads beside it without
    protection. Where it is not `safe`, without noise or without a bound, epsilon is infinite;
    nothing is reported where a callback accounts for the whole upload.
    """
    if any(getattr(callback, "accounts", False) for callback in run.callbacks):
        return {}
    width, rounds = run.feature_width, run.rounds
    multiplier = noise_multiplier(sigma, width, bound)
    report: dict[str, Any] = {"privacy_delta": delta}
    for times, name in ((1, "_round"), (rounds, "")):
        report[f"privacy_epsilon{name}"] = (
            gaussian_epsilon(multiplier, times, delta) if safe else math.inf
        )
        if bound == "coordinate":
            report[f"privacy_epsilon_coordinate{name}"] = (
                gaussian_epsilon(sigma, times, delta) if safe else math.inf
            )
    covers = "one sample's part in its class's mean feature"
    if bound == "norm":
        covers = f"{covers}, all {width} coordinates"
    else:
        covers = (
            f"{covers}: privacy_epsilon all {width} coordinates, privacy_epsilon_coordinate a "
            f"single one of them"
        )
    beside = (
        "not the model, the mean predictions and the class counts that the client uploads beside it"
    )
    return report | {
        "privacy_covers": f"{covers}; {beside}" if safe else "nothing: no noise, or no bound"
    }
