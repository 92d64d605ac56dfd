"""Class means: what FedProto, FedTGP, FedHKD, FedPAC and FPL have in common, and FedAS in part.

Clients exchange means by class of features (what the classifier sees) and of soft predictions.
Classes are C, the width of a feature is d. A class without samples has a zero row; `known` (C,)
marks the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fl_lightning.foundation import log
from fl_lightning.methods import (
    Batch,
    Beside,
    Client,
    Method,
    Module,
    Objective,
    Payload,
    Payloads,
    Phase,
    Phases,
    PureLoss,
    RunContext,
    Server,
    Tensors,
    Traits,
)
from fl_lightning.methods.common.basics import norms, wide, wide_type


@dataclass(frozen=True)
class ClassMeans(Method, ABC):
    """Base: after local training clients upload mean features by class; the server sends the means
    of these to all."""

    traits = Traits(
        family="prototypes and distillation",
        judge="after",
        features=True,
        classes=True,
        statistics=True,
        receives_beside="class means of all",
        sample_use="uploads class means of samples",
    )
    names: ClassVar[tuple[str, ...]] = ("features",)
    """What is exchanged of every class: its mean feature, and its mean soft prediction."""
    forget = False
    """Whether the server forgets a class of which no mean arrived in a round; else its last mean
    stays."""

    @property
    def uniform(self) -> bool:
        """Whether the server's mean weighs clients the same, and not by their samples of the
        class."""
        return False

    @property
    def adds(self) -> bool:
        """Whether received means add anything to the local loss."""
        return True

    @abstractmethod
    def loss(
        self,
        means: Tensors,
        module: Module,
        batch: Batch,
    ) -> Tensor:
        """The task loss and what the received `means` (`features`, ... (C, ...), `known` (C,)) add
        to it, shape ()."""

    def means(self, client: Client) -> Tensors:
        """The `class_means` that the client uploads; `counts` are 0 where it uploads none."""
        return class_means(client)

    def init_server(self, run: RunContext) -> Tensors:
        """The means of `names`, and `means.known`."""
        return no_means(run, self.names)

    def broadcast(self, server: Server) -> Payloads:
        """Also send the class means that are known."""
        payloads = super().broadcast(server)
        has_mean = server.memory["means.known"]
        tables = {name: server.memory[f"means.{name}"] for name in self.names}
        if has_mean.any():
            for payload in payloads.values():
                add_rows(payload, tables, has_mean)
        return payloads

    def objective(self, client: Client, payload: Payload) -> Objective:
        """`loss` with the received means, if there are any; else the task loss."""
        means = received_means(payload, client.run)
        return Objective(loss=PureLoss(self.loss, means)) if means and self.adds else Objective()

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Local training down `objective`."""
        return [Phase(objective=self.objective(client, payload))]

    def beside(self) -> dict[str, Beside]:
        """Declares what `upload` adds to the model."""
        entries = {
            "classes": Beside("counts", "which classes the client has", "classes"),
            "counts": Beside("counts", "samples of each class", "class_counts"),
        }
        for name in self.names:
            entries[name] = Beside("class_means", f"mean {name} of each class", "rows")
        return entries

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Also upload the means of the client's classes, and how many samples they come from."""
        upload = super().upload(client, payload)
        means = self.means(client)
        counts = means["counts"]
        add_rows(upload, {name: means[name] for name in self.names}, counts > 0)
        upload.statistics["counts"] = counts[counts > 0].int()
        return upload

    def aggregate(self, server: Server) -> None:
        """Weighted means over the clients that uploaded a class; a line says where none did."""
        super().aggregate(server)
        memory = server.memory
        nobody = not any(len(upload["classes"]) for upload in server.statistics.values())
        if server.run.is_main and nobody:
            log.say(f"round {server.round}: no client uploaded the mean of any class")
        uploads = last_uploads(server)
        for name in self.names:
            means = memory[f"means.{name}"]
            total = torch.zeros_like(means, dtype=torch.float64)
            weight = torch.zeros(len(means), 1, dtype=torch.float64)
            for upload in uploads:
                classes = upload["classes"].long()
                counts = upload["counts"].double()[:, None]
                share = torch.ones_like(counts) if self.uniform else counts
                total.index_add_(0, classes, share * upload[name].double())
                weight.index_add_(0, classes, share)
            new = (total / weight.clamp_min(1e-30)).to(means.dtype)
            memory[f"means.{name}"] = torch.where(weight > 0, new, means)
        uploaded = weight[:, 0] > 0
        memory["means.known"] = uploaded if self.forget else uploaded | memory["means.known"]


# ---------------------------------------------------------------- at a client


