"""Models that no graph can hold, or that `vmap` cannot stack; a config names them touchy.NAME."""

from __future__ import annotations

import random

import numpy as np
from torch import Tensor, nn


class Body(nn.Module):
    """A classifier whose forward pass begins with `touch`."""

    head = "out"

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(64, 8), nn.Linear(8, 10)

    def touch(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self.touch(x).flatten(1)).tanh())


class Counts(Body):
    """Goes by a number of steps that it keeps."""

    steps_taken = 0

    def touch(self, x: Tensor) -> Tensor:
        self.steps_taken = self.steps_taken + 1
        return x / self.steps_taken


class CountsElsewhere(Body):
    """Goes by a number that it does not keep itself."""

    seen: list[int] = []  # noqa: RUF012

    def touch(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return x * (1 + len(self.seen) % 2)


class Reads(Body):
    """Looks at a number of the device."""

    def touch(self, x: Tensor) -> Tensor:
        return x * 2 if bool(x.mean() > 100) else x


class DrawsInPython(Body):
    """Torch's generators know nothing of it."""

    def touch(self, x: Tensor) -> Tensor:
        return x * random.random()


class DrawsInNumpy(Body):
    """Likewise."""

    def touch(self, x: Tensor) -> Tensor:
        return x * float(np.random.rand())
