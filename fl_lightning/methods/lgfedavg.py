"""LG-FedAvg: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act
Globally: Federated Learning with Local and Global Representations. 2020, arXiv:2001.01523.
"""

from dataclasses import dataclass
from typing import Literal

from fl_lightning.methods import (
    Block,
    Method,
    NonNegativeInt,
    Relation,
    Scope,
    Traits,
    Whole,
    mean_relation,
    searched,
)


@dataclass(frozen=True)
class LGFedAvg(Method):
    """FedAvg on the last layers of the model; every client keeps its own layers below them.

    Scored: the client's own layers with the global ones on top, as the authors' code does. That
    code begins from a model that FedAvg has trained; here all clients begin from the common initial
    model.

    Args:
        layers: number of last layers that are global. 2: the authors' script for CIFAR-10 (3 for
            MNIST).
        weighting: weights of clients in the mean: by `samples` (the paper), or `uniform` (the
            authors' code).
    """

    traits = Traits(family="partial sharing", judge="before")

    layers: NonNegativeInt = searched(
        2, Whole(1, 3), "the authors' scripts: 2 and 3; 1 is the classifier alone"
    )
    weighting: Literal["samples", "uniform"] = "samples"

    def relation(self) -> Relation:
        """Return the weights of the mean."""
        return mean_relation(self.weighting)

    def scope(self, block: Block) -> Scope:
        """Share the last layers, with their normalisation."""
        return "shared" if block.above < self.layers else "personal"
