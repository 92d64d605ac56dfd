"""FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous
Networks.

MLSys 2020.
"""

from dataclasses import dataclass

from fl_lightning.methods import (
    Client,
    LogRange,
    Method,
    NonNegativeFloat,
    Payload,
    Phase,
    Phases,
    Traits,
    searched,
)


@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg whose local loss has a proximal term towards the round's global model.

    Args:
        mu: weight of (mu/2) ||w - w_global||^2; 0 is FedAvg. 0.01 lies inside the authors' grid
            {0.001, ..., 1}.
    """

    traits = Traits(family="one global model")

    mu: NonNegativeFloat = searched(
        0.01, LogRange(0.001, 1), "the authors' grid: 0.001, 0.01, 0.1, 0.5, 1"
    )

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return one phase with a proximal term of weight mu/2."""
        return [Phase(objective=client.proximal(payload, self.mu / 2))]
