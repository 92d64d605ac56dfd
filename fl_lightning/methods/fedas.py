"""FedAS: Yang, Huang, Ye: FedAS: Bridging Inconsistency in Personalized Federated Learning. CVPR
2024."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from fl_lightning.configuration.ranges import NonNegativeFloat, PositiveInt
from fl_lightning.configuration.search import LogRange, searched
from fl_lightning.core import (
    Beside,
    Client,
    Objective,
    Payload,
    Phase,
    PureLoss,
    RunContext,
    Server,
    Traits,
)
from fl_lightning.core.relation import Weights
from fl_lightning.methods.base import OwnClassifier, check_no_scaling
from fl_lightning.methods.common.basics import check_batches, fisher
from fl_lightning.methods.common.class_means import class_means, distance_by_class


@dataclass(frozen=True)
class FedAS(OwnClassifier):
    """FedPer whose received bodies are aligned with the old ones first, and averaged by clients'
    Fisher information.

    Before its own training a client trains what it has received, for an epoch on sum_k mean ||z -
    mu_k||^2 / d over the classes k of a batch, with mu_k the mean features that its own old body
    gives. The server weighs bodies by t_i, the sum over the client's batches of ||grad||^2 of the
    mean loss after training. Scored: after local training.

    Args:
        align_epochs: of the alignment; 0: none. 1: the authors' code, as the next two.
        align_lr: its learning rate (the run's optimiser takes the steps). 0.01.
        align_batch_size: its batches. 16.
        weighting: of bodies: `fisher` (paper) or `samples` (FedPer's).
        batches: which t_i sums over: `all`, or the `whole` ones (the authors' code drops an
            incomplete last one).
    """

    traits = Traits(
        family="partial sharing",
        judge="after",
        features=True,
        classes=True,
        statistics=True,
        sample_use="aligns the body with class means of samples",
    )

    align_epochs: NonNegativeFloat = 1
    align_lr: NonNegativeFloat = searched(
        0.01, LogRange(0.001, 0.1), "a decade around the authors'"
    )
    align_batch_size: PositiveInt = 16
    weighting: Literal["fisher", "samples"] = "fisher"
    batches: Literal["all", "whole"] = "all"

    def check(self, run: RunContext) -> None:
        """The network must be able to train on the batches; what is uploaded is a gradient of no
        scaled loss."""
        check_no_scaling(run)
        super().check(run)
        if self.align_epochs:
            check_batches(run, align_batch_size=self.align_batch_size)

    def receive(self, client: Client, payload: Payload) -> Iterator[Phase]:
        """The received body, aligned with the old one's class means (in a copy of the client's
        own)."""
        means = (
            class_means(client)[0].to(client.run.device) if self.align_epochs else torch.empty(0)
        )
        client.overwrite(payload)
        if self.align_epochs:
            yield Phase(
                objective=Objective(loss=PureLoss(distance_by_class, {"means": means})),
                trains=client.mask(lambda b: not b.head),
                epochs=self.align_epochs,
                lr=self.align_lr,
                batch_size=self.align_batch_size,
                purpose="align",
            )

    def beside(self) -> dict[str, Beside]:
        """Declares what `upload` adds to the model."""
        return {"fisher": Beside("fisher", "trace of the Fisher information", "nonnegative")}

    def upload(self, client: Client, payload: Payload) -> Payload:
        """The body and t_i."""
        sent = super().upload(client, payload)
        sent.statistics["fisher"] = fisher(client, whole=self.batches == "whole")
        return sent

    def aggregate(self, server: Server) -> None:
        """The mean of bodies by `weighting`; plain where nobody's loss has any slope."""
        if self.weighting == "samples":
            return super().aggregate(server)
        for group in [group for group in server.groups if group.answered]:
            t = torch.stack([server.statistics[c]["fisher"] for c in group.answered])
            weights = t / t.sum() if t.sum() > 0 else torch.full_like(t, 1 / len(t))
            group["model"] = group.mean(weights, group.answered, like=group["model"])
            group.weighed = Weights(
                group.group, weights.expand(1, len(t), -1), group.answered, group.answered
            )
