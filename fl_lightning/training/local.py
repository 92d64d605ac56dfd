"""What happens on one client in a phase of training: its local steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.configuration.config import OptimizerConfig
from fl_lightning.core.phase import Batch, Fit
from fl_lightning.data import Part
from fl_lightning.foundation.device import seed, seed_all
from fl_lightning.foundation.errors import BadInput
from fl_lightning.privacy.steps import Private, clipped_sum, noised, sampled
from fl_lightning.training.module import ClientModule, Skipped
from fl_lightning.training.optimizers import LocalOptimizer, step_sizes
from fl_lightning.training.schedule import BatchSchedule, batches, order_key

OTHER_DRAWS = 0x5DEECE66D
"""Sets the seed of a step's dropout and the like apart from that of its epoch's order. Any number
does; a second key would take as long as a small model's forward pass."""

Step = Callable[[Batch], Tensor]
"""The loss (shape ()) of a batch."""


def train(
    fabric: Fabric,
    module: ClientModule,
    part: Part,
    optimizer: LocalOptimizer,
    schedule: BatchSchedule,
    own: Step | None = None,
) -> Fit:
    """Train the bound client on the batches of `part` in `schedule`: down its loss, or by an `own`
    step.

    An own step writes to what it trains by itself, and returns the loss that is recorded.
    """
    module.model.train()
    draws = module.draws or own is not None or module.objective.loss is not None
    device = fabric.device
    cast = autocast(fabric)
    last = module.last
    losses: list[Tensor] = []
    terms: list[Tensor] = []
    samples = 0
    per_epoch = schedule.steps_per_epoch(len(part))
    for epoch, first, count in schedule.pieces(len(part)):
        last.at(epoch, per_epoch, schedule.length.steps_of(per_epoch))
        drawn = order_key(schedule, epoch)
        if draws:  # Python's generator, which goes on from step to step
            random.seed(drawn ^ OTHER_DRAWS ^ first)
        for k, batch in enumerate(batches(part, schedule, epoch, first, count, drawn), first):
            if draws:  # every step: it may be the first of its stretch
                seed(drawn ^ OTHER_DRAWS ^ k, device)
            last.coaching, last.batch_idx = None, k
            try:
                with cast():
                    loss = module.training_step(batch, k) if own is None else own(batch)
            except Skipped:
                if own is not None:
                    raise
                name = type(module.model).__name__
                last.say(
                    f"model: the training_step of {name} returned None: no step is taken for such "
                    f"a batch"
                )
                continue
            if own is None:
                loss = _descend(module, optimizer, loss)
            losses.append(loss.detach())
            samples += len(batch[1])
            if last.coaching is not None:
                terms.append(last.coaching)
    return fit_of(optimizer.config, optimizer.lr, losses, terms, samples, device)


def train_private(
    fabric: Fabric,
    module: ClientModule,
    part: Part,
    optimizer: LocalOptimizer,
    schedule: BatchSchedule,
    private: Private,
) -> Fit:
    """As `local.train`, on Poisson samples of `part` and down noisy sums of clipped gradients over
    the batch's expected size. The objective's terms look at no sample, and are added as they
    are."""
    module.model.train()
    expected = min(schedule.batch_size, len(part))
    losses, terms, samples = list[Tensor](), list[Tensor](), 0
    per_epoch = schedule.steps_per_epoch(len(part))
    taken = schedule.steps(len(part))  # as many as with batches in order
    for step, (epoch, k) in enumerate(taken, private.first):
        module.last.at(epoch, per_epoch, schedule.length.steps_of(per_epoch))
        module.last.batch_idx = k
        batch = sampled(part, schedule.batch_size, private.draws("batch", step))
        draws = private.draws("noise", step)
        # dropout
        seed_all(
            int(torch.randint(2**62, (), generator=private.draws("model", step))), fabric.device
        )
        trained = [p for p in module.binding.parameters if p.requires_grad]
        sums, loss = [torch.zeros_like(p) for p in trained], torch.zeros((), device=fabric.device)
        if batch is not None:
            sums, loss = clipped_sum(module, batch, private.clip)
            samples += len(batch[1])
        mean = iter(g / expected for g in noised(sums, private.noise * private.clip, draws))
        coaching = module.coaching()
        if coaching is not None:
            terms.append(coaching[0])
            loss = loss + coaching[0]
        more: list[Tensor | None] = [
            next(mean) if p.requires_grad else None for p in optimizer.parameters
        ]
        if coaching is not None:
            more = [
                g if g is None or c is None else g + c
                for g, c in zip(more, coaching[1], strict=True)
            ]
        optimizer.step(loss, more)
        losses.append(loss)
    return fit_of(optimizer.config, optimizer.lr, losses, terms, samples, fabric.device)


def fit_of(
    config: OptimizerConfig,
    lr: float,
    losses: list[Tensor],
    terms: list[Tensor],
    samples: int,
    device: torch.device,
) -> Fit:
    """What steps at the rate `lr` with these losses and terms came to."""
    nothing, steps = torch.zeros((), device=device), len(losses)
    mean = torch.stack(losses).mean() if losses else nothing
    coaching = torch.stack(terms).sum() / steps if terms else nothing
    return Fit(mean, coaching, steps, samples, step_sizes(config, lr, steps))


def _descend(module: ClientModule, optimizer: LocalOptimizer, loss: Tensor) -> Tensor:
    """A step down `loss` and the objective's terms: their sum before it, shape ()."""
    coaching = module.coaching()
    if coaching is None:
        if module.own_step and not loss.requires_grad:
            allowed = (
                "its training_step returned a loss of no parameter that trains; to pass a batch "
                "over, return None"
            )
            raise BadInput("model", type(module.model).__name__, allowed)
        optimizer.step(loss)
        return loss
    module.last.coaching, gradients = coaching
    optimizer.step(loss, gradients)
    return loss.detach() + module.last.coaching


def autocast(fabric: Fabric) -> Callable[[], AbstractContextManager[Any]]:
    """Fabric's autocast, or nothing where the precision casts nothing (entering it costs more than
    a small step)."""
    return (
        nullcontext
        if fabric.strategy.precision.precision in ("32-true", "64-true")
        else fabric.autocast
    )
