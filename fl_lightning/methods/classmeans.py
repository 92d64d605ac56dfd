"""What FedProto, FedTGP and FedHKD have in common: clients exchange means by class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fl_lightning.core import (
    Batch,
    Beside,
    Client,
    Module,
    Objective,
    Payload,
    Phase,
    PureLoss,
    RunContext,
    Server,
    Tensors,
    Traits,
)
from fl_lightning.methods.base import Method
from fl_lightning.methods.common.class_means import class_means, laid_out, merged, no_means, tell


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
    @abstractmethod
    def adds(self) -> bool:
        """Whether known means add anything to the local loss."""

    @abstractmethod
    def loss(self, means: Tensors, module: Module, batch: Batch) -> Tensor:
        """The task loss and what the known `means` (`features`, ... (C, ...), `known` (C,)) add to
        it, shape ()."""

    def means(self, client: Client) -> tuple[Tensor, Tensor, Tensor]:
        """Mean features (C, d) and predictions (C, C) as they are told, and samples (C,), 0 where
        nothing is."""
        return class_means(client)

    def init_server(self, run: RunContext) -> dict[str, Tensor]:
        """The means of `names`, and which are known."""
        return no_means(run, self.names)

    def broadcast(self, server: Server) -> dict[int, Payload]:
        """With it what is known, class by class."""
        sent, memory = super().broadcast(server), server.memory
        for payload in sent.values() if memory["means.known"].any() else ():
            tell(
                payload,
                {name: memory[f"means.{name}"] for name in self.names},
                memory["means.known"],
            )
        return sent

    def objective(self, client: Client, payload: Payload) -> Objective:
        """The task loss with what is known of classes, if anything is."""
        means = laid_out(payload, client.run)
        return Objective(loss=PureLoss(self.loss, means)) if means and self.adds else Objective()

    def phases(self, client: Client, payload: Payload) -> Iterable[Phase]:
        """Local training down `objective`."""
        return [Phase(objective=self.objective(client, payload))]

    def beside(self) -> dict[str, Beside]:
        """Declares what `upload` adds to the model."""
        rows = {
            name: Beside("class_means", f"mean {name} of each class", "rows") for name in self.names
        }
        return {
            "classes": Beside("counts", "which classes the client has", "classes"),
            "counts": Beside("counts", "samples of each class", "class_counts"),
        } | rows

    def upload(self, client: Client, payload: Payload) -> Payload:
        """With it the means of the client's classes, and how many samples they come from."""
        sent = super().upload(client, payload)
        features, predictions, counts = self.means(client)
        tables = {"features": features, "predictions": predictions}
        tell(sent, {name: tables[name] for name in self.names}, counts > 0)
        sent.statistics["counts"] = counts[counts > 0].int()
        return sent

    def aggregate(self, server: Server) -> None:
        """Weighted means over the clients that told a class."""
        super().aggregate(server)
        server.memory |= merged(server, self.names, uniform=self.uniform, forget=self.forget)
