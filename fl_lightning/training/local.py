"""Runs the local steps of one client in a phase of training."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.configuration.config import OptimizerConfig
from fl_lightning.core import Batch, Fit
from fl_lightning.data import Part
from fl_lightning.foundation.device import seed, seed_all
from fl_lightning.foundation.errors import BadInput
from fl_lightning.privacy.steps import Private, clipped_sum, noised, sampled
from fl_lightning.training.module import ClientModule, Skipped
from fl_lightning.training.optimizers import LocalOptimizer, total_step_length
from fl_lightning.training.schedule import BatchSchedule, batches, order_key

OTHER_DRAWS = 0x5DEECE66D
"""Makes the seed of a step's dropout and other draws differ from that of the epoch's order. Any
number does; a second key would take as long as a small model's forward pass."""

Step = Callable[[Batch], Tensor]
"""Takes a local step on a batch; returns the loss, shape ()."""


def train(
    fabric: Fabric,
    module: ClientModule,
    part: Part,
    optimizer: LocalOptimizer,
    schedule: BatchSchedule,
    step: Step | None = None,
) -> Fit:
    """Train the bound client on the scheduled batches of `part`.

    Args:
        step: replaces the optimiser's step: writes to the trained vectors itself, and returns the
            loss that is recorded.
    """
    module.model.train()
    may_draw = module.draws or step is not None or module.objective.loss is not None
    device = fabric.device
    cast = autocast(fabric)
    state = module.step_state
    losses = []
    terms: list[Tensor] = []
    samples = 0
    per_epoch = schedule.steps_per_epoch(len(part))
    for epoch, first, count in schedule.pieces(len(part)):
        state.begin_epoch(epoch, per_epoch, schedule.length.steps_of(per_epoch))
        key = order_key(schedule, epoch)
        if may_draw:  # Python's generator is seeded once for the steps of an epoch
            random.seed(key ^ OTHER_DRAWS ^ first)
        for k, batch in enumerate(
            batches(
                part,
                schedule,
                epoch,
                first,
                count,
                key,
            ),
            first,
        ):
            if may_draw:  # in every step, as it may be the first of its phase
                seed(key ^ OTHER_DRAWS ^ k, device)
            state.coaching = None
            state.batch_idx = k
            try:
                with cast():
                    loss = module.training_step(batch, k) if step is None else step(batch)
            except Skipped:
                if step is not None:
                    raise
                name = type(module.model).__name__
                state.log_once(
                    f"model: the training_step of {name} returned None: no step is taken for this "
                    "batch"
                )
                continue
            if step is None:
                loss = _descend(module, optimizer, loss)
            losses.append(loss.detach())
            samples += len(batch[1])
            if state.coaching is not None:
                terms.append(state.coaching)
    return make_fit(
        optimizer.config,
        optimizer.lr,
        losses,
        terms,
        samples,
        device,
    )


def train_private(
    fabric: Fabric,
    module: ClientModule,
    part: Part,
    optimizer: LocalOptimizer,
    schedule: BatchSchedule,
    private: Private,
) -> Fit:
    """Train the bound client by DP-SGD, for as many steps as `train` would take.

    Each step draws a Poisson sample of `part`, and follows the noisy sum of its clipped gradients
    divided by the expected batch size. The gradient of the objective's terms is added without
    noise, as it depends on no sample.
    """
    module.model.train()
    expected = min(schedule.batch_size, len(part))
    losses = []
    terms = []
    samples = 0
    per_epoch = schedule.steps_per_epoch(len(part))
    numbered = schedule.steps(len(part))
    for step, (epoch, k) in enumerate(numbered, private.first_step):
        module.step_state.begin_epoch(epoch, per_epoch, schedule.length.steps_of(per_epoch))
        module.step_state.batch_idx = k
        batch = sampled(part, schedule.batch_size, private.draws("batch", step))
        noise = private.draws("noise", step)
        draws = private.draws("model", step)
        model_key = torch.randint(2**62, (), generator=draws)
        seed_all(int(model_key), fabric.device)  # for dropout
        trained = [p for p in module.binding.parameters if p.requires_grad]
        sums = [torch.zeros_like(p) for p in trained]
        loss = torch.zeros((), device=fabric.device)
        if batch is not None:
            sums, loss = clipped_sum(module, batch, private.clip)
            samples += len(batch[1])
        noisy_sums = iter(noised(sums, private.noise * private.clip, noise))
        slopes: Sequence[Tensor | None] = [None] * len(optimizer.parameters)
        coaching = module.objective_terms()
        if coaching is not None:
            value, slopes = coaching
            terms.append(value)
            loss = loss + value
        gradients = []
        for parameter, slope in zip(optimizer.parameters, slopes, strict=True):
            gradient = None
            if parameter.requires_grad:
                gradient = next(noisy_sums) / expected
            if gradient is not None and slope is not None:
                gradient = gradient + slope
            gradients.append(gradient)
        optimizer.step(loss, gradients)
        losses.append(loss)
    return make_fit(
        optimizer.config,
        optimizer.lr,
        losses,
        terms,
        samples,
        fabric.device,
    )


def make_fit(
    config: OptimizerConfig,
    lr: float,
    losses: list[Tensor],
    terms: list[Tensor],
    samples: int,
    device: torch.device,
) -> Fit:
    """Make the result of a phase.

    Args:
        lr: learning rate.
        losses: loss of each step, with the objective's terms.
        terms: values of the objective's terms.
        samples: number of trained samples.
    """
    steps = len(losses)
    mean = coaching = torch.zeros((), device=device)
    if losses:
        mean = torch.stack(losses).mean()
    if terms:
        coaching = torch.stack(terms).sum() / steps
    return Fit(
        mean,
        coaching,
        steps,
        samples,
        total_step_length(config, lr, steps),
    )


def _descend(
    module: ClientModule,
    optimizer: LocalOptimizer,
    loss: Tensor,
) -> Tensor:
    """Take a step on the sum of `loss` and the objective's terms; returns the sum before the step,
    shape ()."""
    coaching = module.objective_terms()
    if coaching is None:
        if module.own_step and not loss.requires_grad:
            requirement = (
                "its training_step returned a loss that depends on no trained parameter: return "
                "None to skip the batch"
            )
            raise BadInput("model", type(module.model).__name__, requirement)
        optimizer.step(loss)
        return loss
    module.step_state.coaching, gradients = coaching
    optimizer.step(loss, gradients)
    return loss.detach() + module.step_state.coaching


def autocast(fabric: Fabric) -> Callable[[], AbstractContextManager[Any]]:
    """Return Fabric's autocast, or an empty context if the precision casts nothing: entering
    autocast costs more than a small step."""
    plain = fabric.strategy.precision.precision in ("32-true", "64-true")
    if plain:
        return nullcontext
    return fabric.autocast
