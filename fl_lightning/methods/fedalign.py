"""FedAlign: Mendieta, Yang, Wang, Lee, Ding, Chen: Local Learning Matters: Rethinking Data Heterogeneity in Federated
Learning. CVPR 2022.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fl_lightning.config import check
from fl_lightning.core import Client, Objective, Payload, Phase
from fl_lightning.core.phase import Batch
from fl_lightning.knowledge.lipschitz import last_block, stretch_gap, watched
from fl_lightning.methods.base import LogRange, Method, check_least, searched


@dataclass(frozen=True)
class FedAlign(Method):
    """FedAvg whose clients have a slimmed copy of the last block stretch its input as much as the whole block does.

    Local loss: CE + mu (CE / L, held constant) L with L = MSE(k_slim, k), k the spectral norm of a b^T / (H W) of a
    block's input a and output b. The slim block is the block's first channels, on the first channels of its own input;
    neither that nor k, of the whole block, has a gradient.

    Args:
        mu: weight of the term, whose value is mu times CE; 0 is FedAvg. 0.45: paper.
        width: share of the channels that are left. 0.25: paper.
        block: dotted name of the block; null: the network's last own module before the classifier (ResNet: `layer4`).
    """

    family = "one global model"
    mu: float = searched(0.45, LogRange(0.05, 4), "a decade around the paper's")
    width: float = 0.25
    block: str | None = None

    def __post_init__(self) -> None:
        check_least(self, mu=0)
        check("method.width", self.width, 0 < self.width <= 1, "it must lie in (0, 1]")

    def phases(self, client: Client, payload: Payload) -> Iterable[Phase]:
        """Down the task loss and the term."""
        name = self.block or last_block(client.module.model, client.layout.head)
        blocks = dict(client.module.model.named_modules())
        check("method.block", self.block, name in blocks, "it must name a module of the model")
        cost = [0.0]
        """Of the term: operations for a sample, counted on the first batch."""

        def loss(module: Any, batch: Batch) -> Tensor:
            with watched(blocks[name]) as seen:
                task: Tensor = module.task_loss(batch)
            check("method.block", name, bool(seen), "the model must call it")
            counter = nullcontext() if cost[0] else FlopCounterMode(display=False)
            with counter:
                gap = stretch_gap(blocks[name], *seen[-1], self.width, name)
            if isinstance(counter, FlopCounterMode):
                cost[0] = 3 * counter.get_total_flops() / len(batch[1])  # there and back
            client.flops += cost[0] * len(batch[1])
            return task + self.mu * (task / gap.clamp_min(1e-30)).detach() * gap

        return [Phase(objective=Objective(loss=loss))] if self.mu else [Phase()]
