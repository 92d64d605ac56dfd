"""Simulated attackers, for tests and studies of what a defence is worth. No part of honest
training."""

from dataclasses import dataclass
from typing import Literal

import torch

from fl_lightning.callbacks.base import Transform, internal
from fl_lightning.configuration.config import are_numbers, check
from fl_lightning.configuration.ranges import NonNegativeFloat, UnitInterval
from fl_lightning.core import Client, Payload, RunContext
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.metric import NO_TARGET
from fl_lightning.foundation.rng import numpy_rng


@dataclass
class Attack(Transform):
    """A SIMULATION of malicious clients. It comes before all callbacks that change what is sent.

    Args:
        kind: `sign_flip` uploads s - scale (w - s), where s is what the server counts the client's
            change from; `noise` uploads s and Gaussian noise of scale times the length of w - s;
            `label_flip` trains on the labels C - 1 - y (positions without a target have none then,
            too), and uploads the result.
        clients: who attacks, by number.
        share: instead of `clients`: this share of all clients, rounded, drawn from the seed.
        scale: how much harder than its honest change an attacker pushes. 1: as much.
    """

    changes_upload = True

    kind: Literal["label_flip", "sign_flip", "noise"]
    clients: list[int] | None = None
    share: UnitInterval | None = None
    scale: NonNegativeFloat = 1.0
    attackers: frozenset[int] = internal(default=frozenset())

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = (self.clients is None) != (self.share is None)
        check(
            "callbacks.attack.clients",
            self.clients,
            valid,
            "either clients or share says who attacks",
        )
        valid = are_numbers(self.clients)
        check(
            "callbacks.attack.clients", self.clients, valid, "it must be a list of client numbers"
        )

    def on_fit_start(self, run: RunContext) -> None:
        """Choose the attackers; with `label_flip`, turn their training labels."""
        sent = any(g.up_mask.any() for g in run.groups)
        requirement = f"{run.method_name} uploads no model: label_flip"
        check("callbacks.attack.kind", self.kind, sent or self.kind == "label_flip", requirement)
        for callback in run.callbacks[: run.callbacks.index(self)]:
            if isinstance(callback, Transform) and callback.changes_upload:
                name = type(callback).__name__.lower()
                raise BadInput(
                    "callbacks.attack",
                    self.kind,
                    f"it must come before {name}, which is no attacker's",
                )
        if self.clients is not None:
            valid = all(0 <= c < run.clients for c in self.clients)
            check(
                "callbacks.attack.clients",
                self.clients,
                valid,
                f"they must lie in [0, {run.clients - 1}]",
            )
            self.attackers = frozenset(self.clients)
        else:
            share = self.share or 0.0
            count = round(share * run.clients)
            requirement = (
                f"of {run.clients} clients that comes to 0: above {0.5 / run.clients:g}, or 0"
            )
            check("callbacks.attack.share", share, count > 0 or share == 0, requirement)
            drawn = numpy_rng(run.config.seed, "attackers").choice(
                run.clients, count, replace=False
            )
            self.attackers = frozenset(int(c) for c in drawn)
        if self.kind == "label_flip":
            valid = run.data.task == "classification"
            check(
                "callbacks.attack.kind",
                self.kind,
                valid,
                "it flips classes, and a regression has none",
            )
            last = run.data.num_classes - 1
            for client in self.attackers:
                run.data.relabel(client, lambda y: torch.where(y == NO_TARGET, y, last - y))

    def on_upload(self, client: Client, payload: Payload) -> None:
        """Upload something else."""
        if client.id not in self.attackers or self.kind == "label_flip":
            return
        reference = client.reference
        change = payload.vector - reference
        if self.kind == "noise":
            sent = [change[s.columns] for s in payload.layout.segments(payload.sent)]
            if not sent:
                return
            draws = client.generator("attack")
            noise = torch.randn(change.shape, generator=draws, dtype=torch.float64).to(change)
            change = -noise * torch.cat(sent).square().mean().sqrt()
        payload.vector = reference - self.scale * change
