"""FedCP: Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedCP: Separating Feature Information for
Personalized Federated Learning via Conditional Policy. KDD 2023.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from fl_lightning.configuration.ranges import NonNegativeFloat
from fl_lightning.configuration.search import LogRange, searched
from fl_lightning.core import (
    Batch,
    Block,
    Client,
    Module,
    Objective,
    Payload,
    Phase,
    PureLoss,
    Tensors,
    Traits,
)
from fl_lightning.methods.base import Method, Scope
from fl_lightning.methods.common.basics import mmd
from fl_lightning.methods.common.classifiers import NewClassifier, Separated, is_personal


@dataclass(frozen=True)
class FedCP(Method):
    """A gate divides each sample's features between a classifier of the client's own and a frozen
    global one.

    (r, s) = softmax over the two of gate(z v / ||v||), v the sum of the rows of the own classifier
    h as the round begins; loss CE(h(r z) + g(s z)) + lam MMD(z, z_g), where z_g are the features
    under the received body. Body, gate and (h + g) / 2 go up and are averaged by samples; h stays.
    Scored with v of the present h, before training.

    Args:
        lam: weight of the MMD. 5: the authors' run script (their program's own default: 0).
        gumbel: Gumbel noise in the softmax while training (the authors' code, which has it in
            scoring too).
    """

    traits = Traits(
        family="partial sharing",
        judge="before",
        features=True,
        changes_upload=True,
        sample_use="has a loss of its own, and single samples are bounded in the task loss alone",
    )

    lam: NonNegativeFloat = searched(
        5.0, LogRange(0.5, 50), "a decade around the authors' script's"
    )
    gumbel: bool = False

    def build(self, model: nn.Module, num_classes: int) -> nn.Module:
        """With two classifiers and a gate."""
        return NewClassifier(model, lambda own: Separated(own, self.gumbel), "fedcp")

    def scope(self, block: Block) -> Scope:
        """The own classifier is never sent."""
        return "personal" if is_personal(block) else "shared"

    def phases(self, client: Client, payload: Payload) -> Iterable[Phase]:
        """Everything but the global classifier, which is frozen."""
        tensors = {"received": client["model"].clone(), "v": client.bind().head.own_context()}
        return [Phase(objective=Objective(loss=PureLoss(self.loss, tensors)))]

    def loss(self, tensors: Tensors, module: Module, batch: Batch) -> Tensor:
        """The task loss in the context `v`, and the distance to features under the `received`
        model, shape ()."""
        with module.head.using(tensors["v"]):
            task: Tensor = module.task_loss(batch)
        z = module.features
        return (
            task + self.lam * mmd(z, module.under(tensors["received"], batch[0])[0])
            if self.lam
            else task
        )

    def upload(self, client: Client, payload: Payload) -> Payload:
        """In place of the global classifier the mean of both."""
        sent, blocks = super().upload(client, payload), {b.name: b for b in client.layout.blocks}
        sent.vector = client["model"].clone()
        for name, own in blocks.items():
            if is_personal(own):
                both = blocks[f"{client.layout.head}.received.{name.rpartition('.')[2]}"]
                sent.vector[both.start : both.stop].lerp_(
                    client["model"][own.start : own.stop], 0.5
                )
        return sent
