"""MOON: Li, He, Song: Model-Contrastive Federated Learning. CVPR 2021."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from fl_lightning.methods import (
    Batch,
    Client,
    LogRange,
    Method,
    Module,
    NonNegativeFloat,
    Objective,
    Payload,
    Phase,
    Phases,
    PositiveFloat,
    PositiveInt,
    PureLoss,
    Slot,
    Tensors,
    Traits,
    searched,
)
from fl_lightning.methods.common.classifiers import NewClassifier


@dataclass(frozen=True)
class MOON(Method):
    """FedAvg whose features are pulled towards those of the received model and pushed away from
    those of the client's last model.

    Local loss: CE + mu mean(-log(e^(cos(z, z_g) / tau) / (e^(cos(z, z_g) / tau) + e^(cos(z, z_p) /
    tau)))). z, z_g and z_p are the classifier's inputs for a sample under the trained, the received
    and the client's last model. (In a client's first round the last model is the received one, so
    the term is ln 2 without a gradient.) The two other models are constant, in evaluation mode.

    Args:
        mu: weight of the contrastive term; 0 is FedAvg. 1: paper, for CIFAR-100 and Tiny-ImageNet
            (5 for CIFAR-10).
        tau: temperature. 0.5: paper.
        projection: width of a projection head (linear, ReLU, linear) before the classifier. 256:
            the authors' networks, which have one; null: our choice, the network that other methods
            train.
    """

    traits = Traits(
        family="one global model",
        features=True,
        sample_use="adds terms of its own to the loss; DP-SGD bounds samples in the task loss only",
    )

    mu: NonNegativeFloat = searched(1.0, LogRange(0.1, 10), "the paper's 1 and 5 lie within")
    tau: PositiveFloat = 0.5
    projection: PositiveInt | None = None

    def build(self, model: nn.Module, num_classes: int) -> nn.Module:
        """Return the network with a projection head, if one is configured."""
        width = self.projection
        if width is None:
            return model
        return NewClassifier(model, partial(Projected, width=width), "moon", inner="out")

    def slots(self) -> dict[str, Slot]:
        """The client's model after its last local training."""
        return {"last": Slot()} if self.mu else {}

    def receive(self, client: Client, payload: Payload) -> None:
        """Keep the client's model as its last one, then install the received model."""
        if self.mu:
            client["last"].copy_(client["model"] if client.rounds else client.composed(payload))
        client.overwrite(payload)

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return one phase that minimises the task loss plus the contrastive term."""
        if not self.mu:
            return [Phase()]
        models = {"received": client["model"].clone(), "last": client["last"]}
        return [Phase(objective=Objective(loss=PureLoss(self.loss, models)))]

    def loss(
        self,
        models: Tensors,
        module: Module,
        batch: Batch,
    ) -> Tensor:
        """Return the task loss plus the contrastive term with features under the `received` and the
        `last` model, shape ()."""
        task = module.task_loss(batch)
        near, _ = module.outputs_at(models["received"], batch[0])
        far, _ = module.outputs_at(models["last"], batch[0])
        return task + self.mu * contrast(module.features, near, far, self.tau)


class Projected(nn.Sequential):
    """A projection head (linear to `width`, with a ReLU after a first linear layer) and a new
    classifier of its outputs, `out`."""

    def __init__(self, classifier: nn.Linear, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(classifier.in_features, classifier.in_features)
        self.relu = nn.ReLU()
        self.second = nn.Linear(classifier.in_features, width)
        self.out = nn.Linear(width, classifier.out_features)


def contrast(
    z: Tensor,
    near: Tensor,
    far: Tensor,
    tau: float,
) -> Tensor:
    """Return the mean of -log(e^(cos(z, near) / tau) / (e^(cos(z, near) / tau) + e^(cos(z, far) /
    tau))) over features (n, d), shape ()."""
    # computed together, so that equal features cancel exactly in z's gradient
    cosines = cosine_similarity(z, torch.stack([near, far]), 2).T
    nearest = torch.zeros(len(z), dtype=torch.int64, device=z.device)
    return cross_entropy(cosines / tau, nearest)
