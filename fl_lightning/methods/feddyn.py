"""FedDyn: Acar, Zhao, Matas, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic Regularization.

ICLR 2021, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from fl_lightning.core import Client, Payload, Phase, Server, Slot
from fl_lightning.methods.base import PlainMean
from fl_lightning.ranges import PositiveFloat
from fl_lightning.search import LogRange, searched


@dataclass(frozen=True)
class FedDyn(PlainMean):
    """FedAvg with a dynamic regulariser on local losses: f(w) - <g_i, w> + alpha/2 ||w - w_global||^2.

    After training g_i <- g_i - alpha (w_i - w_global). Server: h <- h - alpha / N sum of the cohort's w_i - w_global,
    w = mean of w_i - h / alpha. Means are plain. Running statistics are the plain mean.

    Args:
        alpha: 0.01: the best of the paper's {0.1, 0.01, 0.001} in most of its settings.
    """

    family = "one global model"
    several = False

    alpha: PositiveFloat = searched(0.01, LogRange(0.001, 0.1), "the paper's grid: 0.001, 0.01, 0.1")

    def slots(self) -> dict[str, Slot]:
        """The gradient g_i."""
        return {"gradient": Slot("zeros")}

    def phases(self, client: Client, payload: Payload) -> Iterable[Phase]:
        """Steps down the bent loss; then g_i."""
        columns = client.layout.parameters
        received = client["model"][columns].clone()
        yield Phase(objective=replace(client.proximal(payload, self.alpha / 2), linear=-client["gradient"]))
        client["gradient"][columns] -= self.alpha * (client["model"][columns] - received)

    def aggregate(self, server: Server) -> None:
        """w = mean - h / alpha; `correction` is h / alpha."""
        if not server.answered:
            return
        columns, old = server.only.layout.parameters, server["model"]
        super().aggregate(server)
        new = server["model"]
        h = server["correction"].clone() if "correction" in server.only else torch.zeros_like(new)
        h[columns] -= len(server.answered) / server.clients * (new[columns] - old[columns])
        new[columns] -= h[columns]
        server["correction"] = h
        server.flops += 4 * (columns.stop - columns.start)
