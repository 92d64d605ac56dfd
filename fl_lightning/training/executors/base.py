"""Executors train clients of the same architecture, one after the other (`loop`) or several in one
pass (`vmap`).

All executors use the same batches in the same order and the same random numbers; their results
differ by rounding.
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
"""Largest difference of gradients that counts as rounding, relative to 1 + their norm."""


def equal_but_rounding(gradients: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether each gradient equals the expected one within `TOLERANCE`."""
    for gradient, target in zip(gradients, expected, strict=True):
        limit = TOLERANCE[target.dtype] * (1 + target.norm())
        if (gradient - target).norm() > limit:
            return False
    return True


@dataclass
class LocalJob:
    """The training of one client in one phase, as an executor gets it."""

    vector: Tensor
    """The model (D,), trained in place."""
    buffers: list[Tensor]
    """The model's other buffers, updated in place."""
    part: Part
    schedule: BatchSchedule
    lr: float
    objective: Objective = PLAIN
    trains: np.ndarray | None = None
    """Bool [B]: mask of the blocks that train; None: all. The others get no gradient, weight decay
    or momentum."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """The optimiser's state before the training; with `keep`, a copy of its state afterwards."""
    keep: bool = False
    """Whether to keep the optimiser's state."""
    step: Step | None = None
    """The method's own step (`Phase.step`), which writes to the trained vectors itself; None: the
    optimiser's step."""
    asker: Client | None = None
    """The client whose `gradient` the step calls, with `Phase.by_gradient`; else None."""
    outcome: Fit | Exception | None = None
    """Result of a job whose own steps (`Phase.step` with `by_gradient`) have run together with
    other clients' steps: its fit, or the error that ended it. None: the job has not run so."""
    place: int = 0
    """The client's position in the stack of models that train in one pass: its position among the
    clients of the cohort, on all ranks, that train together. It is unique and below `at_once`.
    Rounding may depend on it."""
    proximal_numbers: int = 0
    """Number of parameters in the proximal term, set by the training."""
    passes: tuple[float, float] | None = None
    """Number of samples in forward and in backward passes, set by the training if the method's own
    loss or step ran in stacked passes."""
    private: Private | None = None
    """How steps are protected (`optimizer.privacy`); None: they are not."""

    @property
    def own(self) -> bool:
        """Whether the job has the method's own loss or step in place of the task loss or the
        optimiser's step."""
        return self.step is not None or self.objective.loss is not None

    @property
    def pure(self) -> PureLoss | None:
        """The method's own loss, if it is a `PureLoss`."""
        loss = self.objective.loss
        if isinstance(loss, PureLoss):
            return loss
        return None

    @property
    def alone(self) -> bool:
        """Whether the job cannot train in `Stack`: the method has its own step or a loss that is no
        `PureLoss`, or steps are protected by DP-SGD (`private`)."""
        is_impure = self.objective.loss is not self.pure
        return self.step is not None or self.private is not None or is_impure


@dataclass(frozen=True)
class ScoreJob:
    """A model to be scored on one part of the data."""

    vector: Tensor
    """The model (D,)."""
    buffers: list[Tensor]
    part: Part


class Scored(NamedTuple):
    """A model's score on one part."""

    total: Tensor
    """Shape (): the sum of the run's metric over the samples, such as the number of correct
    predictions."""
    classes: Tensor | None
    """The predicted class of each sample; None if samples have no single class."""


@dataclass(frozen=True)
class ExecutorSpec:
    """Properties of a run that executors need, equal on every rank."""

    config: OptimizerConfig
    input_shape: tuple[int, ...]
    num_classes: int
    dtype: torch.dtype
    """The type of the vectors."""
    batch_size: int
    train_sizes: Sequence[int]
    """Number of training samples of each client with this architecture."""
    cohort: int
    """Largest number of these clients in a round."""
    whole_last: bool
    """See `BatchSchedule.whole_last`."""
    text: Text | None = None
    """The description of text data; None: samples are no tokens."""
    weighted: bool = False
    """Whether classes have weights in the task loss (`data.balance`)."""

    @property
    def largest_batch(self) -> int:
        """Number of samples in the largest batch of any client."""
        return min(self.batch_size, max(self.train_sizes))


@dataclass(eq=False)
class Executor(ABC):
    """Trains clients of one architecture with the rank's module and optimiser."""

    fabric: Fabric
    module: ClientModule
    optimizer: LocalOptimizer
    name: ClassVar[Name] = "loop"
    at_once = 1
    """Largest number of jobs in a call of `train`."""

    def can_train(self, job: LocalJob) -> bool:
        """Whether the executor can train this job; otherwise the loop trains it."""
        return True

    def can_score(self, part: Part) -> bool:
        """Whether the executor can score models on this part."""
        return False

    def score(self, jobs: Sequence[ScoreJob]) -> list[Scored]:
        """Score each model; call it only if `can_score` returns True."""
        raise NotImplementedError

    @abstractmethod
    def train(self, jobs: Sequence[LocalJob]) -> list[Fit]:
        """Train each job's client. Afterwards the module may be bound to any vector.

        If one job fails, the call raises its error. By then, own steps of some jobs may have run;
        these jobs have their result in `LocalJob.outcome`, and the vectors of all other jobs have
        not changed. The caller may then train each job alone: a job with an outcome does not train
        again, but returns its fit or raises its error.
        """


class Loop(Executor):
    """Trains clients one after the other, bound to the module."""

    def train(self, jobs: Sequence[LocalJob]) -> list[Fit]:
        """Train one job after the other."""
        return [self._train(job) for job in jobs]

    def _train(self, job: LocalJob) -> Fit:
        module = self.module
        optimizer = self.optimizer
        module.binding.rebind(job.vector, job.buffers)  # scoring may have bound it already
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
                f"a loss of {module.method} does not support class weights: set sampler or null"
            )
            check("data.balance", "weights", weighed, requirement)
        finally:
            module.weights = None
            module.train_only(None)
            module.step_state.end()
        return fit
