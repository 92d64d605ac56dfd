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
    """FedAvg whose clients start from their own elementwise mix of the global model and their last
    local model.

    The mix is w^ = w_i + (w - w_i) W in the top layers and w^ = w below. The weights W <- clip(W -
    eta grad f(w^) (w - w_i), 0, 1) are learned on a part of the client's data. From w^ training
    goes on as in FedAvg. Scored: w^, before that training.

    Args:
        eta: step size of W. 1: the authors' code.
        share: share of the client's data on which W is learned in a round. 0.8: the authors' code.
        layers: number of layers next to the output that are mixed. 1: the authors' code, whose 2
            counts tensors: weight and bias.
        threshold: in a client's second round, passes over the data learn W until the standard
            deviation of the last passes' losses is below this. 0.1: the authors' code.
        window: number of last passes whose losses `threshold` is compared with. 10: the authors'
            code.
        looks_at: which loss of a pass is compared with `threshold`: the `mean` over the pass's
            batches (our choice), or that of its `last` batch (the authors' code).
        most: greatest number of passes in a client's second round; in later rounds there is one
            pass. 50: our choice, the authors' code has no bound.
    """

    traits = Traits(
        family="mixing",
        judge="before",
        starts="both",
        newcomers=Rule("global model, mixed elementwise with its own; then local training"),
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
        """Raise `BadInput` if losses are scaled, since the steps on W are the method's own."""
        check_no_scaling(run)

    def slots(self) -> dict[str, Slot]:
        """The mixing weights W; 1, which means the global model, at first."""
        return {"blend": Slot("ones")}

    def receive(self, client: Client, payload: Payload) -> Phases:
        """Learn W, except in the client's first round, which has no last model; then start from the
        mix."""
        model = client["model"]
        blend = client["blend"]
        received = client.composed(payload)
        top = client.columns(lambda block: block.above < self.layers)

        def mix() -> Tensor:
            # exact for W 0 and 1
            return torch.where(top, torch.lerp(model, received, blend), received)

        def step(_: Client, batch: Batch) -> Tensor:
            loss, gradient = client.gradient(mix(), batch)
            blend.sub_(self.eta * gradient * (received - model)).clamp_(0, 1)
            batch_losses.append(loss)
            return loss

        losses: list[float] = []
        batch_losses: list[Tensor] = []
        # no pass in the client's first round, up to `most` in its second, then one
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
