"""FedTGP: Zhang, Liu, Hua, Cao: FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced
Contrastive Learning for Data and Model Heterogeneity in Federated Learning. AAAI 2024.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from fl_lightning.configuration.ranges import NonNegativeFloat, PositiveFloat, PositiveInt
from fl_lightning.configuration.search import LogRange, searched
from fl_lightning.core import Rule, RunContext, Server
from fl_lightning.foundation.rng import generator
from fl_lightning.methods.common.class_means import last_uploads
from fl_lightning.methods.common.trained_prototypes import learn, untrained
from fl_lightning.methods.prototypes import Prototypes


@dataclass(frozen=True)
class FedTGP(Prototypes):
    """FedProto whose server does not average clients' class means but learns prototypes that tell
    them apart.

    Prototypes are F(e_c), an embedding of each class through two linear layers. Server: SGD on the
    cross entropy of minus the distances of all uploaded class means to all prototypes, the own
    one's longer by min(margin, threshold); the margin is the greatest distance of a class's mean
    upload to its nearest other.

    Args:
        lam: weight of the pull. 10: the authors' run script, to `distance squared`.
        distance, predict: as of `fedproto`. `squared` and `prototype`: the authors' code.
        threshold: greatest margin. 100: the authors' code.
        server_epochs: over the uploaded class means, in batches as large as the clients'. 100: the
            authors' run script (their program's own default: 1,000).
        server_lr: of the server's SGD. null: the clients' own, as in the authors' code.
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
        """The plain mean, as in the authors' code; nothing of it is sent."""
        return True

    def init_server(self, run: RunContext) -> dict[str, Tensor]:
        """With it what is learned."""
        memory = super().init_server(run)
        return memory | untrained(
            memory["means.features"], generator(run.config.seed, "prototypes")
        )

    def aggregate(self, server: Server) -> None:
        """Note which classes are known; then learn their prototypes from what clients told."""
        super().aggregate(server)
        learn(server, last_uploads(server), self.threshold, self.server_epochs, self.server_lr)
