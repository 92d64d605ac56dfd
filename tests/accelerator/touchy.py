"""A model that a test can make fail on the device; a config names it touchy.Body."""

from __future__ import annotations

from torch import nn


class Body(nn.Module):
    """A classifier whose forward pass begins with `touch`."""

    head = "out"

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(64, 8), nn.Linear(8, 10)

    def touch(self, x):
        return x

    def forward(self, x):
        return self.out(self.body(self.touch(x).flatten(1)).tanh())
