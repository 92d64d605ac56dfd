"""FLAYER: Chen, Yang, Ren, Li, Wang: Optimizing Personalized Federated Learning through Adaptive
Layer-Wise Learning. IJCAI 2025.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.configuration.ranges import NonNegativeFloat, PositiveInt
from fl_lightning.configuration.search import LogRange, searched
from fl_lightning.core import Beside, Client, Payload, Phase, Rule, RunContext, Server, Traits
from fl_lightning.methods.base import Method, check_plain_steps
from fl_lightning.methods.common.critical import packed
from fl_lightning.methods.common.layerwise import (
    mean_of_uploaders,
    most_changed,
    own_accuracy,
    phase_by_layer,
)


@dataclass(frozen=True)
class FLAYER(Method):
    """FedAvg by layers: own top layers count by their accuracy, rates differ, and what changes most
    is uploaded.

    Begin: w = a w_i + (1 - a) w^ in the top layers, w^ below; the top layers alone train for an
        epoch; the accuracy of
    that model is the next round's a (0 at first). Then plain steps at rates by layer
    (`layer_rates`), set anew in each epoch. Server: the mean, number by number, of those who
    uploaded it (`most_changed`); else it stays.

    Args:
        layers: top layers that are mixed and trained first. 1: the authors' script (2 tensors).
        top_rate: of the learning rate, for the last layer. 0.2: the authors' code.
        middle_rate: factor on the rates of the layers between the first and the last. 1: the
            authors' code for ResNet and fastText; 20: for its CNN.
    """

    traits = Traits(
        family="mixing",
        judge="before",
        starts="both",
        features=True,
        classes=True,
        statistics=True,
        several=False,
        changes_upload=True,
        client_memory=True,
        newcomers=Rule(
            "global model, top layers mixed with its own by their accuracy and trained; then local "
            "training"
        ),
        sample_use="takes steps of its own",
    )

    layers: PositiveInt = 1
    top_rate: NonNegativeFloat = searched(0.2, LogRange(0.02, 2), "a decade around the authors'")
    middle_rate: NonNegativeFloat = 1.0

    def check(self, run: RunContext) -> None:
        """Its steps are its own, and accuracies are of classes."""
        super().check(run)
        check_plain_steps(run)

    def init_client(self, run: RunContext) -> dict[str, Tensor]:
        """The accuracy a."""
        return {"accuracy": torch.zeros((), dtype=torch.float64)}

    def receive(self, client: Client, payload: Payload) -> Iterator[Phase]:
        """Mix and train the top layers; then score them."""
        own, top = client["model"], client.mask(lambda b: b.above < self.layers)
        mixed = client.columns(lambda b: b.above < self.layers and b.kind == "parameter")
        received, a = client.composed(payload), float(client.memory["accuracy"])
        own.copy_(torch.where(mixed, torch.lerp(received, own, a), received))
        client.scratch["received"] = received
        yield Phase(trains=top, epochs=1, lr=client.lr * self.top_rate, purpose="top layers")
        client.memory["accuracy"] = own_accuracy(client)

    def phases(self, client: Client, payload: Payload) -> Iterator[Phase]:
        """Plain steps at rates by layer."""
        before = client["model"].clone()
        yield phase_by_layer(client, self.top_rate, self.middle_rate)
        client.scratch["kept"] = most_changed(client.layout, client["model"] - before)

    def beside(self) -> dict[str, Beside]:
        """Declares what `upload` adds to the model."""
        return {"kept": Beside("kept", "a bit for each number: whether it was uploaded", None)}

    def upload(self, client: Client, payload: Payload) -> Payload:
        """The numbers that have changed most, elsewhere those received; and which these are, a bit
        each."""
        sent, kept = super().upload(client, payload), client.scratch["kept"]
        sent.vector = torch.where(kept, client["model"], client.scratch["received"])
        sent.extra["kept"] = packed(kept)
        return sent

    def aggregate(self, server: Server) -> None:
        """The mean of those who uploaded a number."""
        old = server["model"]
        super().aggregate(server)
        if server.answered:
            server["model"] = mean_of_uploaders(server, old)
