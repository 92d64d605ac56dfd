"""FedAPA's relation: rows of weights that the server steps down a gradient (Sun et al., IJCAI
2025)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.callbacks.relations import Relation
from fl_lightning.core import RelationInputs, RunContext, Server


@dataclass
class SteppedRows(Relation):
    """Each client's own weight is set to 1 and its row divided by the sum; others' weights step
    within [0, 1].

    Args:
        eta: the step.
        momentum: of the step, in a client's own rounds.
    """

    sources = "uploaded"
    fixed = "its rows step on from those that were mixed by, and changes of them would pile up"

    eta: float
    momentum: float

    def init_server(self, run: RunContext) -> dict[str, Tensor]:
        """`weights` (N, N), receivers by sources, at first 0 for others; `weights.moment` (N, N):
        their momentum."""
        zeros = torch.zeros(run.clients, run.clients, dtype=torch.float64)
        return {"weights": zeros, "weights.moment": zeros.clone()}

    def weights(self, inputs: RelationInputs) -> Tensor:
        """Shape (1, m, n)."""
        rows = inputs.memory["weights"][torch.tensor(inputs.receivers)][
            :, torch.tensor(inputs.sources)
        ]
        rows[torch.arange(len(rows)), inputs.places] = 1
        return (rows / rows.sum(1, keepdim=True))[None]

    def descend(self, server: Server, sources: list[int], gradient: Tensor) -> None:
        """A step of the rows of those who have answered down `gradient` (m, n), from what they were
        mixed by."""
        group, memory = server.only, server.memory
        assert group.weighed is not None
        places = [group.weighed.receivers.index(c) for c in server.answered]
        at = (torch.tensor(server.answered)[:, None], torch.tensor(sources))
        memory["weights.moment"][at] = self.momentum * memory["weights.moment"][at] + gradient
        memory["weights"][at] = (
            group.weighed.weights[0, places] - self.eta * memory["weights.moment"][at]
        )
        memory["weights"].clamp_(0, 1)
        server.flops += 4 * gradient.numel()
