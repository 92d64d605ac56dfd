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

    Args:
        lam: weight of the pull (lam / (2 alpha)) ||w - u||^2; 0 is local training. (With sigma None
            alpha has no unit, and lam with it.)
        alpha: step of the message passing, in units of sigma while that is None. 0.05: own weight
            stays above one half with ten clients.
        sigma: scale of squared distances between models; None takes the mean squared distance of
            the round. (With the sigma = 1 of popular code every weight underflows and FedAMP is
            local training.)
        sources: whose models are mixed; `known`, everyone who has uploaded and the cohort, is the
            paper's; `cohort`; or `uploaded`: as `known`, but a client that has not uploaded yet
            (its model is the initial one) counts for itself alone.
    """

    traits = Traits(family="mixing", judge="after", starts="own")

    lam: NonNegativeFloat = searched(0.05, LogRange(0.005, 0.5), "a decade around the default")
    alpha: PositiveFloat = 0.05
    sigma: PositiveFloat | None = None
    sources: Literal["cohort", "known", "uploaded"] = "known"

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.lam / (2 * self.alpha) < FLOAT32
        check("method.lam", self.lam, fits, "lam / (2 alpha) must be a number of 32 bits")

    def relation(self) -> Relation:
        """Attention by distance between models."""
        return Attention(self.alpha, self.sigma, self.sources)

    def phases(self, client: Client, payload: Payload) -> Phases:
        """The client keeps its own model; the mix only pulls, by lam / (2 alpha) on every
        parameter."""
        return [Phase(objective=client.proximal(payload, self.lam / (2 * self.alpha)))]
