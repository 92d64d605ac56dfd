"""What happens on one client in a phase of training: its local steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.core.phase import Batch, Fit
from fl_lightning.data import Part
from fl_lightning.device import seed
from fl_lightning.training.module import ClientModule
from fl_lightning.training.optimizers import FastSGD, LocalOptimizer, step_sizes
from fl_lightning.training.schedule import BatchSchedule, batches, order_key

OTHER_DRAWS = 0x5DEECE66D
"""Sets the seed of a step's dropout and the like apart from that of its epoch's order. Any number does; a second key
would take as long as a small model's forward pass."""

Step = Callable[[Batch, int], Tensor]
"""The loss (shape ()) of a batch and its number in the epoch."""


def train(
    fabric: Fabric,
    module: ClientModule,
    part: Part,
    optimizer: LocalOptimizer,
    schedule: BatchSchedule,
    own: Step | None = None,
) -> Fit:
    """Train the bound client on the batches of `part` in `schedule`: down its loss, or by an `own` step.

    An own step writes to what it trains by itself, and returns the loss that is recorded.
    """
    module.model.train()
    alone = own is None and isinstance(optimizer, FastSGD)  # it adds the terms' gradients itself
    step = own or (module.loss_alone if alone else module.training_step)
    device = fabric.device
    cast = autocast(fabric)
    last = module.last
    losses: list[Tensor] = []
    pulls: list[Tensor] = []
    samples = 0
    for epoch, first, count in schedule.pieces(len(part)):
        drawn = order_key(schedule, epoch)
        for k, batch in enumerate(batches(part, schedule, epoch, first, count, drawn), first):
            seed(drawn ^ OTHER_DRAWS ^ k, device)  # every step: it may be the first of its stretch
            last.pull, last.batch_idx = None, k
            with cast():
                loss = step(batch, k)
            if alone:
                loss = _descend(module, optimizer, loss)
            elif own is None:
                optimizer.step(loss)
            losses.append(loss.detach())
            samples += len(batch[1])
            if last.pull is not None:
                pulls.append(last.pull)
    nothing = torch.zeros((), device=device)
    mean = torch.stack(losses).mean() if losses else nothing
    pull = torch.stack(pulls).sum() / len(losses) if pulls else nothing
    return Fit(mean, pull, len(losses), samples, step_sizes(optimizer.config, optimizer.lr, len(losses)))


def _descend(module: ClientModule, optimizer: LocalOptimizer, loss: Tensor) -> Tensor:
    """A step down `loss` and the objective's terms: their sum before it, shape ()."""
    coaching = module.coaching_alone()
    if coaching is None:
        optimizer.step(loss)
        return loss
    assert isinstance(optimizer, FastSGD)
    module.last.pull, gradients = coaching
    optimizer.step(loss, gradients)
    return loss.detach() + module.last.pull


def autocast(fabric: Fabric) -> Callable[[], AbstractContextManager[Any]]:
    """Fabric's autocast, or nothing where the precision casts nothing (entering it costs more than a small step)."""
    return nullcontext if fabric.strategy.precision.precision in ("32-true", "64-true") else fabric.autocast
