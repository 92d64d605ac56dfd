"""FedALA: Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedALA: Adaptive Local Aggregation for
Personalized Federated Learning. AAAI 2023.
"""

from dataclasses import dataclass
from statistics import pstdev
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.methods import (
    Batch,
    Client,
    LogRange,
    Method,
    NonNegativeFloat,
    Payload,
    Phase,
    Phases,
    PositiveInt,
    PositiveShare,
    Rule,
    RunContext,
    Slot,
    Traits,
    check_no_scaling,
    searched,
)


@dataclass(frozen=True)
class FedALA(Method):
    """FedAvg whose clients begin from their own mix, number by number, of the global and of their
    last model.

    In the top layers w^ = w_i + (w - w_i) W with weights W <- clip(W - eta grad f(w^) (w - w_i), 0,
    1), learned on a part of the client's data; below w^ = w. From w^ training goes as in FedAvg.
    Scored: w^, before it.

    Args:
        eta: step on W. 1: the authors' code.
        share: of the client's data, in batches, on which W is learned in a round. 0.8: the authors'
            code.
        layers: top layers that are mixed. 1: the authors' code, where two tensors are meant.
        threshold: at first W is learned until the losses of the last passes deviate by less. 0.1:
            the authors' code.
        window: so many passes are looked at. 10: the authors' code.
        looks_at: the `mean` loss of a pass (our choice), or that of its `last` batch (the authors'
            code).
        most: passes at most at first; later it is one. 50: our choice, the authors' code has no
            bound.
    """

    traits = Traits(
        family="mixing",
        judge="before",
        starts="both",
        newcomers=Rule("global model, mixed number by number with its own; then local training"),
        sample_use="learns its mix on samples, in steps of its own",
    )

    eta: NonNegativeFloat = searched(1.0, LogRange(0.1, 10), "a decade around the authors'")
    share: PositiveShare = 0.8
    layers: PositiveInt = 1
    threshold: float = 0.1
    window: PositiveInt = 10
    looks_at: Literal["mean", "last"] = "mean"
    most: PositiveInt = 50

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` where losses are scaled: its steps on W are its own."""
        check_no_scaling(run)

    def slots(self) -> dict[str, Slot]:
        """The weights W, 1 at first: the global model."""
        return {"blend": Slot("ones")}

    def receive(self, client: Client, payload: Payload) -> Phases:
        """Learn W (not in the client's first round: there is no last model), then mix."""
        model = client["model"]
        blend = client["blend"]
        received = client.composed(payload)
        top = client.columns(lambda block: block.above < self.layers)

        def mix() -> Tensor:
            # exact where W is 0 or 1
            return torch.where(top, torch.lerp(model, received, blend), received)

        def step(_: Client, batch: Batch) -> Tensor:
            loss, gradient = client.gradient(mix(), batch)
            blend.sub_(self.eta * gradient * (received - model)).clamp_(0, 1)
            batch_losses.append(loss)
            return loss

        losses: list[float] = []
        batch_losses: list[Tensor] = []
        # none in its first round, up to `most` in the second, then one
        passes = {0: 0, 1: self.most}.get(client.rounds, 1)
        for _ in range(passes):
            yield Phase("blend", epochs=self.share, step=step, by_gradient=True, purpose="blend")
            loss = client.fits[-1].loss
            if self.looks_at == "last" and batch_losses:
                loss = batch_losses[-1]
            losses.append(float(loss))
            if len(losses) > self.window and pstdev(losses[-self.window :]) < self.threshold:
                break
        model.copy_(mix())
