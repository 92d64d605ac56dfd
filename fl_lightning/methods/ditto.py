"""Ditto: Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization.
ICML 2021."""

from dataclasses import dataclass

from torch import Tensor

from fl_lightning.methods import (
    Client,
    LogRange,
    Method,
    NonNegativeFloat,
    Payload,
    Phase,
    Phases,
    Slot,
    Traits,
    searched,
)


@dataclass(frozen=True)
class Ditto(Method):
    """FedAvg, plus a personal model for each client with a proximal term towards the received
    global model.

    A client trains w as in FedAvg, and v <- v - lr (grad f(v) + lam (v - w_received)) on the same
    batches. Scored: v.

    Args:
        lam: weight of (lam/2) ||v - w||^2; 0 is local training. 1: the middle of the authors' 0.1,
            1 and 2.
        personal_epochs: epochs of the personal model; null: as many as the local model's (the
            authors' code).
    """

    traits = Traits(family="two models", judge="after")

    lam: NonNegativeFloat = searched(1.0, LogRange(0.1, 2), "the authors' 0.1, 1 and 2")
    personal_epochs: NonNegativeFloat | None = None

    def slots(self) -> dict[str, Slot]:
        """The personal model v."""
        return {"personal": Slot()}

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return two phases: the received model on the task loss, then the personal model with its
        proximal term."""
        return [
            Phase(),
            Phase("personal", client.proximal(payload, self.lam / 2), epochs=self.personal_epochs),
        ]

    def private_phases(self) -> tuple[float | None, ...]:
        """Return the epochs of both phases, for DP-SGD."""
        return None, self.personal_epochs

    def personal(self, client: Client) -> Tensor:
        return client["personal"]
