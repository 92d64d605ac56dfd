"""FedGen: Zhu, Hong, Zhou: Data-Free Knowledge Distillation for Heterogeneous Federated Learning. ICML 2021."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.core import Client, Objective, Payload, Phase, Run, Server
from fl_lightning.core.phase import Batch
from fl_lightning.knowledge.common import check_classes
from fl_lightning.knowledge.generator import Generator, learned, taught, uploaded_heads
from fl_lightning.methods.base import Choice, LogRange, Method, check_above_0, check_least, searched
from fl_lightning.rng import generator


@dataclass(frozen=True)
class FedGen(Method):
    """FedAvg, and a generator of features on the server that clients' classifiers have taught; it teaches them in turn.

    Client, from the second round: CE + ratio alpha CE(head(G(y', e)), y') + beta KL(head(G(y, e)) || model(x)), with y'
    drawn as labels are in the cohort that taught, y those of the batch. Server: Adam on the cross entropy of the mean
    scores of the cohort's classifiers on G(y', e), + eta exp(-mean |e_a - e_b|^2 |G_a - G_b|).

    Args:
        alpha, beta, decay: weights of generated samples and of the distillation, and what is left of both in each next
            round. 1, 0 and 1: paper (Eq. 5); the authors' code: 10, 10 and 0.98.
        ratio, eta: generated samples for each of the batch, and the weight of diversity. 1: the authors' code.
        teacher: cross entropy of the `mean` scores (paper, Eq. 4), or the `weighted` mean of the clients' own, by their
            shares of the class (the authors' code).
        generator_lr, generator_steps, generator_batch: of Adam in a round. 3e-4, 50 and 32: the authors' code.
        noise, hidden: widths of e, and of the generator's hidden layer. 32 and 256: the authors' code (MNIST).
    """

    family = "prototypes and distillation"
    features = True
    statistics = True
    several = False
    alpha: float = searched(1.0, LogRange(0.1, 10), "from a tenth of the paper's to the authors' 10")
    beta: float = searched(0.0, Choice((0.0, 0.1, 1.0, 10.0)), "the paper's 0 to the authors' 10")
    decay: float = 1.0
    ratio: float = 1.0
    teacher: Literal["mean", "weighted"] = "mean"
    eta: float = 1.0
    generator_lr: float = 3e-4
    generator_steps: int = 50
    generator_batch: int = 32
    noise: int = 32
    hidden: int = 256

    def __post_init__(self) -> None:
        check_least(self, alpha=0, beta=0, eta=0, generator_steps=1, generator_batch=1, noise=1, hidden=1)
        check_above_0(self, "decay", "ratio", "generator_lr")

    def check(self, run: Run) -> None:
        """Classes are needed."""
        check_classes(run)

    def init_server(self, run: Run) -> dict[str, Tensor]:
        """The generator, and how many samples of each class those have who taught it, 0 at first."""
        labels = {"labels": torch.zeros(run.data.num_classes)}
        return labels | self._generator(run).at_first(generator(run.config.seed, "generator"))

    def broadcast(self, server: Server) -> dict[int, Payload]:
        """With it the generator, once it has been taught."""
        sent, memory = super().broadcast(server), server.memory
        for payload in sent.values() if memory["labels"].any() else ():
            payload.extra["generator"], payload.statistics["labels"] = memory["generator"], memory["labels"]
        return sent

    def phases(self, client: Client, payload: Payload) -> Iterable[Phase]:
        """With what the generator has to say, if anything."""
        if "generator" not in payload.extra or not (self.alpha or self.beta):
            return [Phase()]
        theta, prior = (t.to(client["model"]) for t in (payload.extra["generator"], payload.statistics["labels"]))
        G, faded = self._generator(client.run), self.decay ** (client.round - 1)

        def loss(module: Any, batch: Batch) -> Tensor:
            task: Tensor = module.task_loss(batch)
            made = (max(1, round(self.ratio * len(batch[1]))), self.ratio * self.alpha * faded)
            client.flops += 2 * G.products * (made[0] * (self.alpha > 0) + len(batch[1]) * (self.beta > 0))
            return task + learned(G, theta, module, batch[1], prior, made, self.beta * faded)

        return [Phase(objective=Objective(loss=loss))]

    def upload(self, client: Client, payload: Payload) -> Payload:
        """With it how many samples the client has of each class."""
        sent = super().upload(client, payload)
        sent.statistics["labels"] = torch.from_numpy(client.run.data.class_counts[client.id]).int()
        return sent

    def aggregate(self, server: Server) -> None:
        """Teach the generator, then FedAvg's mean."""
        G, told = self._generator(server.run), [server.statistics[c]["labels"] for c in server.answered]
        draws = generator(server.run.config.seed, "generator", server.round)
        how = (self.teacher == "weighted", self.eta, self.generator_lr, self.generator_steps, self.generator_batch)
        heads = uploaded_heads(server.only, server.answered)
        server.memory.update(taught(G, server.memory, heads, torch.stack(told), draws, *how))
        server.flops += 6 * G.products * self.generator_steps * self.generator_batch
        super().aggregate(server)

    def _generator(self, run: Run) -> Generator:
        return Generator(run.data.num_classes, run.feature_width, self.noise, self.hidden)
