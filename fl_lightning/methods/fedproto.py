"""FedProto: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: Federated Prototype Learning across
Heterogeneous Clients.

AAAI 2022.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from fl_lightning.methods import Client, LogRange, NonNegativeFloat, Rule, searched
from fl_lightning.methods.prototypes import Prototypes


@dataclass(frozen=True)
class FedProto(Prototypes):
    """Clients exchange the mean feature of each class, never models, and pull their features
    towards the global means.

    Args:
        lam: weight of the distance. 1: the authors' readme, for MNIST and FEMNIST (0.1 for
            CIFAR-10).
        distance: `means` (paper): the sum over a batch's classes of ||mean feature - prototype||;
            `norm`: the mean over samples of ||feature - prototype||; `squared`: the mean over
            samples and coordinates of the square (the authors' code, to which their lam belongs: on
            the digits it does better, docs/results/switches.md).
        predict: what predicts: the nearest global `prototype` (paper), or the client's own
            `classifier`. Until there are prototypes, the classifier predicts.
        among: classes that may be predicted: `all` with a prototype (paper, as we read it), or the
            client's `own`, of which it has training samples (the authors' code; all, if none of
            these has a prototype).
        weighting: weights of clients in the server's mean of a class: by `samples` of the class
            (paper) or `uniform` (the authors' code).
    """

    traits = replace(
        Prototypes.traits,
        newcomers=Rule("own training, towards the class means of all", gives=False),
    )

    lam: NonNegativeFloat = searched(
        1.0, LogRange(0.05, 10), "FedHKD's 0.05 for it to ten times the authors' 1"
    )
    among: Literal["all", "own"] = "all"
    weighting: Literal["samples", "uniform"] = "samples"

    def candidates(self, client: Client, has_prototype: Tensor) -> Tensor:
        """Return all classes with a prototype, or those of them that the client has samples of."""
        at_client = has_prototype & (client.class_counts > 0)
        return at_client if self.among == "own" and at_client.any() else has_prototype

    @property
    def uniform(self) -> bool:
        return self.weighting == "uniform"
