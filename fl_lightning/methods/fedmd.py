"""FedMD: Li, Wang: FedMD: Heterogenous Federated Learning via Model Distillation. NeurIPS 2019
workshop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fl_lightning.callbacks.relations import Relation
from fl_lightning.configuration.ranges import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from fl_lightning.configuration.search import LogRange, searched
from fl_lightning.core import (
    Beside,
    Client,
    Module,
    Payload,
    Phase,
    Rule,
    RunContext,
    Server,
    Tensors,
    Traits,
)
from fl_lightning.core.beside import Values
from fl_lightning.methods.base import WithoutModels
from fl_lightning.methods.common import predictions as public
from fl_lightning.methods.common.basics import check_batches


@dataclass(frozen=True)
class FedMD(WithoutModels):
    """Clients of any architecture exchange predictions on public data, and train towards the mean
    of all.

    Each round: `epochs` over the last round's public subset towards the teacher, local training on
    private data, then predictions on this round's subset. The paper's pre-training on labelled
    public data is left out: ours have none.

    Args:
        samples: of the public data, drawn anew each round. 5000: FedMD's authors' code; 3000:
            KT-pFL's paper.
        epochs: over them in a round. 1: the authors' code.
        batch_size: on them. 256: the authors' code.
        loss: `mae` or `mse` of class scores, or `kl` of softmax(z / T). mae: FedMD's authors' code,
            its paper leaves it open; kl: KT-pFL.
        temperature: T of `kl`. 1: KT-pFL's FedMD.
        lam: weight of the loss; with SGD a factor on the learning rate. 1: the authors' code.
    """

    traits = Traits(
        family="prototypes and distillation",
        judge="after",
        starts="own",
        classes=True,
        statistics=True,
        newcomers=Rule(
            "own training, after distilling all predictions on public data",
            gives=False,
            unlabelled=True,
        ),
        receives_beside="a mix of predictions",
        sample_use="uploads class scores",
    )

    samples: PositiveInt = 5000
    epochs: NonNegativeInt = 1
    batch_size: PositiveInt = 256
    loss: Literal["mae", "mse", "kl"] = "mae"
    temperature: PositiveFloat = 1.0
    lam: NonNegativeFloat = searched(1.0, LogRange(0.1, 10), "a decade around the authors'")

    def check(self, run: RunContext) -> None:
        """Public data are needed, in batches that the network can train on."""
        super().check(run)
        public.check_public(run, public.drawn(run, self.samples))
        check_batches(run, batch_size=self.batch_size, samples=self.samples)

    def relation(self) -> Relation:
        """Nobody receives a model; rows weigh whose predictions teach whom."""
        return public.Teachers()

    def init_server(self, run: RunContext) -> dict[str, Tensor]:
        """What was told last, and how it is weighed."""
        return public.no_predictions(run)

    def broadcast(self, server: Server) -> dict[int, Payload]:
        """Every client its teacher."""
        sent = super().broadcast(server)
        public.teach(server, sent)
        return sent

    def phases(self, client: Client, payload: Payload) -> Iterator[Phase]:
        """Towards the teacher on the inputs that it has seen, those of the round before; then local
        training."""
        if "teacher" in payload.extra and self.epochs and self.lam:
            yield public.distilling(
                client, payload, self.samples, self.gap, self.epochs, self.batch_size
            )
        yield Phase()

    def gap(self, _: Tensors, module: Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """lam times the loss between the bound model on public x and the teacher's predictions
        there, shape ()."""
        return self.lam * public.gap(
            public.class_scores(module, batch[0]), batch[1], self.loss, self.temperature
        )

    def beside(self) -> dict[str, Beside]:
        """Declares what `upload` adds to the model."""
        values: Values = "shares" if self.loss == "kl" else "real"
        return {"predictions": Beside("predictions", "class scores of public samples", values)}

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Predictions on the round's public subset."""
        sent, z = super().upload(client, payload), public.predicted(client, self.samples)
        sent.extra["predictions"] = (z / self.temperature).softmax(1) if self.loss == "kl" else z
        return sent

    def aggregate(self, server: Server) -> None:
        """Keep what was told, and weigh it."""
        public.keep(server, self.weigh, distributions=self.loss == "kl")

    def weigh(self, server: Server, P: Tensor, uploaders: list[int]) -> Tensor:
        """Rows (N, m), float64, sums 1: every client's weights of the predictions P (m, |D_r|, C)
        of `told`."""
        return public.uniform(server.clients, uploaders)
