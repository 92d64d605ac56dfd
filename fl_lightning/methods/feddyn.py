"""FedDyn: Acar, Zhao, Matas, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic
Regularization.

ICLR 2021, Algorithm 1.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.methods import (
    Client,
    GroupServer,
    LogRange,
    Payload,
    Phase,
    Phases,
    PlainMean,
    PositiveFloat,
    RunContext,
    Server,
    Slot,
    Traits,
    check,
    searched,
    sees_only_the_mean,
)


@dataclass(frozen=True)
class FedDyn(PlainMean):
    """FedAvg with a dynamic regulariser on local losses: f(w) - <g_i, w> + alpha/2 ||w -
    w_global||^2.

    After training, g_i <- g_i - alpha (w_i - w_global). The server sets h <- h - alpha / N sum of
    the cohort's w_i - w_global, and w = mean of w_i - h / alpha. Means are plain, those of running
    statistics too.

    Args:
        alpha: weight of the regulariser. 0.01: the best of the paper's {0.1, 0.01, 0.001} in most
            of its settings.
        alphas: weights alpha of the clients: `equal` (paper), or by `samples`: alpha times the
            clients' mean number of training samples over the client's own number (the authors'
            code).
        scored: model that is scored as the global model: the `server`'s w, which clients receive,
            or the plain `mean` of the round's uploads, without - h / alpha (the authors' code).
    """

    traits = Traits(family="one global model", several=False)

    alpha: PositiveFloat = searched(
        0.01, LogRange(0.001, 0.1), "the paper's grid: 0.001, 0.01, 0.1"
    )
    alphas: Literal["equal", "samples"] = "equal"
    scored: Literal["server", "mean"] = "server"

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` if the mean is scored (`scored`) and the judge scores models before
        local training: clients start from the server's w, never from the mean."""
        check(
            "method.scored",
            self.scored,
            self.scored == "server" or run.judge != "before",
            "evaluation.judge before scores the model from which clients start, which is never the "
            "mean; use scored server, or judge global",
        )

    def slots(self) -> dict[str, Slot]:
        """The gradient g_i, 0 at first."""
        return {"gradient": Slot("zeros")}

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Yield one phase that minimises the regularised loss; then update g_i."""
        columns = client.layout.parameters
        alpha = self.alpha_of(client)
        received = client["model"][columns].clone()
        pull = client.proximal(payload, alpha / 2)
        yield Phase(objective=replace(pull, linear=-client["gradient"]))
        client["gradient"][columns] -= alpha * (client["model"][columns] - received)

    def alpha_of(self, client: Client) -> float:
        if self.alphas == "equal":
            return self.alpha
        sizes = client.run.data.train_sizes
        share = sum(sizes) / len(sizes) / max(len(client.data.train), 1)
        return self.alpha * share

    @sees_only_the_mean
    def aggregate(self, server: Server) -> None:
        """Update h / alpha, stored as `correction`, and w = mean - h / alpha."""
        group = server.only
        columns = group.layout.parameters
        old = group["model"]
        super().aggregate(server)
        new = group["model"]
        if self.scored == "mean":
            group["mean"] = new.clone()
        h = group["correction"].clone() if "correction" in group else torch.zeros_like(new)
        share = len(server.answered) / server.clients
        h[columns] -= share * (new[columns] - old[columns])
        new[columns] -= h[columns]
        group["correction"] = h
        server.flops += 4 * (columns.stop - columns.start)

    def global_model(self, group: GroupServer, client: int) -> Tensor | None:
        """Return the server's w, or with `scored mean` the mean of the last uploads."""
        return group["mean"] if "mean" in group else super().global_model(group, client)
