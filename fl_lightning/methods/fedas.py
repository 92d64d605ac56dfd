"""FedAS: Yang, Huang, Ye: FedAS: Bridging Inconsistency in Personalized Federated Learning. CVPR
2024."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.core.relation import Weights
from fl_lightning.methods import (
    Batch,
    Beside,
    Client,
    LogRange,
    Module,
    NonNegativeFloat,
    Objective,
    OwnClassifier,
    Payload,
    Phase,
    Phases,
    PositiveInt,
    PureLoss,
    RunContext,
    Server,
    Tensors,
    Traits,
    check_no_scaling,
    searched,
)
from fl_lightning.methods.classmeans import by_class, class_means
from fl_lightning.methods.common.basics import check_batches, wide


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
        if self.align_epochs:
            check_batches(run, align_batch_size=self.align_batch_size)

    def receive(self, client: Client, payload: Payload) -> Phases:
        """The received body, aligned with the old one's class means (in a copy of the client's
        own)."""
        if not self.align_epochs:
            client.overwrite(payload)
            return
        means = class_means(client)["features"].to(client.run.device)
        client.overwrite(payload)
        yield Phase(
            objective=Objective(loss=PureLoss(distance_by_class, {"means": means})),
            trains=client.mask(lambda block: not block.head),
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
        upload = super().upload(client, payload)
        upload.statistics["fisher"] = fisher(client, whole=self.batches == "whole")
        return upload

    def aggregate(self, server: Server) -> None:
        """The mean of bodies by `weighting`; plain where nobody's loss has any slope."""
        if self.weighting == "samples":
            return super().aggregate(server)
        for group in server.groups:
            if who := group.answered:
                t = torch.stack([server.statistics[client]["fisher"] for client in who])
                weights = t / t.sum() if t.sum() > 0 else torch.full_like(t, 1 / len(t))
                group["model"] = group.mean(weights, who, like=group["model"])
                group.weighed = Weights(group.group, weights.expand(1, len(t), -1), who, who)


def fisher(client: Client, *, whole: bool) -> Tensor:
    """Sum over the batches of the client's training data of ||grad||^2 of the mean loss, shape (),
    float64 (FedAS).

    `whole`: without an incomplete last batch, whose mean over few samples counts like any other's;
    it stays where there is no other.
    """
    total = torch.zeros((), dtype=torch.float64)
    size = client.run.config.federation.batch_size
    complete = min(size, len(client.data.train))
    for batch in client.data.train.batches(size):
        if not whole or len(batch[1]) >= complete:
            _, gradient = client.gradient(client["model"], batch, training=False)
            total += gradient.square().sum().cpu().double()
    return total


def distance_by_class(tensors: Tensors, module: Module, batch: Batch) -> Tensor:
    """Sum over a batch's classes k of the mean of ||z - m_k||^2 / d over samples of k, shape ().

    Args:
        tensors: `means` m, (C, d).
        module: whose features z (batch, d) are pulled.
        batch: of its inputs and labels.
    """
    x, labels = batch
    means = tensors["means"]
    module.model(x)
    gap = (wide(module.features) - means[labels]).square().mean(1)
    return (gap / by_class(labels, len(means))[labels]).sum()
