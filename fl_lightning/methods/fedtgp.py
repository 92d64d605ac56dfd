"""FedTGP: Zhang, Liu, Hua, Cao: FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced
Contrastive Learning for Data and Model Heterogeneity in Federated Learning. AAAI 2024.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, one_hot

from fl_lightning.foundation.rng import generator
from fl_lightning.methods import (
    LogRange,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Rule,
    RunContext,
    Server,
    Tensors,
    searched,
)
from fl_lightning.methods.classmeans import last_uploads
from fl_lightning.methods.prototypes import Prototypes


@dataclass(frozen=True)
class FedTGP(Prototypes):
    """FedProto whose server does not average clients' class means, but trains prototypes that
    separate the classes.

    Prototypes are F(e_c), with a trained embedding e_c of each class and two linear layers F. The
    server minimises, by SGD, the cross entropy of minus the distances of all uploaded class means
    to all prototypes; the distance to the prototype of the mean's own class is lengthened by
    min(margin, threshold). For the margin, the uploads of each class are averaged, and the distance
    from each average to the nearest other one is computed; the margin is the greatest of these
    distances.

    Args:
        lam: weight of the distance to prototypes in the clients' loss. 10: the authors' run script,
            with `distance squared`.
        distance, predict: as for `fedproto`. `squared` and `prototype`: the authors' code.
        threshold: upper bound on the margin. 100: the authors' code.
        server_epochs: epochs of the server's SGD over the uploaded class means, in batches as large
            as the clients'. 100: the authors' run script (their program's own default: 1,000).
        server_lr: learning rate of the server's SGD. null: the clients', as in the authors' code.
    """

    traits = replace(
        Prototypes.traits,
        newcomers=Rule("own training, towards the trained prototypes", gives=False),
        receives_beside="prototypes that the server has learned",
    )

    lam: NonNegativeFloat = searched(
        10.0, LogRange(0.1, 100), "two decades around the authors' 1 and 10"
    )
    distance: Literal["means", "norm", "squared"] = "squared"
    threshold: PositiveFloat = 100.0
    server_epochs: PositiveInt = 100
    server_lr: PositiveFloat | None = None

    @property
    def uniform(self) -> bool:
        """True: the mean is plain, as in the authors' code. Only the server uses it; clients
        receive the prototypes."""
        return True

    def init_server(self, run: RunContext) -> Tensors:
        """Zeros for class means, and initial prototypes as torch initialises them: a normal
        embedding, and linear layers uniform within 1 / sqrt(d)."""
        memory = super().init_server(run)
        draws = generator(run.config.seed, "prototypes")
        classes, d = memory["means.features"].shape
        embedding = torch.randn(classes, d, generator=draws)
        shapes = ((d, d), (d,), (d, d), (d,))
        layers = [(2 * torch.rand(shape, generator=draws) - 1) / d**0.5 for shape in shapes]
        for name, tensor in zip(LEARNED, [embedding, *layers], strict=True):
            memory[f"prototypes.{name}"] = tensor.to(memory["means.features"])
        return memory

    def aggregate(self, server: Server) -> None:
        """Train the prototypes by SGD on the uploaded class means, in batches as large as the
        clients'. Without uploaded means, prototypes stay."""
        super().aggregate(server)
        uploads = last_uploads(server)
        memory = server.memory
        config = server.run.config
        classes = torch.cat([upload["classes"].long() for upload in uploads])
        means = torch.cat([upload["features"] for upload in uploads]).to(memory["means.features"])
        if not len(classes):
            return
        margin = adaptive_margin(means, classes, self.threshold)
        theta = {name: memory[f"prototypes.{name}"].clone().requires_grad_() for name in LEARNED}
        optimizer = torch.optim.SGD(theta.values(), self.server_lr or config.optimizer.lr)
        draws = generator(config.seed, "prototypes", server.round)
        for _ in range(self.server_epochs):
            order = torch.randperm(len(classes), generator=draws)
            for batch in order.split(config.federation.batch_size):
                optimizer.zero_grad()
                margin_loss(prototypes(theta), means[batch], classes[batch], margin).backward()
                optimizer.step()
                products = 4 * means.shape[1] + 3 * len(batch)
                server.flops += 3 * theta["embedding"].numel() * products
        memory |= {f"prototypes.{name}": tensor.detach() for name, tensor in theta.items()}
        memory["means.features"] = prototypes(theta).detach()


LEARNED = ("embedding", "inner", "inner_bias", "outer", "outer_bias")
"""Names of the trained tensors: an embedding of each class (C, d), and weights and biases of two
linear layers with a ReLU between them."""


def prototypes(theta: Tensors) -> Tensor:
    """Compute the global prototypes (C, d).

    Args:
        theta: the trained tensors, by the names in `LEARNED`.
    """
    hidden = linear(theta["embedding"], theta["inner"], theta["inner_bias"]).relu()
    return linear(hidden, theta["outer"], theta["outer_bias"])


def adaptive_margin(uploaded: Tensor, classes: Tensor, cap: float) -> float:
    """Return the margin: the greatest distance from a class's mean upload to the nearest other
    class's mean upload. The margin is `cap` if it would be greater, or if there is only one class.

    Args:
        uploaded: clients' class means (n, d).
        classes: class of each uploaded mean, (n,).
        cap: greatest margin.
    """
    centres = torch.stack([uploaded[classes == c].mean(0) for c in classes.unique()])
    distances = torch.cdist(centres, centres).fill_diagonal_(torch.inf)
    return min(float(distances.min(1).values.max()), cap)


def margin_loss(
    centres: Tensor,
    uploaded: Tensor,
    classes: Tensor,
    margin: float,
) -> Tensor:
    """Return the cross entropy of minus the distances between uploaded class means and prototypes,
    with the distance to the own class's prototype lengthened by `margin`; shape ().

    Args:
        centres: prototypes (C, d).
        uploaded: class means (n, d).
        classes: class of each uploaded mean, (n,).
        margin: see `adaptive_margin`.
    """
    distance = torch.cdist(uploaded, centres, compute_mode="donot_use_mm_for_euclid_dist")
    return cross_entropy(-(distance + margin * one_hot(classes, len(centres))), classes)
