"""FedAlign: Mendieta, Yang, Wang, Lee, Ding, Chen: Local Learning Matters: Rethinking Data Heterogeneity in Federated
Learning. CVPR 2022.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fl_lightning.core import Batch, Client, Module, Objective, Payload, Phase, RunContext
from fl_lightning.methods.base import Method
from fl_lightning.methods.common.lipschitz import check_block, last_block, stretch_gap, watched
from fl_lightning.ranges import NonNegativeFloat, PositiveShare
from fl_lightning.search import LogRange, searched


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
    mu: NonNegativeFloat = searched(0.45, LogRange(0.05, 4), "a decade around the paper's")
    width: PositiveShare = 0.25
    block: str | None = None

    def check(self, run: RunContext) -> None:
        """Of the block's channels a part must do."""
        super().check(run)
        for model, head in [(g.module.model, g.layout.head) for g in run.groups if self.mu]:
            x = torch.zeros(2, *run.data.input_shape, device=run.device, dtype=run.dtype)
            check_block(model, self.block or last_block(model, head), x, self.width)

    def phases(self, client: Client, payload: Payload) -> Iterable[Phase]:
        """Down the task loss and the term."""
        name = self.block or last_block(client.module.model, client.layout.head)
        block, cost = client.module.model.get_submodule(name), [0.0]
        """Of the term: operations for a sample, counted on the first batch."""

        def loss(module: Module, batch: Batch) -> Tensor:
            with watched(block) as seen:
                task: Tensor = module.task_loss(batch)
            counter = nullcontext() if cost[0] else FlopCounterMode(display=False)
            with counter:
                gap = stretch_gap(block, *seen[-1], self.width, name)
            if isinstance(counter, FlopCounterMode):
                cost[0] = 3 * counter.get_total_flops() / len(batch[1])  # there and back
            client.flops += cost[0] * len(batch[1])
            return task + self.mu * (task / gap.clamp_min(1e-30)).detach() * gap

        return [Phase(objective=Objective(loss=loss))] if self.mu else [Phase()]
