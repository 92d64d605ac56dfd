"""The batches of a stretch of local training: a function of (seed, purpose, client, absolute
epoch)."""

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
    """How long a stretch of local training is: in epochs over the client's own data, or in steps.
    One of the two."""

    epochs: float | None = None
    """A part of an epoch is that share of its batches, rounded, and at least one of them."""
    steps: int | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"a length is in epochs or in steps, not {self}")

    def steps_of(self, per_epoch: int) -> int:
        """Steps of a client that has `per_epoch` batches."""
        if self.steps is not None:
            if per_epoch:
                return self.steps
            return 0
        if self.epochs and per_epoch:
            return max(1, round(self.epochs * per_epoch))
        return 0

    @classmethod
    def of(cls, federation: FederationConfig) -> Length:
        """The length of a round's training in the configuration."""
        return cls(federation.local_epochs, federation.local_steps)

    def at_most(self, steps: int) -> Length:
        """Not more than `steps` steps, where it counts in steps."""
        if self.steps is None:
            return self
        return Length(steps=min(steps, self.steps))


@dataclass(frozen=True)
class BatchSchedule:
    """The batches of one stretch of local training. Stretches of equal length follow each other
    without a gap.

    The steps of a client are counted through all of its stretches and epochs: the batch of step s
    depends on seed, purpose, client and s alone, however the steps are cut into stretches.
    """

    seed: int
    purpose: str
    client: int
    index: int
    """Stretches of this length before it."""
    length: Length
    batch_size: int
    whole_last: bool
    """A lone last sample joins the batch before it: BatchNorm cannot take one sample."""
    most_batches: int | None = None
    """Batches of an epoch at most (`--smoke`)."""
    budget: float | None = None
    """Epochs that the client may train in all; None: as many as it is asked for."""
    before: int = 0
    """Stretches of this length that the client itself has trained before."""

    def steps_per_epoch(self, samples: int) -> int:
        """Batches of an epoch over so many samples."""
        count = len(batch_sizes(samples, self.batch_size, self.whole_last))
        if self.most_batches is None:
            return count
        return min(count, self.most_batches)

    def pieces(self, samples: int) -> Iterator[tuple[int, int, int]]:
        """(absolute epoch, its first batch, number of batches), in order."""
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
        """(absolute epoch, number of the batch in it) of each step."""
        for epoch, first, count in self.pieces(samples):
            for number in range(first, first + count):
                yield epoch, number


def order_key(schedule: BatchSchedule, epoch: int) -> int:
    """Seed for the order of an absolute epoch's samples."""
    return key(schedule.seed, schedule.purpose + " order", schedule.client, epoch)


def order_keys(epochs: Sequence[tuple[BatchSchedule, int]]) -> list[int]:
    """`order_key` of many epochs."""
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
    """`count` batches of an absolute epoch from its batch `first` on; `seed`: its `order_key`, if
    the caller has it."""
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
    """All batches of the stretch."""
    for epoch, first, count in schedule.pieces(len(part)):
        yield from batches(
            part,
            schedule,
            epoch,
            first,
            count,
        )


@dataclass
class Last:
    """Facts about the current training step. No attributes of the module: setting one takes longer
    than adding up a small model's loss."""

    coaching: Tensor | None = None
    """The coaching term (detached), None where there is none."""
    batch_idx: int = 0
    """The number of its batch in the epoch; 0 outside of training."""
    epoch: int | None = None
    """Epochs of local training before it, those of earlier rounds included; None: no local step is
    taken."""
    per_epoch: int = 1
    """Batches of an epoch of the client."""
    per_round: int = 1
    """Steps of the client in a round."""
    rounds: int = 1
    """Of the run."""
    read: str | None = None
    """The last of these numbers that a model has read, by its name, such as `self.global_step`;
    None: it has read none."""
    lines: set[str] = field(default_factory=set)
    """Lines that have been printed."""

    def at(
        self,
        epoch: int,
        per_epoch: int,
        per_round: int,
    ) -> None:
        """Begin local steps of this epoch."""
        self.epoch = epoch
        self.per_epoch = per_epoch
        self.per_round = per_round

    def outside(self) -> None:
        """End local steps."""
        self.batch_idx = 0
        self.epoch = None

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Within, a first local step is being tried."""
        self.at(0, 1, 1)
        try:
            yield
        finally:
            self.outside()

    def say(self, line: str) -> None:
        """Print a line, once."""
        if line not in self.lines:
            self.lines.add(line)
            log.say(line)
