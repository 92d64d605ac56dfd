"""Simulated attackers, for tests and studies of defences; no part of honest training."""

from dataclasses import dataclass
from typing import Literal

import torch

from fl_lightning.callbacks.base import Transform
from fl_lightning.configuration.config import are_numbers, check
from fl_lightning.configuration.ranges import NonNegativeFloat, UnitInterval
from fl_lightning.core import Client, Payload, RunContext
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.metric import NO_TARGET
from fl_lightning.foundation.rng import numpy_rng


@dataclass
class Attack(Transform):
    """A SIMULATION of malicious clients. Name it before all callbacks that change uploads.

    Args:
        kind: the attack. With w the client's trained model and s the model that the server
            subtracts from its upload, `sign_flip` uploads s - scale (w - s); `noise` uploads s plus
            Gaussian noise, scale times as long as w - s; `label_flip` trains on the labels C - 1 -
            y of C classes (positions of a text without a target stay) and uploads the result.
        clients: numbers of the attackers.
        share: in place of `clients`: the share of all clients that attack, rounded to whole clients
            and drawn from the seed.
        scale: length of the attack in lengths of the honest change. 1: the same length.
    """

    changes_upload = True

    kind: Literal["label_flip", "sign_flip", "noise"]
    clients: list[int] | None = None
    share: UnitInterval | None = None
    scale: NonNegativeFloat = 1.0
    attackers = frozenset[int]()

    def __post_init__(self) -> None:
        super().__post_init__()
        key = f"{self.config_key}.clients"
        given_once = (self.clients is None) != (self.share is None)
        check(
            key,
            self.clients,
            given_once,
            "give exactly one of clients and share",
        )
        check(
            key,
            self.clients,
            are_numbers(self.clients),
            "it must be a list of client numbers",
        )

    def on_fit_start(self, run: RunContext) -> None:
        """Choose the attackers; with `label_flip`, flip the labels of their training data."""
        key = self.config_key
        flips = self.kind == "label_flip"
        sends = any(g.up_mask.any() for g in run.groups)
        requirement = f"{run.method_name} uploads no model to attack; use label_flip"
        check(
            f"{key}.kind",
            self.kind,
            sends or flips,
            requirement,
        )
        for callback in run.callbacks[: run.callbacks.index(self)]:
            if isinstance(callback, Transform) and callback.changes_upload:
                name = type(callback).__name__.lower()
                requirement = f"it must be named before {name}, which changes all uploads"
                raise BadInput(key, ..., requirement)
        self.attackers = self._drawn(run) if self.clients is None else frozenset(self.clients)
        exist = all(0 <= c < run.clients for c in self.attackers)
        check(
            f"{key}.clients",
            self.clients,
            exist,
            f"they must lie in [0, {run.clients - 1}]",
        )
        if flips:
            has_classes = run.data.task == "classification"
            requirement = "a regression has no classes to flip; use sign_flip or noise"
            check(
                f"{key}.kind",
                self.kind,
                has_classes,
                requirement,
            )
            last = run.data.num_classes - 1
            for client in self.attackers:
                run.data.relabel(client, lambda y: torch.where(y == NO_TARGET, y, last - y))

    def _drawn(self, run: RunContext) -> frozenset[int]:
        """Draw `share` of all clients from the seed."""
        share = self.share or 0.0
        count = round(share * run.clients)
        requirement = f"it rounds to no attacker; give 0, or more than {0.5 / run.clients:g}"
        check(
            f"{self.config_key}.share",
            share,
            count > 0 or share == 0,
            requirement,
        )
        draws = numpy_rng(run.config.seed, "attackers")
        return frozenset(draws.choice(run.clients, count, replace=False).tolist())

    def on_upload(
        self,
        client: Client,
        payload: Payload,
    ) -> None:
        """Replace an attacker's upload by the malicious model; with `label_flip` do nothing."""
        if client.id not in self.attackers or self.kind == "label_flip":
            return
        reference = client.reference
        change = payload.vector - reference
        if self.kind == "noise":
            travelling = [change[s.columns] for s in payload.layout.segments(payload.sent)]
            if not travelling:
                return
            draws = client.generator("attack")
            noise = torch.randn(change.shape, generator=draws, dtype=torch.float64).to(change)
            # the sign is turned back below
            change = -noise * torch.cat(travelling).square().mean().sqrt()
        payload.vector = reference - self.scale * change