@torch.no_grad()
def class_means(
    client: Client,
    temperature: float = 1.0,
    bounded: Callable[[Tensor], Tensor] = lambda features: features,
) -> Tensors:
    """Class means of the client's model over its training data, in evaluation mode.

    Args:
        client: at its visit.
        temperature: T of the predictions softmax(z / T).
        bounded: features of single samples (batch, d) as they enter the mean.

    Returns:
        `features` (C, d) and `predictions` (C, C), in 32 bits at least; `counts` of samples (C,),
        int64; all on the CPU.
    """
    run = client.run
    classes = run.data.num_classes
    width = client.group.feature_width
    sums = torch.zeros(classes, width + classes + 1, device=run.device, dtype=wide_type(run.dtype))
    for features, scores, y in client.passes(client.data.train):
        predictions = (wide(scores)[:, :classes] / temperature).softmax(1)
        ones = predictions.new_ones(len(y), 1)
        sums.index_add_(0, y, torch.cat([bounded(wide(features)), predictions, ones], 1))
    counts = sums[:, -1:]
    means = (sums / counts.clamp_min(1)).cpu()
    features, predictions, _ = means.split([width, classes, 1], 1)
    return {"features": features, "predictions": predictions, "counts": counts[:, 0].long().cpu()}


def add_rows(payload: Payload, tables: Tensors, present: Tensor) -> None:
    """Put the rows of `tables` (C, ...) whose class is `present` (bool (C,)) into `payload`."""
    payload.statistics["classes"] = present.nonzero()[:, 0].int()
    payload.extra |= {name: table[present] for name, table in tables.items()}


def received_means(payload: Payload, run: RunContext) -> Tensors:
    """The means in `payload`, by class again (C, ...), and `known`, on the device; empty if it has
    none."""
    if "features" not in payload.extra:
        return {}
    classes = payload.statistics["classes"].long()
    has_mean = torch.zeros(run.data.num_classes, dtype=torch.bool)
    has_mean[classes] = True
    tables = {"known": has_mean}
    for name, rows in payload.extra.items():
        empty = rows.new_zeros(len(has_mean), rows.shape[1])
        tables[name] = empty.index_copy(0, classes, rows)
    return {name: table.to(run.device) for name, table in tables.items()}


def distance_to_means(
    features: Tensor,
    labels: Tensor,
    means: Tensors,
    distance: Literal["means", "norm", "squared"],
) -> Tensor:
    """Distance of a batch of `features` (batch, d) to their class's mean, shape (); a class without
    a mean adds 0.

    `norm` and `squared`: the mean over the batch; `means`: the sum over its classes of the norm of
    their mean gap.
    """
    gaps = wide(features) - means["features"][labels]
    has_mean = means["known"]
    if distance == "means":
        sums = torch.zeros_like(means["features"], dtype=gaps.dtype).index_add(0, labels, gaps)
        counts = by_class(labels, len(has_mean)).clamp_min(1)
        return (norms(sums / counts[:, None]) * has_mean).sum()
    distances = gaps.square().mean(1) if distance == "squared" else norms(gaps)
    return (distances * has_mean[labels]).mean()


def by_class(labels: Tensor, classes: int) -> Tensor:
    """How many of the labels are of each class, (classes,): `bincount`, which `torch.func` cannot
    stack."""
    return labels.new_zeros(classes).index_add(0, labels, torch.ones_like(labels))


# ---------------------------------------------------------------- at the server


def no_means(run: RunContext, names: Sequence[str]) -> Tensors:
    """The server's tensors at first: `means.NAME` (C, d or C) for each of `names`, and
    `means.known` (C,)."""
    classes = run.data.num_classes
    width = {"features": run.feature_width, "predictions": classes}
    tables = {"means.known": torch.zeros(classes, dtype=torch.bool)}
    for name in names:
        tables[f"means.{name}"] = torch.zeros(classes, width[name], dtype=wide_type(run.dtype))
    return tables


def no_uploads(run: RunContext) -> Tensors:
    """The tensors of `last_uploads` before any upload: `last.features` (N, C, d) and `last.counts`
    (N, C)."""
    of_class = no_means(run, ["features"])["means.features"]
    counts = torch.zeros(run.clients, len(of_class), dtype=torch.int32)
    return {"last.features": of_class.repeat(run.clients, 1, 1), "last.counts": counts}


def last_uploads(server: Server) -> Sequence[Tensors]:
    """The class means that the server works with, of each client: this round's uploads or, where it
    has `no_uploads`, each client's last upload, of this round or an earlier one."""
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
    for client_counts, client_features in zip(counts, features, strict=True):
        classes = client_counts.nonzero()[:, 0]
        of_client = {"classes": classes, "counts": client_counts[classes]}
        uploads.append(of_client | {"features": client_features[classes]})
    return uploads
