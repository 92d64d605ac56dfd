"""Descriptions that a method gives of its clients: their vectors and the phases of local
training."""

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
    """Declares a further vector (D,) of every client, in addition to its `model`.

    Args:
        init: the initial value: the common `initial` model, `zeros` or `ones`.
        exchanged: whether the server keeps the last upload of the vector, and may average or mix
            it.
    """

    init: Literal["initial", "zeros", "ones"] = "initial"
    exchanged: bool = False

    def first(self, initial: Tensor) -> Tensor:
        """Return the value before the client's first round, (D,); copy it before writing."""
        if self.init == "initial":
            return initial
        return torch.full_like(initial, float(self.init == "ones"))


@dataclass(frozen=True, eq=False)
class Phase:
    """One phase of a client's local training.

    Args:
        slot: name of the vector that is trained.
        objective: the objective that is minimised.
        trains: mask of the blocks that train (bool [B]); None: all blocks that are not frozen.
        epochs: number of epochs, possibly a fraction. If `steps` is None, too, the length is that
            of `federation.local_epochs` or `federation.local_steps`.
        steps: number of steps, instead of `epochs`.
        lr: learning rate; None: that of the round.
        part: the data to train on; None: the client's training data. A part that `Part.subset` has
            made of the client's training data is treated like them: its FLOPs count as those of
            training, and the optimiser's state is kept. Any other part is public data.
        targets: tensor (n, ...) that replaces the labels of the client's n training samples, in the
            order in which the samples are stored: soft labels for example, or labels together with
            weights. The method's own loss must understand them. None: the labels.
        batch_size: number of samples in a batch; None: `federation.batch_size`.
        purpose: seeds the order of batches: in a round, phases with the same purpose and length use
            the same batches.
        budget: largest number of epochs that the client may train in phases of this purpose, in all
            rounds together; when they are used up, the phase takes no further steps. None: no
            limit.
        step: replaces the optimiser's step by `step(client, batch) -> loss`, which writes to the
            client's vectors itself; the loss is recorded. Clients then train one after the other
            with any executor, unless `by_gradient`.
        by_gradient: whether `step` uses the model through `client.gradient` alone, and draws random
            numbers from generators of its own only: executors may then run the steps of several
            clients together.
        scores: scores the client's model after the phase, as a model of this kind (such as
            `distilled`); None: the model is not scored.

    Raises:
        BadInput: `scores` is no kind of model, or arguments contradict each other.
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
        requirement = f"no such kind of model: choose one of {', '.join(MODELS)}"
        check("Phase.scores", self.scores, is_kind, requirement)
        has_step = self.step is not None or not self.by_gradient
        requirement = "it has no meaning without `step`: give `step`, or leave it False"
        check("Phase.by_gradient", True, has_step, requirement)
        on_training_data = self.targets is None or self.part is None
        requirement = "they belong to the client's training data: leave `part` None"
        check("Phase.targets", "a tensor", on_training_data, requirement)


Phases = Iterable[Phase]
"""Phases in order. A generator is resumed when the phase that it yielded last has ended."""


@dataclass(frozen=True)
class Fit:
    """The result of a phase. Losses are tensors of shape (), so that nothing waits for the
    device."""

    loss: Tensor
    """Mean over the steps of the loss, including the objective's terms (0 without a step)."""
    coaching: Tensor
    """Mean over the steps of the objective's terms; named after KAPC's, but of any method."""
    steps: int
    samples: int
    """Number of trained samples, in all epochs."""
    step_sizes: float = 0.0
    """How far the phase moves the model if all its gradients are equal, in units of that gradient:
    lr times steps without momentum."""
