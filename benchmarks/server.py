"""The server's step for N models of ResNet-18's size, against the bare matrix products that it
needs."""

from __future__ import annotations

import math
import time
from statistics import median
from typing import Any

import torch
from measure import device_clock, interleaved, peak_memory, ratio
from torch import Tensor, nn
from workloads import launched

from fl_lightning.core.layout import Layout, Segment
from fl_lightning.core.mixing import Mixer
from fl_lightning.core.protocols import RelationInputs
from fl_lightning.foundation.parallel import Group
from fl_lightning.methods.kapc import KAPC
from fl_lightning.models import head_of


class Server:
    """N made-up models near each other, on one rank, and a vector for what each client receives."""

    def __init__(
        self, model: nn.Module, clients: int, method: KAPC, accelerator: str = "cpu"
    ) -> None:
        self.group = Group(fabric := launched(accelerator))
        model = model.to(fabric.device)
        layout = Layout(model, head_of(model))
        mask = layout.mask(lambda block: method.scope(block) == "shared")
        self.segments: list[Segment] = layout.segments(mask, by_layer=True)
        self.layers = len(layout.layers)
        initial, _ = layout.read(model)
        noise = torch.randn(layout.size, generator=torch.Generator().manual_seed(0)).to(
            initial.device
        )
        noise *= initial.abs().mean() * 0.01
        # One contiguous block for both sides: 100 clients twice over would not fit the memory of
        # small machines.
        self.models = initial.new_empty(clients, layout.size)
        for client, vector in enumerate(self.models):
            torch.add(initial, noise.roll(7919 * client), out=vector)
        self.received = torch.empty_like(self.models).fill_(0.0)  # its memory is taken now
        self.clients = list(range(clients))
        self.relation = method.relation()
        cube = torch.full((clients, self.layers, clients), 1 / clients, dtype=torch.float64)
        self.memory = {"relation": cube}

    def step(self) -> None:
        """Gram, relation and mix, as the engine does them."""
        n = len(self.clients)
        vectors = dict(zip(self.clients, self.models, strict=True))
        mixer = Mixer(self.group, [0] * n, vectors, self.clients)
        samples = torch.full((n,), 100.0, dtype=torch.float64)
        inputs = RelationInputs(
            self.clients,
            self.clients,
            samples,
            self.layers,
            n,
            self.memory,
            lambda: mixer.gram(self.segments, self.layers),
        )
        weights = self.relation.weights(inputs)
        mixer.mix(
            self.segments,
            weights,
            self.clients,
            dict(zip(self.clients, self.received, strict=True)),
        )

    def products(self) -> None:
        """W W^T and A W of every layer, and nothing else: uncentred, so no relation could be
        learned on them."""
        n = len(self.clients)
        gram = self.models.new_zeros(self.layers, n, n)
        weights = self.models.new_full((n, n), 1 / n)
        for s in self.segments:
            layer: Tensor = self.models[:, s.start : s.stop]
            gram[s.layer] += layer @ layer.T
            torch.mm(weights, layer, out=self.received[:, s.start : s.stop])


def measured(
    clients: int,
    solver: str,
    pairs: int,
    accelerator: str = "cpu",
    limit: float = math.inf,
    model: nn.Module | None = None,
) -> dict[str, Any]:
    """Seconds of both (on the CPU of the CPU, elsewhere wall), their ratio, and the memory that a
    step takes beyond models and outputs. No further turn begins after `limit` seconds. `model`:
    instead of ResNet-18.
    """
    from fl_lightning.models.resnet18 import ResNet18

    method = KAPC(solver=solver, start="server" if solver == "exact" else "own")  # type: ignore[arg-type]
    server = Server(model or ResNet18(10, (3, 32, 32)), clients, method, accelerator)
    device = server.group.device
    clock = time.process_time if device.type == "cpu" else device_clock(device)
    memory = peak_memory(device)
    server.step()  # libraries are loaded now
    memory.reset()
    server.step()
    extra = memory.extra_mib()
    seconds = interleaved({"engine": server.step, "products": server.products}, pairs, clock, limit)
    middle, low, high = ratio(seconds["engine"], seconds["products"])
    return {
        "seconds": median(seconds["engine"]),
        "against_seconds": median(seconds["products"]),
        "ratio": middle,
        "low": low,
        "high": high,
        "extra_mib": extra,
    }
