"""FedU: Dinh, Vu, Tran, Dao, Zhang: A New Look and Convergence Rate of Federated Multitask Learning
With Laplacian Regularization. IEEE TNNLS 2022 (arXiv:2102.07148).
"""

from dataclasses import dataclass
from typing import Literal

from fl_lightning.callbacks.graphs import Laplacian
from fl_lightning.methods import (
    LogRange,
    NonNegativeFloat,
    OwnStatistics,
    Relation,
    Traits,
    searched,
)


@dataclass(frozen=True)
class FedU(OwnStatistics):
    """Every client starts from its last model, moved towards its neighbours': w_k - gamma sum_l
    a_kl (w_k - w_l).

    The sum runs over the round's clients, and all moves use the same last models. (In older
    versions of the authors' code later clients saw neighbours that had been moved; in the last one
    the sum is commented out, and it trains locally.) Scored: the model from which a client starts.

    Args:
        gamma: size of the step. 0.02: our choice; with ten clients about 0.9 of a client's model
            stays its own. (In the paper gamma is the product of learning rate, local steps and the
            regulariser's weight. The authors' code has half of this product: 0.00075 on MNIST,
            which hardly differs from local training.)
        graph: a_kl: `random`, the authors' code on MNIST, or `complete`, all 1.
    """

    traits = Traits(family="mixing", judge="before")

    gamma: NonNegativeFloat = searched(
        0.02, LogRange(0.00075, 0.1), "from the code's; beyond, ten clients overshoot"
    )
    graph: Literal["random", "complete"] = "random"

    def relation(self) -> Relation:
        """Return the weights of a step down the graph's Laplacian."""
        return Laplacian(self.gamma, self.graph)
