"""Executors train clients of a cohort that share a model, one after the other or many at once.

All executors take the same batches, in the same order, from the same draws; their numbers differ by
rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.configuration.components import Text
from fl_lightning.configuration.config import OptimizerConfig
from fl_lightning.core import PLAIN, Client, Fit, Objective, PureLoss
from fl_lightning.data import Part
from fl_lightning.foundation.errors import check
from fl_lightning.privacy.steps import Private
from fl_lightning.training.local import Step, train, train_private
from fl_lightning.training.module import ClientModule
from fl_lightning.training.optimizers import LocalOptimizer
from fl_lightning.training.schedule import BatchSchedule

Name = Literal["loop", "vmap"]

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.2}
"""How far gradients may differ, relative to 1 + their norm, and still be the same but for
rounding."""


def equal_but_rounding(gradients: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether each of the gradients is the expected one within `TOLERANCE`."""
    for gradient, target in zip(gradients, expected, strict=True):
        limit = TOLERANCE[target.dtype] * (1 + target.norm())
        if (gradient - target).norm() > limit:
            return False
    return True


@dataclass
class LocalJob:
    """One client's local training in a round."""

    vector: Tensor
    """The model (D,), trained in place."""
    buffers: list[Tensor]
    """Its other buffers, trained in place."""
    part: Part
    schedule: BatchSchedule
    lr: float
    objective: Objective = PLAIN
    trains: np.ndarray | None = None
    """Bool [B]: the blocks that train; None: all. The others get no gradient, weight decay or
    momentum."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """State of its optimiser before the training; with `keep` afterwards a copy of the state after
    it."""
    keep: bool = False
    step: Step | None = None
    """An own local step, which writes to the trained vectors itself; None: the optimiser's."""
    asker: Client | None = None
    """The client whose `gradient` the own step calls, if it looks at the model in no other way;
    None: it may look in other ways."""
    outcome: Fit | Exception | None = None
    """Afterwards, where such steps ran side by side: the result of the training."""
    place: int = 0
    """Its place among the clients of the cohort that train at once, wherever they live: below
    `at_once`, no two alike. Kernels may round differently from place to place."""
    proximal_numbers: int = 0
    """Afterwards: how many numbers the proximal term had."""
    passes: tuple[float, float] | None = None
    """Afterwards, where an own loss or step was stacked: how many samples went through the model,
    and how many back."""
    private: Private | None = None
    """How its steps are protected (`optimizer.privacy`); None: they are not."""

    @property
    def own(self) -> bool:
        """Whether it has a loss or a step of its own."""
        return self.step is not None or self.objective.loss is not None

    @property
    def pure(self) -> PureLoss | None:
        """Its own loss, where that depends on tensors alone."""
        loss = self.objective.loss
        if isinstance(loss, PureLoss):
            return loss
        return None

    @property
    def alone(self) -> bool:
        """Whether it cannot be stacked: its steps are its own or private, or its loss depends on
        more than tensors."""
        is_impure = self.objective.loss is not self.pure
        return self.step is not None or self.private is not None or is_impure


@dataclass(frozen=True)
class ScoreJob:
    """A model that is to be scored on one part of the data."""

    vector: Tensor
    """The model (D,)."""
    buffers: list[Tensor]
    part: Part


class Scored(NamedTuple):
    """A model's score on one part."""

    total: Tensor
    """Shape (): the sum of the run's metric over the samples: the number of right answers."""
    classes: Tensor | None
    """The predicted class of each sample; None where a sample is not of one class."""


@dataclass(frozen=True)
class ExecutorSpec:
    """Facts about a run that an executor needs. Nothing in it depends on the rank."""

    config: OptimizerConfig
    input_shape: tuple[int, ...]
    num_classes: int
    dtype: torch.dtype
    """Of the vectors."""
    batch_size: int
    train_sizes: Sequence[int]
    """Training samples of all clients."""
    cohort: int
    """Clients that take part in a round."""
    whole_last: bool
    """As in `BatchSchedule`."""
    text: Text | None = None
    """The text data's description; None: samples are no tokens."""
    weighted: bool = False
    """Classes have weights in the task loss (`data.balance`)."""

    @property
    def largest_batch(self) -> int:
        """Samples in the largest batch that any client has."""
        return min(self.batch_size, max(self.train_sizes))


@dataclass(eq=False)
class Executor(ABC):
    """Trains clients that share a model, with the rank's module and optimiser for it."""

    fabric: Fabric
    module: ClientModule
    optimizer: LocalOptimizer
    name: ClassVar[Name] = "loop"
    at_once = 1
    """How many jobs `train` takes at most."""

    def takes(self, job: LocalJob) -> bool:
        """Whether it can train this job; else the loop does."""
        return True

    def scores(self, part: Part) -> bool:
        """Whether `score` takes models on this part."""
        return False

    def score(self, jobs: Sequence[ScoreJob]) -> list[Scored]:
        """Score each model. Called only where `scores` says so."""
        raise NotImplementedError

    @abstractmethod
    def train(self, jobs: Sequence[LocalJob]) -> list[Fit]:
        """Train each job's client. Afterwards any vector may be bound to the module.

        If an executor for several jobs raises, it has written only to jobs with an `outcome`, and
        does not train these again.
        """


class Loop(Executor):
    """The module, bound to one client after the other."""

    def train(self, jobs: Sequence[LocalJob]) -> list[Fit]:
        """Train one job after the other."""
        return [self._train(job) for job in jobs]

    def _train(self, job: LocalJob) -> Fit:
        module = self.module
        optimizer = self.optimizer
        module.binding.rebind(job.vector, job.buffers)  # a model that was just scored is bound
        module.set_objective(job.objective)
        job.proximal_numbers = module.proximal_numbers
        module.train_only(job.trains)
        module.weights = job.part.class_weights
        module.weighed = False
        arguments = (self.fabric, module, job.part, optimizer, job.schedule)
        try:
            optimizer.reset(job.lr)
            if job.kept:
                optimizer.load(job.kept)
            if job.private is None:
                fit = train(*arguments, job.step)
            else:
                fit = train_private(*arguments, job.private)
            if job.keep:
                state = optimizer.state()
                job.kept = {name: tensor.clone() for name, tensor in state.items()}
            weighed = module.weighed or module.weights is None or not fit.samples
            requirement = (
                f"a loss of {module.method} has no weights for classes: take sampler or null"
            )
            check("data.balance", "weights", weighed, requirement)
        finally:
            module.weights = None
            module.train_only(None)
            module.last.outside()
        return fit
