"""Schedules the batches of a phase of local training as a function of (seed, purpose, client,
absolute epoch), where absolute epochs count through all rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fl_lightning.configuration.config import FederationConfig
from fl_lightning.core import Batch
from fl_lightning.data import Part
from fl_lightning.data.sampling import batch_sizes
from fl_lightning.foundation import log
from fl_lightning.foundation.rng import generator, key, keys


@dataclass(frozen=True)
class Length:
    """The length of a phase of local training: either epochs over the client's data or steps."""

    epochs: float | None = None
    """May be a fraction; the number of batches is rounded, and at least one."""
    steps: int | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"a length is in epochs or in steps, not {self}")

    def steps_of(self, per_epoch: int) -> int:
        """Return the number of steps for a client with `per_epoch` batches in an epoch."""
        if self.steps is not None:
            if per_epoch:
                return self.steps
            return 0
        if self.epochs and per_epoch:
            return max(1, round(self.epochs * per_epoch))
        return 0

    @classmethod
    def configured(cls, federation: FederationConfig) -> Length:
        """Return the length of a round's training in the configuration."""
        return cls(federation.local_epochs, federation.local_steps)

    def at_most(self, steps: int) -> Length:
        """Return this length with at most so many `steps`. A length in epochs stays as it is: it is
        limited by `BatchSchedule.most_batches`, the number of batches in an epoch."""
        if self.steps is None:
            return self
        return Length(steps=min(steps, self.steps))


@dataclass(frozen=True)
class BatchSchedule:
    """The schedule of the batches of one phase of local training.

    A client's steps are counted through all of its phases and epochs, so that a phase continues
    where the last one ended. The batch of step s depends on seed, purpose, client and s alone, not
    on the division of steps into phases.
    """

    seed: int
    purpose: str
    client: int
    index: int
    """Number of earlier phases of this length."""
    length: Length
    batch_size: int
    whole_last: bool
    """Whether a last batch of a single sample is joined to the one before: BatchNorm cannot train
    on one sample."""
    most_batches: int | None = None
    """Upper limit of the batches of an epoch (`--smoke`, `fl-train plan`); None: no limit."""
    budget: float | None = None
    """Number of epochs that the client may train in all rounds; None: no limit."""
    before: int = 0
    """Number of phases of this length that the client has trained before, which count towards its
    `budget`."""

    def steps_per_epoch(self, samples: int) -> int:
        """Return the number of batches of an epoch over this number of samples."""
        count = len(batch_sizes(samples, self.batch_size, self.whole_last))
        if self.most_batches is None:
            return count
        return min(count, self.most_batches)

    def pieces(self, samples: int) -> Iterator[tuple[int, int, int]]:
        """Divide the phase at the ends of epochs; yields for each piece (absolute epoch, number of
        its first batch in this epoch, number of batches).

        Args:
            samples: number of training samples.
        """
        per_epoch = self.steps_per_epoch(samples)
        count = self.length.steps_of(per_epoch)
        step = self.index * count
        stop = (self.index + 1) * count
        if self.budget is not None:
            rest = round(self.budget * per_epoch) - self.before * count
            stop = step + max(0, min(count, rest))
        while step < stop:
            epoch, first = divmod(step, per_epoch)
            number = min(per_epoch - first, stop - step)
            yield epoch, first, number
            step += number

    def steps(self, samples: int) -> Iterator[tuple[int, int]]:
        """Yield for each step of the phase (absolute epoch, number of the batch in this epoch).

        Args:
            samples: number of training samples.
        """
        for epoch, first, count in self.pieces(samples):
            for number in range(first, first + count):
                yield epoch, number


def order_key(schedule: BatchSchedule, epoch: int) -> int:
    """Return the seed for the order of samples in an absolute epoch."""
    return key(schedule.seed, schedule.purpose + " order", schedule.client, epoch)


def order_keys(epochs: Sequence[tuple[BatchSchedule, int]]) -> list[int]:
    """Return the `order_key` of each epoch; to compute them together is faster.

    Args:
        epochs: schedule and absolute epoch of each.
    """
    parts = []
    for schedule, epoch in epochs:
        purpose = schedule.purpose + " order"
        parts.append((schedule.seed, purpose, schedule.client, epoch))
    return keys(parts)


def batches(
    part: Part,
    schedule: BatchSchedule,
    epoch: int,
    first: int,
    count: int,
    seed: int | None = None,
) -> Iterator[Batch]:
    """Return `count` batches of an absolute epoch, from batch `first` on.

    Args:
        seed: the epoch's `order_key`; None: it is computed.
    """
    if seed is None:
        seed = order_key(schedule, epoch)
    order = torch.Generator().manual_seed(seed)
    augment = None
    if part.augmented:
        augment = generator(schedule.seed, schedule.purpose + " augment", schedule.client, epoch)
    chosen = slice(first, first + count)
    return iter(
        part.batches(
            schedule.batch_size,
            order,
            augment,
            schedule.whole_last,
            chosen,
        )
    )


def stream(part: Part, schedule: BatchSchedule) -> Iterator[Batch]:
    """Yield all batches of a phase."""
    for epoch, first, count in schedule.pieces(len(part)):
        yield from batches(
            part,
            schedule,
            epoch,
            first,
            count,
        )


@dataclass
class StepState:
    """The state of the current local step: its position in the training, which a user's
    LightningModule may read, and the value of the objective's terms."""

    # not attributes of the module, as setting one takes longer than a small model's loss
    coaching: Tensor | None = None
    """Value of the objective's terms (detached); None: there are none."""
    batch_idx: int = 0
    """Number of the batch in its epoch; 0 outside of training."""
    epoch: int | None = None
    """Number of earlier epochs of local training in all rounds; None outside of training."""
    per_epoch: int = 1
    """Number of the client's batches in an epoch."""
    per_round: int = 1
    """Number of the client's steps in a round."""
    rounds: int = 1
    """Number of the run's rounds."""
    read: str | None = None
    """Name of the number that the model has read last, such as `self.global_step`; None: it has
    read none."""
    lines: set[str] = field(default_factory=set)
    """Lines that have been logged."""

    def begin_epoch(
        self,
        epoch: int,
        per_epoch: int,
        per_round: int,
    ) -> None:
        """Set the attributes `epoch`, `per_epoch` and `per_round` before the local steps of an
        epoch."""
        self.epoch = epoch
        self.per_epoch = per_epoch
        self.per_round = per_round

    def end(self) -> None:
        """Reset `epoch` and `batch_idx` after the local steps of a phase."""
        self.batch_idx = 0
        self.epoch = None

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Return a context in which a user's model reads the numbers of epochs and steps that it
        would read in the first local step of a client, to try a step outside of training."""
        self.begin_epoch(0, 1, 1)
        try:
            yield
        finally:
            self.end()

    def log_once(self, line: str) -> None:
        """Log a line unless it has been logged before."""
        if line not in self.lines:
            self.lines.add(line)
            log.say(line)
