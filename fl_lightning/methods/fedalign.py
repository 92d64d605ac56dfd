"""FedAlign: Mendieta, Yang, Wang, Lee, Ding, Chen: Local Learning Matters: Rethinking Data
Heterogeneity in Federated Learning. CVPR 2022.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fl_lightning.configuration.ranges import NonNegativeFloat, PositiveShare
from fl_lightning.configuration.search import LogRange, searched
from fl_lightning.core import (
    Batch,
    Client,
    Module,
    Objective,
    Payload,
    Phase,
    PureLoss,
    RunContext,
    Tensors,
    Traits,
)
from fl_lightning.methods.base import Method
from fl_lightning.methods.common.lipschitz import check_block, last_block, stretch_gap, watched


@dataclass(frozen=True)
class FedAlign(Method):
    """FedAvg whose local loss draws the Lipschitz constant of a slimmed last block to the whole
    block's.

    Local loss: CE + mu (CE / L, held constant) L with L = MSE(k_slim, k), k the spectral norm of a
    b^T / (H W) of a block's input a and output b. The slim block is the block's first channels, on
    the first channels of its own input; neither that nor k, of the whole block, has a gradient.

    Args:
        mu: weight of the term, whose value is mu times CE; 0 is FedAvg. 0.45: paper.
        width: share of the channels that are left. 0.25: paper.
        block: dotted name of the block; null: the network's last own module before the classifier
            (ResNet: `layer4`).
    """

    traits = Traits(
        family="one global model",
        sample_use="has a loss of its own, and single samples are bounded in the task loss alone",
    )
    mu: NonNegativeFloat = searched(0.45, LogRange(0.05, 4), "a decade around the paper's")
    width: PositiveShare = 0.25
    block: str | None = None

    def check(self, run: RunContext) -> None:
        """Of the block's channels a part must do."""
        super().check(run)
        for group in run.groups if self.mu else ():
            self._try_block(run, group.module)

    def phases(self, client: Client, payload: Payload) -> Iterable[Phase]:
        """Down the task loss and the term."""
        if not self.mu:
            return [Phase()]
        forward = _FLOPS.get(client.module.model)
        if forward is None:  # at a site of a deployment, where nothing has been checked
            forward = self._try_block(client.run, client.module)
        return [Phase(objective=Objective(loss=PureLoss(self.loss, flops=3 * forward)))]

    def loss(self, _: Tensors, module: Module, batch: Batch) -> Tensor:
        """The task loss and the term, shape ()."""
        name = self._block(module)
        block = module.model.get_submodule(name)
        with watched(block) as seen:
            task = module.task_loss(batch)
        gap = stretch_gap(block, *seen[-1], self.width, name)
        return task + self.mu * (task / gap.clamp_min(1e-30)).detach() * gap

    def _block(self, module: Module) -> str:
        return self.block or last_block(module.model, module.layout.head)

    def _try_block(self, run: RunContext, module: Module) -> float:
        """Note and return the term's operations for a sample; raises `BadInput` where the block
        will not do."""
        x = torch.zeros(2, *run.data.input_shape, device=run.device, dtype=run.dtype)
        _FLOPS[module.model] = check_block(module.model, self._block(module), x, self.width)
        return _FLOPS[module.model]


_FLOPS: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()
"""Of the term, forward, for a sample: by the model of a run."""
