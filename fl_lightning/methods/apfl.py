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
    """FedAvg, plus a personal model v for each client; a learned mixture of v and the local model w
    is scored.

    The mixture is alpha v + (1 - alpha) w. One step, with g the gradient of the loss at the
    mixture: w <- w - lr grad f(w), v <- v - lr alpha g, alpha <- alpha - lr <v - w, g>, clipped to
    [0, 1]. All three use the same batch and the values before the step.

    Args:
        alpha: initial weight of v. 0.5: the authors' code.
        adaptive: whether each client learns its alpha, in every step as in the paper. (The authors'
            code learns it in the first step of a round, and only on request.)
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
        """The mixture's weight `alpha`, a scalar tensor in the client's memory."""
        return {"alpha": torch.tensor(self.alpha, dtype=torch.float64)}

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return one phase that takes `step` on each batch."""
        return [Phase(step=self.step, by_gradient=True)]

    def step(self, client: Client, batch: Batch) -> Tensor:
        """Take one step of w, v and alpha; return the task loss at w before the step, shape ()."""
        w = client["model"]
        v = client["personal"]
        mixture = self.personal(client)
        alpha = float(client.memory["alpha"])
        end = client.layout.parameters.stop
        loss, gradient = client.gradient(w, batch)
        _, mixture_gradient = client.gradient(mixture, batch)
        slope = float((v - w) @ mixture_gradient)
        w.add_(gradient, alpha=-client.lr)
        v.add_(mixture_gradient, alpha=-client.lr * alpha)
        v[end:] = mixture[end:]
        if self.adaptive:
            new_alpha = torch.tensor(alpha - client.lr * slope, dtype=torch.float64)
            client.memory["alpha"] = new_alpha.clamp(0, 1)
        return loss

    def personal(self, client: Client) -> Tensor:
        """Return the mixture alpha v + (1 - alpha) w, (D,).

        Its parameters equal w's bit for bit if alpha is 0, and v's if alpha is 1. Its running
        statistics are those of the mixture's own forward passes, which `step` stores in v's vector.
        """
        mixture = client["personal"].clone()
        columns = client.layout.parameters
        w = client["model"][columns]
        mixture[columns] = torch.lerp(w, mixture[columns], float(client.memory["alpha"]))
        return mixture
