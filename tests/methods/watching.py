"""What the tests of methods share: to watch a federation, and to ask its parts outside of a
round."""

import pytest
import torch

from fl_lightning.callbacks.base import Observer, Transform
from fl_lightning.core import Client, Payload, Server
from fl_lightning.engine.phases import job_of

Nets = pytest.mark.parametrize("net", ["plain", "norm"])
"""On a network without and one with BatchNorm."""


class Watch(Transform, Observer):
    """Keeps copies of what every client received, and of its model after each of its rounds."""

    def __init__(self):
        self.models = []
        self.downloads = []

    def on_download(self, client, payload):
        self.downloads.append((client.id, payload.vector.clone(), payload.sent.copy()))

    def on_client_end(self, run, client):
        self.models.append((client, run.states[client].vectors["model"].clone()))


def run_all(fed):
    """Run all rounds."""
    for t in range(1, fed.run.rounds + 1):
        fed.round(t)
    return fed


def trained(make, method, **changes):
    """Every client's model after each of its rounds."""
    watch = Watch()
    run_all(make(method, callbacks=[watch], **changes))
    return [model for _, model in watch.models]


def same(a, b):
    """Bit for bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def models(fed):
    """Every client's own model, of those that have taken part."""
    return [fed.run.states[c].vectors["model"] for c in sorted(fed.run.states)]


def global_model(fed):
    """The server's."""
    return fed.run.groups[0].vectors["model"]


def module_of(fed):
    """What the clients of the first group are bound to."""
    return fed.worker.trainers[0].module


def client_of(fed, id, t=1):
    """A client in round `t`, as its method sees it."""
    return Client(fed.run, fed.run.group_of(id), id, t, fed.pool.state(id))


def server_of(fed, cohort=None):
    """The server of the round that comes next."""
    everyone = list(range(fed.run.clients))
    return Server(
        fed.run, fed.run.server.round + 1, everyone if cohort is None else cohort, fed.reducer
    )


def payload_of(client, vector=None):
    """`vector` (None: the initial model) as the server sends it."""
    return Payload(
        client.layout,
        client.group.initial if vector is None else vector,
        client.group.down_mask.copy(),
    )


def train(fed, client, phase):
    """Let `client` train through one phase."""
    fed.worker.trainers[0].loop.train([job_of(client, phase, client.round - 1)])
