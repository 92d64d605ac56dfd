"""A network with two classifiers on the same features (FedRoD: Chen, Chao, ICLR 2022)."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from fl_lightning.methods.common.basics import check_plain_loss
from fl_lightning.models import head_of


class TwoHeads(nn.Module):
    """A network, and a second classifier `personal` like its own on the same features, zero at
    first.

    Raises:
        BadInput: the network has a training step of its own.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        check_plain_loss(model, "fedrod has a loss for each of two classifiers")
        self.model, self.head = model, f"model.{head_of(model)}"
        self.personal = copy.deepcopy(self.get_submodule(self.head))
        for p in self.personal.parameters():
            nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        """The generic classifier's scores."""
        scores: Tensor = self.model(x)
        return scores
