"""What the tests of methods share: to watch a federation, and to ask its parts outside of a
round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callbacks.base import Observer, Transform
from fl_lightning.core import Client, Payload, Phase, RunContext, Server
from fl_lightning.engine.federation import Federation
from fl_lightning.engine.phases import job_of
from fl_lightning.methods import Method
from fl_lightning.training.module import ClientModule

Make = Callable[..., Federation]


class Watch(Transform, Observer):
    """Keeps copies of what every client received, and of its model after each of its rounds."""

    def __init__(self) -> None:
        self.models: list[tuple[int, Tensor]] = []
        self.downloads: list[tuple[int, Tensor, np.ndarray]] = []

    def on_download(self, client: Client, payload: Payload) -> None:
        self.downloads.append((client.id, payload.vector.clone(), payload.sent.copy()))

    def on_client_end(self, run: RunContext, client: int) -> None:
        self.models.append((client, run.states[client].vectors["model"].clone()))


def run_all(fed: Federation) -> Federation:
    """Run all rounds."""
    for t in range(1, fed.run.rounds + 1):
        fed.round(t)
    return fed


def trained(make: Make, method: Method, **changes: Any) -> list[Tensor]:
    """Every client's model after each of its rounds."""
    watch = Watch()
    run_all(make(method, callbacks=[watch], **changes))
    return [model for _, model in watch.models]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bit for bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def models(fed: Federation) -> list[Tensor]:
    """Every client's own model, of those that have taken part."""
    return [fed.run.states[c].vectors["model"] for c in sorted(fed.run.states)]


def global_model(fed: Federation) -> Tensor:
    """The server's."""
    return fed.run.groups[0].vectors["model"]


def module_of(fed: Federation) -> ClientModule:
    """What the clients of the first group are bound to."""
    return fed.worker.trainers[0].module


def client_of(fed: Federation, id: int, t: int = 1) -> Client:
    """A client in round `t`, as its method sees it."""
    return Client(fed.run, fed.run.group_of(id), id, t, fed.pool.state(id))


def server_of(fed: Federation, cohort: list[int] | None = None) -> Server:
    """The server of the round that comes next."""
    everyone = list(range(fed.run.clients))
    return Server(
        fed.run, fed.run.server.round + 1, everyone if cohort is None else cohort, fed.reducer
    )


def payload_of(client: Client, vector: Tensor | None = None) -> Payload:
    """`vector` (None: the initial model) as the server sends it."""
    return Payload(
        client.layout,
        client.group.initial if vector is None else vector,
        client.group.down_mask.copy(),
    )


def train(fed: Federation, client: Client, phase: Phase) -> None:
    """Let `client` train through one phase."""
    fed.worker.trainers[0].loop.train([job_of(client, phase, client.round - 1)])
