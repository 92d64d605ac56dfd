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
    """FedPer whose clients first align the received body with their old one, and whose server
    weighs bodies by Fisher information.

    Before local training a client trains the received body for `align_epochs` on the sum over the
    classes k of a batch of mean ||z - mu_k||^2 / d, with features z of width d and the class's mean
    features mu_k under the client's old body. The server weighs bodies by t_i: the sum over the
    client's batches of ||gradient of the batch's mean loss||^2, after training. Scored: after local
    training.

    Args:
        align_epochs: epochs of the alignment; 0: none. 1: the authors' code.
        align_lr: learning rate of the alignment, with the run's optimiser. 0.01: the authors' code.
        align_batch_size: samples in a batch of the alignment. 16: the authors' code.
        weighting: weights of the bodies: `fisher`: by t_i (paper), or `samples`: as in FedPer.
        batches: batches in t_i: `all`, or only `whole` ones (the authors' code drops an incomplete
            last one).
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
        """Raise `BadInput` if losses are scaled, as t_i is computed from gradients, or if a network
        with BatchNorm would align on single samples."""
        check_no_scaling(run)
        if self.align_epochs:
            check_batches(run, align_batch_size=self.align_batch_size)

    def receive(self, client: Client, payload: Payload) -> Phases:
        """Install the received body, and yield the phase that aligns it with the class means of the
        client's old model."""
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
        return {"fisher": Beside("fisher", "trace of the Fisher information", "nonnegative")}

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Also upload t_i."""
        upload = super().upload(client, payload)
        upload.statistics["fisher"] = self._fisher(client)
        return upload

    def _fisher(self, client: Client) -> Tensor:
        """Return t_i: the sum over batches of ||grad||^2 of the mean loss, shape (), float64.

        With `batches whole` an incomplete last batch is left out, unless it is the only one.
        """
        total = 0.0
        part = client.data.train
        size = client.run.config.federation.batch_size
        least = min(size, len(part)) if self.batches == "whole" else 0
        for batch in part.batches(size):
            if len(batch[1]) >= least:
                _, gradient = client.gradient(client["model"], batch, training=False)
                total += float(gradient.square().sum())
        return torch.tensor(total, dtype=torch.float64)

    def aggregate(self, server: Server) -> None:
        """Average the bodies by `weighting`; with equal weights if all t_i are 0."""
        if self.weighting == "samples":
            return super().aggregate(server)
        for group in server.groups:
            if answered := group.answered:
                t = torch.stack([server.statistics[client]["fisher"] for client in answered])
                weights = t / t.sum() if t.sum() > 0 else torch.full_like(t, 1 / len(t))
                group["model"] = group.mean(weights, answered, like=group["model"])
                group.weighed = Weights(
                    group.group, weights.expand(1, len(t), -1), answered, answered
                )


def distance_by_class(tensors: Tensors, module: Module, batch: Batch) -> Tensor:
    """Return the sum over a batch's classes k of the mean over samples of k of ||z - m_k||^2 / d,
    shape ().

    Args:
        tensors: `means` m, (C, d).
        module: holds the model that gives the features z (batch, d).
        batch: inputs and labels.
    """
    x, labels = batch
    means = tensors["means"]
    module.model(x)
    gap = (wide(module.features) - means[labels]).square().mean(1)
    return (gap / by_class(labels, len(means))[labels]).sum()
