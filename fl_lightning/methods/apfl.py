"""APFL: Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning. arXiv:2003.13461, 2020."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.methods import (
    Batch,
    Client,
    Payload,
    Phase,
    Phases,
    PlainSteps,
    Range,
    RunContext,
    Slot,
    Tensors,
    Traits,
    UnitInterval,
    searched,
)


@dataclass(frozen=True)
class APFL(PlainSteps):
    """FedAvg, and a personal model v of which a mixture alpha v + (1 - alpha) w with the local
    model w is scored.

    Step, with g the gradient at the mixture: w <- w - lr grad f(w), v <- v - lr alpha g, alpha <-
    alpha - lr <v - w, g>, clipped to [0, 1]; all on the same batch, from the values before the
    step.

    Args:
        alpha: weight of v at first. 0.5: the authors' code.
        adaptive: whether each client learns its alpha, in every step as in the paper (the authors'
            code: in a round's first, and only if it is asked to).
    """

    traits = Traits(
        family="two models", judge="after", client_memory=True, sample_use="takes steps of its own"
    )

    alpha: UnitInterval = searched(
        0.5, Range(0.1, 0.9), "from nearly the local model to nearly the personal one alone"
    )
    adaptive: bool = True

    def slots(self) -> dict[str, Slot]:
        """The personal model v."""
        return {"personal": Slot()}

    def init_client(self, run: RunContext) -> Tensors:
        """`alpha`, shape ()."""
        return {"alpha": torch.tensor(self.alpha, dtype=torch.float64)}

    def phases(self, client: Client, payload: Payload) -> Phases:
        """A step on each batch."""
        return [Phase(step=self.step, by_gradient=True)]

    def step(self, client: Client, batch: Batch) -> Tensor:
        """One step of w, v and alpha; returns the task loss at w, as FedAvg's."""
        w = client["model"]
        v = client["personal"]
        mixture = self.personal(client)
        alpha = float(client.memory["alpha"])
        end = client.layout.parameters.stop
        loss, gradient = client.gradient(w, batch)
        _, of_mixture = client.gradient(mixture, batch)
        slope = float((v - w) @ of_mixture)
        w.add_(gradient, alpha=-client.lr)
        v.add_(of_mixture, alpha=-client.lr * alpha)
        v[end:] = mixture[end:]
        if self.adaptive:
            moved = torch.tensor(alpha - client.lr * slope, dtype=torch.float64)
            client.memory["alpha"] = moved.clamp(0, 1)
        return loss

    def personal(self, client: Client) -> Tensor:
        """The mixture, exact at both ends. Its running statistics are kept with v: those of its own
        passes."""
        mixture = client["personal"].clone()
        columns = client.layout.parameters
        w = client["model"][columns]
        mixture[columns] = torch.lerp(w, mixture[columns], float(client.memory["alpha"]))
        return mixture
