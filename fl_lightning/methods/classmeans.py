"""Class means: shared code of FedProto, FedTGP, FedHKD, FedPAC and FPL, and in part of FedAS.

Clients exchange the mean, for each class, of their features (the classifier's inputs) and of their
soft predictions. There are C classes and d features. A class without samples has a row of zeros;
`known` (C,) marks the classes that have a mean.
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
    """Base: after local training clients upload the mean features of their classes; the server
    averages these and sends the averages to all."""

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
    """The means that are exchanged of each class: of its features, and also of its soft
    `predictions`."""
    forget = False
    """Whether the server drops a class for which no mean arrived in a round; otherwise the class
    keeps its last mean."""

    @property
    def uniform(self) -> bool:
        """Whether the server's mean of a class gives clients equal weights; otherwise by their
        samples of the class."""
        return False

    @property
    def uses_means(self) -> bool:
        """Whether the local loss has a term with the received means."""
        return True

    @abstractmethod
    def loss(
        self,
        means: Tensors,
        module: Module,
        batch: Batch,
    ) -> Tensor:
        """Return the task loss plus the method's terms with the received means, shape ().

        Args:
            means: tables by name, (C, ...) each: `features` (and `predictions`), and `known` (C,).
            module: holds the client's model.
            batch: inputs and labels.
        """

    def means(self, client: Client) -> Tensors:
        """Return the class means to upload, as `class_means` does. Classes with `counts` 0 are not
        uploaded."""
        return class_means(client)

    def init_server(self, run: RunContext) -> Tensors:
        """Return zeros for the class means, with no class known yet."""
        return zero_means(run, self.names)

    def broadcast(self, server: Server) -> Payloads:
        """Also send the known class means."""
        payloads = super().broadcast(server)
        has_mean = server.memory["means.known"]
        tables = {name: server.memory[f"means.{name}"] for name in self.names}
        if has_mean.any():
            for payload in payloads.values():
                add_rows(payload, tables, has_mean)
        return payloads

    def objective(self, client: Client, payload: Payload) -> Objective:
        """Return the objective of local training: `loss` with the received means, or the task loss
        alone if there are none or the method does not use them."""
        means = received_means(payload, client.run)
        return (
            Objective(loss=PureLoss(self.loss, means)) if means and self.uses_means else Objective()
        )

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return one phase that minimises `objective`."""
        return [Phase(objective=self.objective(client, payload))]

    def beside(self) -> dict[str, Beside]:
        entries = {
            "classes": Beside("counts", "which classes the client has", "classes"),
            "counts": Beside("counts", "samples of each class", "class_counts"),
        }
        for name in self.names:
            entries[name] = Beside("class_means", f"mean {name} of each class", "rows")
        return entries

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Also upload the means of the client's classes and the numbers of their samples."""
        upload = super().upload(client, payload)
        means = self.means(client)
        counts = means["counts"]
        add_rows(upload, {name: means[name] for name in self.names}, counts > 0)
        upload.statistics["counts"] = counts[counts > 0].int()
        return upload

    def aggregate(self, server: Server) -> None:
        """Also average the uploaded means of each class; if no client has uploaded any, print a
        line to the log."""
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
    transform: Callable[[Tensor], Tensor] = lambda features: features,
) -> Tensors:
    """Compute class means of features and soft predictions over a client's training data, in
    evaluation mode.

    Args:
        client: whose model and data are used.
        temperature: T of the predictions softmax(z / T).
        transform: maps the features (batch, d) of single samples before they are averaged, such as
            a clip.

    Returns:
        `features` (C, d) and `predictions` (C, C), in float32 or wider; `counts` of samples (C,),
        int64; all on the CPU.
    """
    run = client.run
    classes = run.data.num_classes
    width = client.group.feature_width
    sums = torch.zeros(classes, width + classes + 1, device=run.device, dtype=wide_type(run.dtype))
    for features, scores, y in client.passes(client.data.train):
        predictions = (wide(scores)[:, :classes] / temperature).softmax(1)
        ones = predictions.new_ones(len(y), 1)
        sums.index_add_(0, y, torch.cat([transform(wide(features)), predictions, ones], 1))
    counts = sums[:, -1:]
    means = (sums / counts.clamp_min(1)).cpu()
    features, predictions, _ = means.split([width, classes, 1], 1)
    return {"features": features, "predictions": predictions, "counts": counts[:, 0].long().cpu()}


def add_rows(payload: Payload, tables: Tensors, present: Tensor) -> None:
    """Add the rows of the classes that are `present` (bool (C,)) to `payload`, from each of the
    `tables` (C, ...)."""
    payload.statistics["classes"] = present.nonzero()[:, 0].int()
    payload.extra |= {name: table[present] for name, table in tables.items()}


def received_means(payload: Payload, run: RunContext) -> Tensors:
    """Return the payload's rows as tables (C, ...) again, with the mask `known` (C,), on the
    client's device; empty if the payload has no class means."""
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
    """Return the distance between a batch's features and their classes' means, shape (). Samples of
    a class without a mean add 0.

    Args:
        features: (batch, d).
        labels: (batch,).
        means: tables `features` (C, d) and `known` (C,).
        distance: `norm`: mean over samples of ||z - mean||; `squared`: mean over samples and
            coordinates of (z - mean)^2; `means`: sum over the batch's classes of ||mean z of the
            class - mean||.
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
    """Return the number of labels of each class, (classes,). Unlike `bincount`, this works under
    `torch.func.vmap`.

    Args:
        labels: class indices, (n,).
        classes: number of classes.
    """
    return labels.new_zeros(classes).index_add(0, labels, torch.ones_like(labels))


# ---------------------------------------------------------------- at the server


def zero_means(run: RunContext, names: Sequence[str]) -> Tensors:
    """Return the server's initial tensors: zeros `means.NAME` (C, width) for each of `names`, and
    `means.known` (C,), all False."""
    classes = run.data.num_classes
    width = {"features": run.feature_width, "predictions": classes}
    tables = {"means.known": torch.zeros(classes, dtype=torch.bool)}
    for name in names:
        tables[f"means.{name}"] = torch.zeros(classes, width[name], dtype=wide_type(run.dtype))
    return tables


def empty_upload_tables(run: RunContext) -> Tensors:
    """Return zeros for the tables in which the server stores each client's last upload:
    `last.features` (N, C, d) and `last.counts` (N, C)."""
    of_class = zero_means(run, ["features"])["means.features"]
    counts = torch.zeros(run.clients, len(of_class), dtype=torch.int32)
    return {"last.features": of_class.repeat(run.clients, 1, 1), "last.counts": counts}


def last_uploads(server: Server) -> Sequence[Tensors]:
    """Return the clients' class means that the server aggregates: this round's uploads or, if the
    server's memory has the tables of `empty_upload_tables`, each client's latest upload of any
    round."""
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
