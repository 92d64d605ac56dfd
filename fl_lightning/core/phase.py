"""A method's description of a client: its vectors, and the phases of its local training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.configuration.config import check
from fl_lightning.core.module import Batch as Batch
from fl_lightning.core.objective import Objective
from fl_lightning.data.part import Part
from fl_lightning.foundation.metric import MODELS

PLAIN = Objective()
"""The task loss alone."""

Step = Callable[[Any, Batch], Tensor]
"""(client, batch) -> loss; the type `Client` is defined above this module."""


@dataclass(frozen=True)
class Slot:
    """One model-shaped vector that every client owns, beside its `model`.

    Args:
        init: its first value: the common `initial` model, `zeros` or `ones`.
        exchanged: the server keeps its last upload, and may average or mix it.
    """

    init: Literal["initial", "zeros", "ones"] = "initial"
    exchanged: bool = False

    def first(self, initial: Tensor) -> Tensor:
        """Its value before the client's first round, (D,); to be copied."""
        if self.init == "initial":
            return initial
        return torch.full_like(initial, float(self.init == "ones"))


@dataclass(frozen=True, eq=False)
class Phase:
    """A stretch of local training.

    Args:
        slot: the vector that is trained.
        objective: what is minimised.
        trains: which blocks train (bool [B]); None: all that the model trains.
        epochs: passes over the data, also fractions; None with `steps` None: as the federation's
            configuration says.
        steps: instead of `epochs`.
        lr: learning rate; None: that of the round.
        part: the data; None: the client's training data. A `subset` of these counts as own data,
            too: for operations and for the state that the optimiser keeps.
        targets: (n, ...), in place of the labels of the client's n training samples, in the order
            in which these are stored: soft labels, or labels with weights, for an own loss. None:
            the labels.
        batch_size: of a step; None: the federation's.
        purpose: seeds the order of batches: in a round, phases of one purpose and length take the
            same batches.
        budget: most epochs in phases of this purpose, over all rounds of the client; None: no
            limit.
        step: an own local step `step(client, batch) -> loss`, which writes to the client's vectors
            itself; the loss is recorded. Clients then train one after the other, whatever the
            executor, unless `by_gradient`. None: a step of the optimiser.
        by_gradient: the own step looks at the model through `client.gradient` alone, and draws no
            random numbers but by generators of its own: executors may have many clients take theirs
            side by side.
        scores: a kind of model (`distilled`) as which the client's model is scored after the phase.

    Raises:
        BadInput: there is no such kind of model.
    """

    slot: str = "model"
    objective: Objective = PLAIN
    trains: np.ndarray | None = None
    epochs: float | None = None
    steps: int | None = None
    lr: float | None = None
    part: Part | None = None
    targets: Tensor | None = None
    batch_size: int | None = None
    purpose: str = "train"
    budget: float | None = None
    step: Step | None = None
    by_gradient: bool = False
    scores: str | None = None

    def __post_init__(self) -> None:
        is_kind = self.scores in (None, *MODELS)
        requirement = f"it must be a kind of model: {', '.join(MODELS)}"
        check("Phase.scores", self.scores, is_kind, requirement)
        has_step = self.step is not None or not self.by_gradient
        requirement = "it describes an own step: give `step`, or leave it False"
        check("Phase.by_gradient", True, has_step, requirement)
        on_training_data = self.targets is None or self.part is None
        requirement = "they are of the client's training data: there can be no other part"
        check("Phase.targets", "a tensor", on_training_data, requirement)


Phases = Iterable[Phase]
"""Phases one after the other; a generator goes on when the last one has ended."""


@dataclass(frozen=True)
class Fit:
    """The result of a phase. The losses are tensors of shape (): nothing waits for the device."""

    loss: Tensor
    """Mean over the steps of the loss, with the objective's terms (0 without a step)."""
    coaching: Tensor
    """Mean over the steps of the objective's terms, of any method; named after KAPC's."""
    steps: int
    samples: int
    """Trained samples, in all epochs."""
    step_sizes: float = 0.0
    """Sum of the step sizes with which each gradient moves the model, in all: lr times steps
    without momentum."""
