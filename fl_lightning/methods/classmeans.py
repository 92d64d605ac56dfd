"""What FedProto, FedTGP and FedHKD have in common: clients exchange means by class."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

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
from fl_lightning.methods.common.class_means import (
    class_means,
    laid_out,
    last_uploads,
    no_means,
    tell,
)


@dataclass(frozen=True)
class ClassMeans(Method, ABC):
    """Base: after local training clients tell mean features by class; the server sends the means of
    these to all."""

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
    forget: ClassVar[bool] = False
    """Whether the server forgets a class that nobody told in a round; else it keeps what it
    knew."""

    @property
    def uniform(self) -> bool:
        """Whether the server's mean weighs clients the same, and not by their samples of the
        class."""
        return False

    @property
    def adds(self) -> bool:
        """Whether known means add anything to the local loss."""
        return True

    @abstractmethod
    def loss(self, means: Tensors, module: Module, batch: Batch) -> Tensor:
        """The task loss and what the known `means` (`features`, ... (C, ...), `known` (C,)) add to
        it, shape ()."""

    def means(self, client: Client) -> tuple[Tensor, Tensor, Tensor]:
        """Mean features (C, d) and predictions (C, C) as they are told, and samples (C,), 0 where
        nothing is."""
        return class_means(client)

    def init_server(self, run: RunContext) -> Tensors:
        """The means of `names`, and which are known."""
        return no_means(run, self.names)

    def broadcast(self, server: Server) -> Payloads:
        """Also send the class means that are known."""
        sent = super().broadcast(server)
        known = server.memory["means.known"]
        tables = {name: server.memory[f"means.{name}"] for name in self.names}
        for payload in sent.values() if known.any() else ():
            tell(payload, tables, known)
        return sent

    def objective(self, client: Client, payload: Payload) -> Objective:
        """The task loss with what is known of classes, if anything is."""
        means = laid_out(payload, client.run)
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
        sent = super().upload(client, payload)
        features, predictions, counts = self.means(client)
        tables = {"features": features, "predictions": predictions}
        tell(sent, {name: tables[name] for name in self.names}, counts > 0)
        sent.statistics["counts"] = counts[counts > 0].int()
        return sent

    def aggregate(self, server: Server) -> None:
        """Weighted means over the clients that uploaded a class; a line says where none did."""
        super().aggregate(server)
        memory = server.memory
        nobody = not any(len(upload["classes"]) for upload in server.statistics.values())
        if server.run.is_main and nobody:
            log.say(f"round {server.round}: no client uploaded the mean of any class")
        uploads = last_uploads(server)
        known = memory["means.known"]
        for name in self.names:
            means = memory[f"means.{name}"]
            total = torch.zeros_like(means, dtype=torch.float64)
            weight = torch.zeros(len(means), dtype=torch.float64)
            for upload in uploads:
                classes = upload["classes"].long()
                counts = upload["counts"].double()
                share = torch.ones_like(counts) if self.uniform else counts
                total.index_add_(0, classes, share[:, None] * upload[name].double())
                weight.index_add_(0, classes, share)
            uploaded = weight > 0
            new = (total / weight.clamp_min(1e-30)[:, None]).to(means.dtype)
            memory[f"means.{name}"] = torch.where(uploaded[:, None], new, means)
            memory["means.known"] = uploaded if self.forget else uploaded | known
