"""FedAMP: Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized Cross-Silo Federated Learning on
Non-IID Data. AAAI 2021.
"""

from dataclasses import dataclass
from typing import Literal

from fl_lightning.callbacks.relations import Attention
from fl_lightning.configuration.config import FLOAT32
from fl_lightning.methods import (
    Client,
    LogRange,
    NonNegativeFloat,
    OwnStatistics,
    Payload,
    Phase,
    Phases,
    PositiveFloat,
    Relation,
    Traits,
    check,
    searched,
)


@dataclass(frozen=True)
class FedAMP(OwnStatistics):
    """Every client has a proximal term towards its own mix of all models, in which similar models
    weigh more.

    In client i's mix u, the model of another client j has the weight (alpha / sigma) exp(-||w_i -
    w_j||^2 / sigma), and the client's own model has the rest.

    Args:
        lam: weight of the proximal term (lam / (2 alpha)) ||w - u||^2; 0 is local training. (With
            sigma null, alpha and lam have no unit.)
        alpha: step size of the server's mixing (the paper's message passing); with sigma null, in
            units of sigma. 0.05: with ten clients a client's own weight stays above one half.
        sigma: scale of squared distances between models; null: the round's mean squared distance.
            (With the sigma = 1 of popular code every weight underflows and FedAMP is local
            training.)
        sources: clients whose models are mixed. `known`: the cohort and all that have ever uploaded
            (paper). `cohort`: the cohort alone. `uploaded`: as `known`, but the model of a client
            that has not uploaded yet, which is the initial one, counts in its own mix only.
    """

    traits = Traits(family="mixing", judge="after", starts="own")

    lam: NonNegativeFloat = searched(0.05, LogRange(0.005, 0.5), "a decade around the default")
    alpha: PositiveFloat = 0.05
    sigma: PositiveFloat | None = None
    sources: Literal["cohort", "known", "uploaded"] = "known"

    def __post_init__(self) -> None:
        super().__post_init__()
        is_finite = self.lam / (2 * self.alpha) < FLOAT32
        check(
            "method.lam",
            self.lam,
            is_finite,
            "lam / (2 alpha) is too large for float32; lower lam or raise alpha",
        )

    def relation(self) -> Relation:
        """Return the attention weights by distance between models."""
        return Attention(self.alpha, self.sigma, self.sources)

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return one phase from the client's own model, with a proximal term of weight lam / (2
        alpha) towards its mix."""
        return [Phase(objective=client.proximal(payload, self.lam / (2 * self.alpha)))]
