"""FedGen: Zhu, Hong, Zhou: Data-Free Knowledge Distillation for Heterogeneous Federated Learning.
ICML 2021."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from fl_lightning.configuration.ranges import (
    NonNegativeFloat,
    PositiveAdamRate,
    PositiveFloat,
    PositiveInt,
    Range,
)
from fl_lightning.configuration.search import Choice, LogRange, searched
from fl_lightning.core import Beside, Client, Objective, Payload, Phase, RunContext, Server, Traits
from fl_lightning.foundation.rng import generator
from fl_lightning.methods.base import Method
from fl_lightning.methods.common.generator import Generator, lesson, teach, tell


@dataclass(frozen=True)
class FedGen(Method):
    """FedAvg with a generator of features, trained on the server by clients' classifiers; its
    features train clients.

    Client, from the second round: CE + ratio alpha CE(head(G(y', e)), y') + beta KL(head(G(y, e))
    || model(x)), with y' drawn as labels are in the cohort that taught, y those of the batch.
    Server: Adam on the cross entropy of the mean scores of the cohort's classifiers on G(y', e), +
    eta exp(-mean |e_a - e_b|^2 |G_a - G_b|).

    Args:
        alpha, beta, decay: weights of generated samples and of the distillation, and what is left
            of both in each next round. 1, 0 and 1: paper (Eq. 5); the authors' code: 10, 10 and
            0.98.
        ratio, eta: generated samples for each of the batch, and the weight of diversity. 1: the
            authors' code.
        teacher: cross entropy of the `mean` scores (paper, Eq. 4), or the `weighted` mean of the
            clients' own, by their shares of the class (the authors' code).
        generator: `paper` (normal noise, classes drawn as often as the cohort has them), or as the
            authors' `code` has it: uniform noise, BatchNorm behind the hidden layer, classes that
            the cohort holds drawn evenly, and for Adam a weight decay of 0.01 and a rate that falls
            by 0.98 a round.
        generator_lr, generator_steps, generator_batch: of Adam in a round. 3e-4, 50 and 32: the
            authors' code. A batch has 2 samples at least, since diversity compares them.
        noise, hidden: widths of e, and of the generator's hidden layer. 32 and 256: the authors'
            code (MNIST).
    """

    traits = Traits(
        family="prototypes and distillation",
        features=True,
        classes=True,
        statistics=True,
        several=False,
        receives_beside="a generator, class counts of all",
        sample_use="uploads class counts of samples",
    )

    alpha: NonNegativeFloat = searched(
        1.0, LogRange(0.1, 10), "from a tenth of the paper's to the authors' 10"
    )
    beta: NonNegativeFloat = searched(
        0.0, Choice((0.0, 0.1, 1.0, 10.0)), "the paper's 0 to the authors' 10"
    )
    decay: PositiveFloat = 1.0
    ratio: PositiveAdamRate = 1.0
    teacher: Literal["mean", "weighted"] = "mean"
    eta: NonNegativeFloat = 1.0
    generator: Literal["paper", "code"] = "paper"
    generator_lr: PositiveAdamRate = 3e-4
    generator_steps: PositiveInt = 50
    generator_batch: Annotated[int, Range(2)] = 32
    noise: PositiveInt = 32
    hidden: PositiveInt = 256

    def init_server(self, run: RunContext) -> dict[str, Tensor]:
        """The generator."""
        return self._generator(run).at_first(generator(run.config.seed, "generator"))

    def broadcast(self, server: Server) -> dict[int, Payload]:
        """With it the generator, once it has been taught."""
        sent = super().broadcast(server)
        tell(server, sent)
        return sent

    def phases(self, client: Client, payload: Payload) -> Iterable[Phase]:
        """With what the generator has to say, if anything."""
        if "generator" not in payload.extra or not (self.alpha or self.beta):
            return [Phase()]
        how = (
            self.ratio,
            *(weight * self.decay ** (client.round - 1) for weight in (self.alpha, self.beta)),
        )
        return [
            Phase(
                objective=Objective(loss=lesson(self._generator(client.run), client, payload, *how))
            )
        ]

    def beside(self) -> dict[str, Beside]:
        """Declares what `upload` adds to the model."""
        return {"labels": Beside("counts", "samples of each class", "counts")}

    def upload(self, client: Client, payload: Payload) -> Payload:
        """With it how many samples the client has of each class."""
        sent = super().upload(client, payload)
        sent.statistics["labels"] = client.class_counts.int()
        return sent

    def aggregate(self, server: Server) -> None:
        """Teach the generator, then FedAvg's mean."""
        how = (
            self.teacher == "weighted",
            self.eta,
            self.generator_lr,
            self.generator_steps,
            self.generator_batch,
        )
        teach(server, self._generator(server.run), *how)
        super().aggregate(server)

    def _generator(self, run: RunContext) -> Generator:
        return Generator(
            run.data.num_classes,
            run.feature_width,
            self.noise,
            self.hidden,
            self.generator == "code",
        )
