"""HeurFedAMP: Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized Cross-Silo Federated Learning
on Non-IID Data. AAAI 2021.
"""

from dataclasses import dataclass

from fl_lightning.callbacks.graphs import CosineAttention
from fl_lightning.methods import LogRange, PositiveFloat, Range, Relation, UnitInterval, searched
from fl_lightning.methods.fedamp import FedAMP


@dataclass(frozen=True)
class HeurFedAMP(FedAMP):
    """FedAMP with attention by a softmax of cosines between models, and a fixed weight of the
    client's own model.

    u_i = xi_ii w_i + (1 - xi_ii) sum_j softmax_j(sigma cos(w_i, w_j)) w_j over the other clients j.
    lam, alpha and sources are FedAMP's (alpha only as lam / (2 alpha)).

    Args:
        sigma: sharpness of the softmax. 10: our choice; models of ten clients have cosines of 0.6
            to 0.98.
        self_weight: xi_ii. 0.5: our choice (the paper's value is not known): with FedAMP's defaults
            and ten clients, a client's own weight is never below this.
    """

    sigma: PositiveFloat = searched(10.0, LogRange(1, 100), "a decade around the default")
    self_weight: UnitInterval = searched(
        0.5, Range(0.1, 0.9), "from nearly the others alone to nearly oneself"
    )

    def relation(self) -> Relation:
        """Return the attention weights by cosines between models."""
        return CosineAttention(self.self_weight, self.sigma, self.sources)
