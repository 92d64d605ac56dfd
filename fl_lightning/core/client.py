"""The handle through which methods and transforms use a client in one round: its vectors, memory,
data and model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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


@dataclass(eq=False, repr=False)
class Client:
    """Handle on a client, valid during its visit in `round`, on its home rank. `client["model"]` is
    the client's model, a vector (D,)."""

    run: RunContext
    group: ModelGroup
    id: int
    round: int
    state: ClientState
    payload: Payload = field(init=False)
    """The download of this round."""
    fits: list[Fit] = field(default_factory=list)
    """Results of this round's phases so far."""
    scratch: dict[str, Any] = field(default_factory=dict)
    """Values that a hook leaves for a later hook of this visit."""
    flops: float = 0.0
    """FLOPs outside of the phases: passes of the model in hooks, which are counted, and FLOPs that
    hooks add themselves; NaN: unknown."""
    prepared: dict[str, Tensor] = field(default_factory=dict)
    """Tensors from `Method.prepare` for the model that is scored."""
    gradients: Callable[[Tensor, Batch, bool], tuple[Tensor, Tensor]] | None = None
    """Computes `gradient` while the executor runs the own steps (`Phase.step`) of several clients
    together; None: the bound model does."""

    def __post_init__(self) -> None:
        self.layout = self.group.layout
        self.module = self.group.module
        self.lr = self.run.learning_rate(max(self.round, 1))
        """Learning rate of the round."""

    def __getitem__(self, slot: str) -> Tensor:
        return self.state.vectors[slot]

    @property
    def memory(self) -> dict[str, Tensor]:
        """Named tensors that are stored for the client in addition to its vectors, on the CPU."""
        return self.state.memory

    @property
    def rounds(self) -> int:
        """Number of earlier rounds in which the client took part.

        Raises:
            BadInput: the run keeps no client states, and so no counts of rounds.
        """
        if not self.run.policy.keeps_clients:
            reason = "it uses client.rounds, but no client states are kept"
            raise undeclared(self.run.method, "client_memory", reason)
        return self.state.rounds

    @property
    def data(self) -> ClientData:
        """The client's training, validation and test data."""
        run = self.run
        return run.data.client(self.id, run.device, run.dtype)

    @property
    def class_counts(self) -> Tensor:
        """Number of the client's training samples of each class, int64 (C,), by the labels with
        which it trains (an attacker's are flipped)."""
        return torch.from_numpy(self.run.data.trained_counts(self.id))

    def generator(self, purpose: str) -> torch.Generator:
        """Return a generator seeded by (seed, purpose, client, round), independent of ranks and of
        the order of clients."""
        return generator(self.run.config.seed, purpose, self.id, self.round)

    def batch(self, draws: torch.Generator) -> Batch:
        """Draw a batch of the client's training samples, with as many samples as a batch of local
        training."""
        part = self.data.train
        size = self.run.config.federation.batch_size
        augment = None
        if part.augmented:
            augment = draws
        batches = part.batches(
            size,
            draws,
            augment,
            self.group.whole_last,
            slice(0, 1),
        )
        return next(iter(batches))

    # ---------------------------------------------------------------- vectors

    def mask(self, holds: Callable[[Block], bool]) -> np.ndarray:
        """Return the mask, bool [B], of the blocks of the model for which `holds` returns True."""
        return self.layout.mask(holds)

    def columns(self, holds: Callable[[Block], bool]) -> Tensor:
        """Return the mask, bool (D,), of the columns of the blocks for which `holds` returns
        True."""
        layout = self.layout
        mask = torch.zeros(layout.size, dtype=torch.bool, device=self.run.device)
        for segment in layout.segments(self.mask(holds)):
            mask[segment.columns] = True
        return mask

    def overwrite(self, payload: Payload) -> None:
        """Copy the received blocks into the client's model."""
        segments = self.layout.segments(payload.sent)
        copy_columns(self[MODEL], payload.vector, segments)

    def composed(
        self,
        payload: Payload,
        vector: Tensor | None = None,
    ) -> Tensor:
        """Return a copy of `vector` (None: the client's model) with the received blocks in place of
        its own."""
        if vector is None:
            vector = self[MODEL]
        composed = vector.clone()
        segments = self.layout.segments(payload.sent)
        copy_columns(composed, payload.vector, segments)
        return composed

    @property
    def reference(self) -> Tensor:
        """The model (D,) from which the server computes this client's update: the update is the
        upload minus this model.

        The downloaded blocks are those of this round's download, and all other blocks those of the
        client's last upload. If clients start from their own models (`traits.starts="own"`), all
        blocks are those of the last upload.
        """
        last = self.state.received[MODEL]
        if self.run.method.traits.starts == "own":
            return last
        return self.composed(self.payload, last)

    def proximal(
        self, payload: Payload, coefficient: float | Callable[[Block], float]
    ) -> Objective:
        """Return the objective: task loss + sum_b c_b ||w_b - s_b||^2 over the received parameters
        s_b (constant).

        Args:
            payload: the received blocks.
            coefficient: c for all blocks, or a function of the block.
        """
        weight = np.zeros(len(self.layout.blocks))
        for k in np.flatnonzero(payload.sent & self.layout.is_parameter):
            block = self.layout.blocks[k]
            weight[k] = coefficient(block) if callable(coefficient) else coefficient
        if weight.any():
            return Objective(payload.vector, weight)
        return Objective()

    # ---------------------------------------------------------------- passes through the model

    def bind(self, vector: Tensor | None = None) -> Module:
        """Bind the module to a vector and to the client's buffers, so that the module's tensors are
        views of them; returns the module.

        Args:
            vector: (D,); None: the client's model.
        """
        if self.gradients is not None:  # another client's step would bind its model in between
            requirement = (
                "its step uses the client's model otherwise than by client.gradient: leave it False"
            )
            raise BadInput("Phase.by_gradient", True, requirement)
        vector = self[MODEL] if vector is None else vector
        self.module.binding.rebind(vector, self.state.buffers)
        return self.module

    def ready(self, kind: str, vector: Tensor) -> None:
        """Get a model ready for scoring: call `Method.prepare`, then bind the module to the model.

        Args:
            kind: the kind of model, as which it is scored.
            vector: the model (D,).
        """
        self.prepared = self.run.method.prepare(self, vector, kind)
        self.bind(vector)

    @torch.no_grad()
    def passes(
        self, part: Part, vector: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Run a model on each batch of `part` in evaluation mode; yields features (batch, d), which
        are the classifier's input, class scores (batch, classes) and labels (batch,).

        The method must declare the trait `features`.

        Args:
            vector: the model (D,); None: the client's model.
        """
        module = self.bind(vector)
        module.model.eval()
        for x, y in part.batches(self.run.config.evaluation.batch_size):
            scores = module.model(x)
            yield module.features, scores, y

    def loss(self, part: Part, vector: Tensor | None = None) -> float:
        """Return the mean task loss of `vector` (None: the client's model) on `part`, in evaluation
        mode; NaN if the part is empty."""
        module = self.bind(vector)
        size = self.run.config.evaluation.batch_size
        return float(module.mean_loss(part, size))

    def gradient(
        self,
        vector: Tensor,
        batch: Batch,
        *,
        training: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return the task loss at `vector` on a batch, shape (), and its gradient (D,), which is 0
        for blocks that do not train.

        Args:
            training: whether the model is in training mode, which updates running statistics and
                draws random numbers (dropout); in evaluation mode it does neither.
        """
        if self.gradients is not None:
            return self.gradients(vector, batch, training)
        module = self.bind(vector)
        module.model.train(training)
        return module.flat_gradient(batch)


def client_memory(run: RunContext) -> dict[str, Tensor]:
    """Return the initial values, by name, of the tensors that method and transforms keep with every
    client.

    Raises:
        BadInput: a method or transform returns tensors from `init_client` without declaring
            `client_memory`, or under a name that is taken or reserved.
    """
    memory = {}
    for part in (run.method, *run.callbacks):
        init_client = getattr(part, "init_client", None)
        first = init_client(run) if init_client else {}
        if first and not declares(part, "client_memory"):
            raise undeclared(part, "client_memory", "its init_client returns tensors")
        for name, tensor in first.items():
            if name in memory or name.startswith(("optimizer.", "received.")):
                requirement = (
                    "it is taken, or begins with 'optimizer.' or 'received.': choose another name"
                )
                raise BadInput(f"{type(part).__name__}.init_client", name, requirement)
            memory[name] = tensor.clone()
    return memory
