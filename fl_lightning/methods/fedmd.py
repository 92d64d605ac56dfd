"""FedMD: Li, Wang: FedMD: Heterogenous Federated Learning via Model Distillation. NeurIPS 2019 workshop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.callbacks.relations import Alone, Relation
from fl_lightning.config import check
from fl_lightning.core import Block, Client, Objective, Payload, Phase, Rule, Run, Server
from fl_lightning.data import ResidentPart
from fl_lightning.knowledge import predictions as public
from fl_lightning.knowledge.common import check_classes
from fl_lightning.methods.base import Method, Scope


@dataclass(frozen=True)
class FedMD(Method):
    """Clients of any architecture exchange predictions on public data, and train towards the mean of all.

    Each round: `epochs` over the last round's public subset towards the teacher, local training on private data, then
    predictions on this round's subset. The paper's pre-training on labelled public data is left out: ours have none.

    Args:
        samples: of the public data, drawn anew each round. 5000: the authors' code.
        epochs: over them in a round. 1: the authors' code.
        batch_size: on them. 256: the authors' code.
        loss: `mae` or `mse` of class scores, or `kl` of softmax(z / T). mae: the authors' code.
        temperature: T of `kl`. 1: KT-pFL's FedMD.
        lam: weight of the loss; with SGD a factor on the learning rate. 1: the authors' code.
    """

    family = "prototypes and distillation"
    judge = "after"
    starts = "own"
    statistics = True
    newcomers = Rule("own training, after distilling all predictions on public data", gives=False, unlabelled=True)

    samples: int = 5000
    epochs: int = 1
    batch_size: int = 256
    loss: Literal["mae", "mse", "kl"] = "mae"
    temperature: float = 1.0
    lam: float = 1.0

    def __post_init__(self) -> None:
        for key in ("samples", "batch_size"):
            check(f"method.{key}", getattr(self, key), getattr(self, key) >= 1, "it must be at least 1")
        for key in ("epochs", "lam"):
            check(f"method.{key}", getattr(self, key), getattr(self, key) >= 0, "it must be 0 or more")
        check("method.temperature", self.temperature, self.temperature > 0, "it must be above 0")

    def relation(self) -> Relation:
        """Nobody receives a model."""
        return Alone()

    def scope(self, block: Block) -> Scope:
        """No tensor of the model travels."""
        return "personal"

    def drawn(self, run: Run) -> int:
        """`samples`; in a smoke run as many as there are at most."""
        return public.drawn(run, self.samples)

    def check(self, run: Run) -> None:
        """Classes are needed, and public data."""
        check_classes(run)
        public.check_public(run, self.drawn(run))

    def init_server(self, run: Run) -> dict[str, Tensor]:
        """What was told last, and how it is weighed."""
        return public.no_predictions(run)

    def broadcast(self, server: Server) -> dict[int, Payload]:
        """Every client its teacher."""
        sent = super().broadcast(server)
        public.teach(server.memory, sent)
        server.flops += 2 * len(server.cohort) * server.memory["public.predictions"].numel()
        server.view = public.teachers_view(server.memory, server.cohort)
        return sent

    def phases(self, client: Client, payload: Payload) -> Iterator[Phase]:
        """Towards the teacher on the inputs that it has seen, those of the round before; then local training."""
        teacher = payload.extra.get("teacher")
        if teacher is not None and self.epochs and self.lam:
            x = public.public_subset(client.run, client.round - 1, self.drawn(client.run))
            yield Phase(
                objective=Objective(loss=self.gap), part=ResidentPart(x, teacher.to(x.device), None),
                epochs=self.epochs, batch_size=self.batch_size, purpose="distil", scores="distilled",
            )  # fmt: skip
        yield Phase()

    def gap(self, module: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        """lam times the loss between the bound model on public x and the teacher's predictions there, shape ()."""
        return self.lam * public.gap(public.class_scores(module, batch[0]), batch[1], self.loss, self.temperature)

    @torch.no_grad()
    def upload(self, client: Client, payload: Payload) -> Payload:
        """Predictions on the round's public subset."""
        sent, module = super().upload(client, payload), client.bind()
        module.model.eval()
        x = public.public_subset(client.run, client.round, self.drawn(client.run))
        z = torch.cat([public.class_scores(module, part) for part in x.split(client.run.config.evaluation.batch_size)])
        sent.extra["predictions"] = (z / self.temperature).softmax(1) if self.loss == "kl" else z
        return sent

    def aggregate(self, server: Server) -> None:
        """Keep what was told (a transform may have left a client's out), and weigh it."""
        found = {c: t["predictions"] for c, t in server.statistics.items() if "predictions" in t}
        if not found:
            server.memory |= public.no_predictions(server.run)
            return
        P, told = torch.stack(list(found.values())), list(found)
        rows = self.weigh(server, P.double(), told)
        server.memory |= public.weighed(P, told, rows, distributions=self.loss == "kl")

    def weigh(self, server: Server, P: Tensor, told: list[int]) -> Tensor:
        """Rows (N, m), float64, sums 1: every client's weights of the predictions P (m, |D_r|, C) of `told`."""
        return public.uniform(server.clients, told)
