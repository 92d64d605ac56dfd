"""One client in one round, as methods and transforms see it: its vectors, its memory, its data, and
its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.layout import Block, copy_columns
from fl_lightning.core.module import Batch, Module
from fl_lightning.core.objective import Objective
from fl_lightning.core.payload import Payload
from fl_lightning.core.phase import Fit
from fl_lightning.core.run import ModelGroup, RunContext
from fl_lightning.core.traits import declares, undeclared
from fl_lightning.data.federated import ClientData
from fl_lightning.data.part import Part
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.rng import generator
from fl_lightning.storage.state import MODEL, ClientState


class Client:
    """Valid during the client's visit in `round`, on its home rank; `client["model"]` is its model,
    a vector (D,)."""

    def __init__(
        self, run: RunContext, group: ModelGroup, id: int, round: int, state: ClientState
    ) -> None:
        self.run = run
        self.group = group
        self.id = id
        self.round = round
        self.state = state
        self.layout = group.layout
        self.module = group.module
        self.lr = run.learning_rate(max(round, 1))
        """Learning rate of the round."""
        self.payload: Payload
        """What it has received in this round."""
        self.fits: list[Fit] = []
        """What the phases of this round have come to so far."""
        self.scratch: dict[str, Any] = {}
        """What a hook leaves for a later one of this visit."""
        self.flops = 0.0
        """Operations beside the phases: those that hooks say themselves, and passes of the model,
        which are metered; NaN where they are not known."""
        self.prepared: dict[str, Tensor] = {}
        """What `Method.prepare` has made for the model that is scored."""
        self.gradients: Callable[[Tensor, Batch, bool], tuple[Tensor, Tensor]] | None = None
        """What `gradient` goes by while own steps are taken side by side; None: the bound model."""

    def __getitem__(self, slot: str) -> Tensor:
        return self.state.vectors[slot]

    @property
    def memory(self) -> dict[str, Tensor]:
        """What is kept for it by name (on the CPU), beside its vectors."""
        return self.state.memory

    @property
    def rounds(self) -> int:
        """Rounds it has taken part in before this one.

        Raises:
            BadInput: nothing is kept of clients, and so not that either.
        """
        if not self.run.policy.keeps_clients:
            why = "it asks for a client's rounds, and nothing is kept of clients"
            raise undeclared(self.run.method, "client_memory", why)
        return self.state.rounds

    @property
    def data(self) -> ClientData:
        """Its training, validation and test data."""
        return self.run.data.client(self.id, self.run.device, self.run.dtype)

    @property
    def class_counts(self) -> Tensor:
        """Its training samples by class, as their labels are when it trains (an attacker's are
        flipped): int64 (C,)."""
        return torch.from_numpy(self.run.data.trained_counts(self.id))

    def generator(self, purpose: str) -> torch.Generator:
        """Draws for `purpose`: of (seed, purpose, client, round), whatever the rank and the order
        of clients."""
        return generator(self.run.config.seed, purpose, self.id, self.round)

    def batch(self, draws: torch.Generator) -> Batch:
        """A batch of its training samples drawn by `draws`, as large as those of a phase."""
        part = self.data.train
        size = self.run.config.federation.batch_size
        augment = draws if part.augmented else None
        return next(iter(part.batches(size, draws, augment, self.group.whole_last, slice(0, 1))))

    # ---------------------------------------------------------------- vectors

    def mask(self, holds: Callable[[Block], bool]) -> np.ndarray:
        """Bool [B]: the blocks of the model for which `holds`."""
        return self.layout.mask(holds)

    def columns(self, holds: Callable[[Block], bool]) -> Tensor:
        """Bool (D,): the numbers of the blocks for which `holds`."""
        mask = torch.zeros(self.layout.size, dtype=torch.bool, device=self.run.device)
        for s in self.layout.segments(self.mask(holds)):
            mask[s.start : s.stop] = True
        return mask

    def overwrite(self, payload: Payload, slot: str = MODEL) -> None:
        """Copy the blocks that have been received into an own vector."""
        copy_columns(self[slot], payload.vector, self.layout.segments(payload.sent))

    def composed(self, payload: Payload) -> Tensor:
        """A new vector: the own model with what has been received in its place."""
        return self._over(self[MODEL], payload)

    def _over(self, vector: Tensor, payload: Payload) -> Tensor:
        vector = vector.clone()
        copy_columns(vector, payload.vector, self.layout.segments(payload.sent))
        return vector

    @property
    def reference(self) -> Tensor:
        """The model (D,) that the server counts the client's change from: its last upload, and
        where the client starts from what it has received, that."""
        last = self.state.received[MODEL]
        return last if self.run.method.traits.starts == "own" else self._over(last, self.payload)

    def proximal(
        self, payload: Payload, coefficient: float | Callable[[Block], float]
    ) -> Objective:
        """The task loss + sum_b c_b ||w_b - s_b||^2 over the parameters b that have been received
        (s, constant).

        Args:
            payload: what has been received.
            coefficient: c for all blocks, or of each.
        """
        if not callable(coefficient):
            weight = np.where(payload.sent & self.layout.is_parameter, coefficient, 0.0)
        else:
            of_blocks = [
                coefficient(b) if b.kind == "parameter" else 0.0 for b in self.layout.blocks
            ]
            weight = np.where(payload.sent, np.array(of_blocks), 0.0)
        return Objective(payload.vector, weight) if weight.any() else Objective()

    # ---------------------------------------------------------------- passes through the model

    def bind(self, vector: Tensor | None = None) -> Module:
        """Have the module be `vector` (None: the own model), with the client's buffers; returns the
        module."""
        if self.gradients is not None:  # another client would be bound before this one goes on
            raise BadInput(
                "Phase.by_gradient", True, "its step binds the client's model: leave it False"
            )
        self.module.binding.rebind(self[MODEL] if vector is None else vector, self.state.buffers)
        return self.module

    def ready(self, kind: str, vector: Tensor) -> None:
        """Have the module be `vector`, with what the method prepares to score it as `kind`."""
        self.prepared = self.run.method.prepare(self, vector, kind)
        self.bind(vector)

    @torch.no_grad()
    def passes(
        self, part: Part, vector: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(features, scores, labels) of each batch of `part` in evaluation mode.

        Features are what the classifier sees (batch, d); the method must declare `features`.
        """
        module = self.bind(vector)
        module.model.eval()
        for x, y in part.batches(self.run.config.evaluation.batch_size):
            scores = module.model(x)
            yield module.features, scores, y

    def loss(self, part: Part, vector: Tensor | None = None) -> float:
        """Mean task loss of `vector` (None: the own model) on `part`, in evaluation mode; NaN on an
        empty part."""
        return float(self.bind(vector).mean_loss(part, self.run.config.evaluation.batch_size))

    def gradient(
        self, vector: Tensor, batch: Batch, *, training: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The task loss at `vector` on a batch, shape (), and its gradient (D,), in training mode
        (which writes running statistics) or in evaluation mode (which writes and draws nothing); 0
        where nothing trains."""
        if self.gradients is not None:
            return self.gradients(vector, batch, training)
        module = self.bind(vector)
        module.model.train(training)
        loss, gradient = module.flat_gradient(batch)
        return loss, gradient


def client_memory(run: RunContext) -> dict[str, Tensor]:
    """What the method and transforms keep with every client, with its first values.

    Raises:
        BadInput: one keeps something and does not declare it: it would be lost; or by a name that
            is another's.
    """
    named: dict[str, Tensor] = {}
    for part in (run.method, *run.callbacks):
        init_client = getattr(part, "init_client", None)
        first = {} if init_client is None else init_client(run)
        if first and not declares(part, "client_memory"):
            raise undeclared(part, "client_memory", "its init_client gives tensors")
        for name, tensor in first.items():
            if name in named or name.startswith(("optimizer.", "received.")):
                allowed = "it is another's, or begins with 'optimizer.' or 'received.'"
                raise BadInput(f"{type(part).__name__}.init_client", name, allowed)
            named[name] = tensor.clone()
    return named
