"""SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning. ICML 2020.
"""

from dataclasses import dataclass

import torch

from fl_lightning.callbacks.base import Aggregator
from fl_lightning.methods import (
    Client,
    LogRange,
    Objective,
    Payload,
    Payloads,
    Phase,
    Phases,
    PlainMean,
    PositiveFloat,
    RunContext,
    Server,
    Slot,
    Traits,
    check,
    check_sgd,
    move_on,
    searched,
)


@dataclass(frozen=True)
class SCAFFOLD(PlainMean):
    """FedAvg whose local gradients are corrected by control variates: w_i <- w_i - lr (g - c_i +
    c).

    After K steps c_i <- c_i - c + (w - w_i) / (K lr) (option II), and c is the mean of all c_i.
    With momentum the divisor is the total length of the steps per unit of gradient: K lr would
    inflate c_i up to 1 / (1 - momentum) times. Means are plain.

    Args:
        server_lr: the server's learning rate on the mean change, eta_g. 1: libraries (no code of
            the authors' is known, and the paper's text was not available); with it the server's
            step is FedAvg's.
    """

    traits = Traits(
        family="one global model", several=False, receives_beside="the mean control variate"
    )

    server_lr: PositiveFloat = searched(1.0, LogRange(0.1, 2), "around the paper's 1")

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` unless the optimiser is SGD without clipping, from whose steps the mean
        gradient follows, and uploads are averaged plainly."""
        check_sgd(run, "scaffold infers the mean gradient from the model's change", clip_norm=None)
        robust = [type(c).__name__.lower() for c in run.callbacks if isinstance(c, Aggregator)]
        check(
            "callbacks",
            ", ".join(robust),
            not robust,
            "scaffold's control variates need plain means; drop the aggregator",
        )

    def slots(self) -> dict[str, Slot]:
        """The control variate c_i, 0 at first. Clients upload the change of c_i in a round, so the
        vector that the server keeps for a client is this change, not c_i."""
        return {"control": Slot("zeros", exchanged=True)}

    def broadcast(self, server: Server) -> Payloads:
        """Send the global model and c."""
        if "control" not in server.only:
            server["control"] = torch.zeros_like(server.only.initial)
        payloads = super().broadcast(server)
        for payload in payloads.values():
            payload.vectors["control"] = server["control"]
        return payloads

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return one phase that minimises f + <c - c_i, w>."""
        return [Phase(objective=Objective(linear=payload.vectors["control"] - client["control"]))]

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Upload the model and the change of c_i, which is 0 in blocks that the client did not
        receive."""
        upload = super().upload(client, payload)
        change = torch.zeros_like(client["control"])
        size = client.fits[-1].step_sizes
        if size:  # otherwise the client has taken no step
            for s in client.layout.segments(payload.sent & client.layout.is_parameter):
                drift = payload.vector[s.columns] - client["model"][s.columns]
                change[s.columns] = drift / size - payload.vectors["control"][s.columns]
        client["control"].add_(change)
        upload.vectors["control"] = change
        return upload

    def aggregate(self, server: Server) -> None:
        """Set w <- w + eta_g mean change, and c <- c + |S| / N mean change of c_i."""
        answered = server.answered
        old = server["model"]
        super().aggregate(server)
        move_on(server.only, old, self.server_lr)
        weights = torch.full((len(answered),), 1 / len(answered), dtype=torch.float64)
        change = server.only.mean(weights, answered, "control")
        server["control"] = server["control"] + len(answered) / server.clients * change
