"""FedCP: Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedCP: Separating Feature Information for
Personalized Federated Learning via Conditional Policy. KDD 2023.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gumbel_softmax, normalize, softmax

from fl_lightning.methods import (
    Batch,
    Client,
    LogRange,
    Module,
    NonNegativeFloat,
    Objective,
    Payload,
    Phase,
    Phases,
    PureLoss,
    Tensors,
    Traits,
    searched,
)
from fl_lightning.methods.common.classifiers import (
    ContextClassifier,
    NewClassifier,
    PersonalPart,
    is_personal,
)


@dataclass(frozen=True)
class FedCP(PersonalPart):
    """A gate divides each sample's features between a classifier of the client's own and a frozen
    global one.

    Let h be the client's own classifier, g the global one, and v the sum of h's rows at the start
    of the round. For each feature the gate gives two numbers, computed from z v / ||v||; their
    softmax gives the shares r and s of the feature. Loss: CE(h(r z) + g(s z)) + lam MMD(z, z_g),
    where z_g are the features under the received body. Body, gate and (h + g) / 2 are uploaded and
    averaged by samples; h is never sent. Scored: the model before local training, with the v of its
    own h.

    Args:
        lam: weight of the MMD. 5: the authors' run script (their program's own default: 0).
        gumbel: whether the softmax has Gumbel noise in training (the authors' code, which has it in
            scoring too).
    """

    traits = Traits(
        family="partial sharing",
        judge="before",
        features=True,
        changes_upload=True,
        sample_use="adds terms of its own to the loss; DP-SGD bounds samples in the task loss only",
    )

    lam: NonNegativeFloat = searched(
        5.0, LogRange(0.5, 50), "a decade around the authors' script's"
    )
    gumbel: bool = False

    def build(self, model: nn.Module, num_classes: int) -> nn.Module:
        """Return the network with its classifier replaced by a gate and two classifiers."""
        return NewClassifier(model, lambda own: Separated(own, self.gumbel), "fedcp")

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return one phase that trains everything but the global classifier, which is frozen."""
        tensors = {"received": client["model"].clone(), "v": client.bind().head.own_context()}
        return [Phase(objective=Objective(loss=PureLoss(self.loss, tensors)))]

    def loss(
        self,
        tensors: Tensors,
        module: Module,
        batch: Batch,
    ) -> Tensor:
        """Return the task loss with the context `v`, plus the MMD to features under the `received`
        model, shape ()."""
        with module.head.using(tensors["v"]):
            task = module.task_loss(batch)
        z = module.features
        if not self.lam:
            return task
        received, _ = module.outputs_at(tensors["received"], batch[0])
        return task + self.lam * mmd(z, received)

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Upload the mean of both classifiers in place of the global one."""
        upload = super().upload(client, payload)
        upload.vector = client["model"].clone()
        blocks = {block.name: block for block in client.layout.blocks}
        for personal in filter(is_personal, client.layout.blocks):
            received = blocks[personal.name.replace(".personal.", ".received.")]
            upload.vector[received.columns].lerp_(client["model"][personal.columns], 0.5)
        return upload


class Separated(ContextClassifier):
    """h(r z) + g(s z): a gate divides each feature between a personal classifier h and a frozen
    global one g (FedCP).

    The gate gives two numbers for each feature, computed from z v / ||v||; their softmax is (r, s).
    The context v is set by `using`; without it, v is the sum of h's current rows.

    Args:
        classifier: the initial value of both classifiers.
        gumbel: whether the softmax has Gumbel noise in training.
    """

    def __init__(self, classifier: nn.Linear, gumbel: bool = False) -> None:
        super().__init__()
        d = classifier.in_features
        self.gumbel = gumbel
        self.personal = classifier
        self.received = copy.deepcopy(classifier).requires_grad_(False)
        self.gate = nn.Sequential(nn.Linear(d, 2 * d), nn.LayerNorm(2 * d), nn.ReLU())

    def own_context(self) -> Tensor:
        """Return v of the current h, (d,)."""
        return self.personal.weight.detach().sum(0)

    def shares(self, z: Tensor) -> Tensor:
        """Return r and s of features z (batch, d), stacked: (batch, 2, d)."""
        v = self.own_context() if self.context is None else self.context
        rows = self.gate(z * normalize(v, dim=0)).unflatten(1, (2, -1))
        return gumbel_softmax(rows, dim=1) if self.gumbel and self.training else softmax(rows, 1)

    def forward(self, z: Tensor) -> Tensor:
        r, s = self.shares(z).unbind(1)
        scores: Tensor = self.personal(r * z) + self.received(s * z)
        return scores


def mmd(x: Tensor, y: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy of samples `x` (n, d) and `y` (m, d), shape ().

    The kernel is a sum of Gaussians exp(-||a - b||^2 / (2 width)) with widths 10, 15, 20 and 50.
    Means are over all pairs, a sample with itself included (the authors' code of FedCP).
    """

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        squares = (a[:, None] - b).square().sum(2)
        total = torch.zeros_like(squares)
        for width in (10, 15, 20, 50):
            total = total + torch.exp(-squares / (2 * width))
        return total.mean()

    return kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)
