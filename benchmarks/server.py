"""The server's step for N models of ResNet-18's size, against the bare products that it needs."""

from __future__ import annotations

import math
import time
from typing import Any, Literal

import torch
from measure import PeakMemory, device_clock, interleaved
from torch import Tensor, nn
from workloads import launched

from fl_lightning.core.layout import Layout, Segment
from fl_lightning.core.mixing import Mixer
from fl_lightning.core.relation import RelationInputs
from fl_lightning.foundation.parallel import RankGroup
from fl_lightning.methods.kapc import KAPC
from fl_lightning.models import head_of
from fl_lightning.models.resnet18 import ResNet18

Solver = Literal["step", "exact"]


class Server:
    """Holds N made-up models near each other, and a vector for what each client receives."""

    def __init__(
        self, model: nn.Module, clients: int, solver: Solver, accelerator: str = "cpu"
    ) -> None:
        method = KAPC(solver=solver, start="server" if solver == "exact" else "own")
        fabric = launched(accelerator)
        self.group = RankGroup(fabric)
        model = model.to(fabric.device)
        layout = Layout(model, head_of(model))
        shared = layout.mask(lambda block: method.scope(block) == "shared")
        self.segments: list[Segment] = layout.segments(shared, by_layer=True)
        self.layers = len(layout.layers)
        initial, _ = layout.read(model)
        noise = torch.randn(
            layout.size,
            generator=torch.Generator().manual_seed(0),
        )
        noise = noise.to(initial.device) * (initial.abs().mean() * 0.01)
        self.models = initial.new_empty(clients, layout.size)
        for client, vector in enumerate(self.models):
            torch.add(initial, noise.roll(7919 * client), out=vector)
        self.received = torch.full_like(self.models, 0.0)  # fill_ takes its memory now
        self.clients = list(range(clients))
        self.relation = method.relation()
        cube = torch.full(
            (clients, self.layers, clients),
            1 / clients,
            dtype=torch.float64,
        )
        self.memory = {"relation": cube}

    def step(self) -> None:
        """Gram, relation and mix, as the engine does them."""
        count = len(self.clients)
        vectors = dict(zip(self.clients, self.models, strict=True))
        mixer = Mixer(
            self.group,
            [0] * count,
            vectors,
            self.clients,
        )
        inputs = RelationInputs(
            self.clients,
            self.clients,
            torch.full((count,), 100.0, dtype=torch.float64),
            self.layers,
            count,
            self.memory,
            lambda: mixer.gram(self.segments, self.layers),
        )
        weights = self.relation.weights(inputs)
        received = dict(zip(self.clients, self.received, strict=True))
        mixer.mix(self.segments, weights, self.clients, received)

    def products(self) -> None:
        """W W^T and A W of every layer, uncentred: no relation could be learned from them."""
        count = len(self.clients)
        gram = self.models.new_zeros(self.layers, count, count)
        weights = self.models.new_full((count, count), 1 / count)
        for segment in self.segments:
            columns = slice(segment.start, segment.stop)
            layer: Tensor = self.models[:, columns]
            gram[segment.layer] += layer @ layer.T
            torch.mm(weights, layer, out=self.received[:, columns])


def measured(
    clients: int,
    solver: Solver,
    pairs: int,
    accelerator: str = "cpu",
    limit: float = math.inf,
    model: nn.Module | None = None,
) -> dict[str, Any]:
    """Return seconds of both (CPU time on a CPU, wall time elsewhere), and the step's MiB.

    Memory is counted beyond models and outputs. No turn begins after `limit` seconds.
    """
    server = Server(
        model or ResNet18(10, (3, 32, 32)),
        clients,
        solver,
        accelerator,
    )
    device = server.group.device
    clock = time.process_time if device.type == "cpu" else device_clock(device)
    server.step()  # loads libraries
    memory = PeakMemory(device)
    memory.reset()
    server.step()
    extra_mib = memory.extra_mib()
    sides = {"step": server.step, "products": server.products}
    return {"seconds": interleaved(sides, pairs, clock, limit), "extra_mib": extra_mib}
