"""Holds several models in one tensor, and takes SGD steps of all of them in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fl_lightning.configuration.config import OptimizerConfig
from fl_lightning.core import Block, Fit
from fl_lightning.foundation.device import to_device
from fl_lightning.training.executors.base import LocalJob
from fl_lightning.training.kernels import Terms, clip_factor, direction
from fl_lightning.training.module import ClientModule
from fl_lightning.training.optimizers import total_step_length

ALIGNED = 16
"""Models in a stack begin at multiples of this number of entries (64 bytes), as kernels may round
differently on unaligned memory."""


class Stack:
    """Memory for `width` models and their training by SGD, in a number of operations that does not
    depend on the width.

    Here, a slot is the position of a model in the stack, not a named vector. `load` copies jobs in,
    `narrow(width).descend` takes a step, `take` copies results out, and `Trained.write` writes them
    to the jobs. The gaps between models prevent operations from treating two models as one array,
    so that results do not depend on the slot.
    """

    def __init__(
        self,
        module: ClientModule,
        config: OptimizerConfig,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        layout = module.layout
        device = module.device_of_model
        self.module = module
        self.config = config
        self.width = width
        self._like = torch.empty(0, dtype=dtype, device=device)
        self.rows = self._bank(layout.size)
        self._slots = list(self.rows.unbind())
        self.parameters = self.rows[:, : module.used]
        self.gradients = self._bank()
        self.momentum = self._bank() if config.momentum else None
        wide = torch.promote_types(dtype, torch.float32)
        self.lr = torch.zeros(width, 1, dtype=wide, device=device)
        self.losses = torch.zeros(width, dtype=wide, device=device)
        self.coaching = torch.zeros_like(self.losses)
        """Sum over steps of the value of the objective's terms, for the model in each slot."""
        buffers = dict(module.model.named_buffers())
        self.buffers = []
        for name in layout.own_names:
            buffer = buffers[name].detach()
            self.buffers.append(torch.stack([buffer] * width))
        self.trainable = np.flatnonzero(module.trainable).tolist()
        """Indices of the trainable blocks, by which the optimiser's state numbers them."""
        self._masks: dict[int, np.ndarray] = {}
        self._banks: dict[tuple[str, int], Tensor] = {}
        self._chosen: np.ndarray | None = None
        self._narrow: dict[int, Narrow] = {}
        self.choose(module.trainable)
        self.terms: Terms | None = None
        self.decay: float | Tensor = 0.0

    def _bank(self, columns: int | None = None, width: int | None = None) -> Tensor:
        """Allocate zeros, (width, columns), with gaps between rows; `columns` None: those of
        parameters."""
        columns = columns or self.module.used
        distance = (columns // ALIGNED + 1) * ALIGNED
        return self._like.new_zeros(width or self.width, distance)[:, :columns]

    def _hold(self, name: str, width: int) -> Tensor:
        """Return the memory of this name, (width, columns of parameters), allocated at first
        use."""
        if (name, width) not in self._banks:
            self._banks[name, width] = self._bank(width=width)
        return self._banks[name, width]

    def choose(self, trains: np.ndarray) -> None:
        """Set the parameters whose gradients are computed from now on.

        Args:
            trains: mask of the parameters, bool, in the order of the blocks.
        """
        if self._chosen is not None and (trains == self._chosen).all():
            return
        self._chosen = trains
        self._narrow.clear()
        layout = self.module.layout
        trained = {layout.blocks[k].name: layout.blocks[k] for k in np.flatnonzero(trains)}
        self.names = list(trained)
        self.views = [_view(self.rows, block) for block in trained.values()]
        self.gradient_views = [_view(self.gradients, block) for block in trained.values()]
        rest = [block for block in layout.blocks if block.name not in trained]
        self.fixed = {block.name: _view(self.rows, block) for block in rest}
        self.fixed |= zip(layout.own_names, self.buffers, strict=True)

    def narrow(self, width: int) -> Narrow:
        """Return a view of the first `width` models of the stack."""
        if width not in self._narrow:
            self._narrow[width] = Narrow(self, width)
        return self._narrow[width]

    def place(self, models: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> None:
        """Copy models to the first slots of the stack, in this order.

        Args:
            models: vector (D,) and buffers of each model.
        """
        if not models:
            return
        vectors = [vector for vector, _ in models]
        torch._foreach_copy_(self._slots[: len(models)], vectors)
        for slot, (_, buffers) in enumerate(models):
            for bank, buffer in zip(self.buffers, buffers, strict=True):
                bank[slot].copy_(buffer)

    @torch.no_grad()
    def load(self, jobs: Sequence[LocalJob], reached: np.ndarray | None = None) -> None:
        """Copy each job's client to the slot `job.place`. Other slots get the first job's model,
        without proximal or linear term.

        Args:
            jobs: no two of them may have the same place.
            reached: mask of the parameters (bool, in the order of the blocks) that the loss depends
                on; None: all.

        Raises:
            ValueError: a job has its own step or a loss that is no `PureLoss`.
        """
        if any(job.alone for job in jobs):
            raise ValueError("a job with its own step or impure loss must train in the loop")
        for bank in (self.losses, self.coaching, self.gradients, self.momentum):
            if bank is not None:
                bank.zero_()
        job_at = {job.place: job for job in jobs}
        filled = [job_at.get(slot, jobs[0]) for slot in range(self.width)]
        self.place([(job.vector, job.buffers) for job in filled])
        self._mask(jobs, reached)
        self._set_terms(jobs)
        rates = [0.0] * self.width
        for slot, job in job_at.items():
            rates[slot] = job.lr
            for name, momentum in job.kept.items():
                assert self.momentum is not None
                k = self.trainable[int(name.rsplit(".", 1)[1])]
                if self._masks[slot][k]:  # else `job.kept` keeps it
                    columns = self.module.layout.blocks[k].columns
                    self.momentum[slot, columns].copy_(momentum.flatten())
        if len(set(rates)) == 1:
            self.lr.fill_(rates[0])  # without waiting for the device
        else:
            lr = torch.tensor(rates, dtype=self.lr.dtype)
            self.lr.copy_(lr[:, None])

    def _mask(self, jobs: Sequence[LocalJob], reached: np.ndarray | None) -> None:
        """Set `trains`, the mask of the parameters that train, and `decay`, with a row for each
        slot, or one if all jobs train the same parameters. A parameter that is neither in the loss
        nor in a term has no gradient and does not train."""
        trainable = self.module.trainable
        count = len(trainable)
        self._masks = {}
        for job in jobs:
            mask = trainable
            if job.trains is not None:
                mask = trainable & job.trains[:count]
            if reached is not None and not reached.all():
                mask = mask & (reached | _in_terms(job, count))
            self._masks[job.place] = mask
        different = list({id(mask): mask for mask in self._masks.values()}.values())
        if not all(mask.any() for mask in different):
            raise ValueError("no block is left to train")
        self.choose(np.logical_or.reduce(different))
        masks = self._masks
        width = self.width
        if all((mask == different[0]).all() for mask in different):
            masks = {0: different[0]}
            width = 1
        self.trains = self._hold("trains", width).zero_()  # 0 in the gaps between blocks
        for slot, mask in masks.items():
            for k in np.flatnonzero(mask):
                self.trains[slot, self.module.layout.blocks[k].columns] = 1
        if self.config.weight_decay:
            decay = self._hold("decay", width)
            self.decay = torch.mul(self.trains, self.config.weight_decay, out=decay)

    def _set_terms(self, jobs: Sequence[LocalJob]) -> None:
        """Set `terms` to those of the jobs' objectives."""
        objectives = {job.place: job.objective for job in jobs}
        has_proximal = any(objective.has_proximal for objective in objectives.values())
        has_linear = any(objective.linear is not None for objective in objectives.values())
        layout = self.module.layout
        used = self.module.used
        width = self.width
        self.terms = None
        for narrow in self._narrow.values():
            narrow.terms = None
        for job in jobs:
            job.proximal_numbers = job.objective.proximal_numbers(layout)
        if not has_proximal and not has_linear:
            return
        linear = anchor = None
        twice: float | Tensor = 0.0
        if has_linear:
            linear = self._hold("linear", width).zero_()
        if has_proximal:
            anchor = self._hold("anchor", width).zero_()
            twice = self._hold("pull", width).zero_()
        for slot, objective in objectives.items():
            if linear is not None and objective.linear is not None:
                linear[slot].copy_(objective.linear[:used])
            if anchor is not None and objective.anchor is not None:
                anchor[slot].copy_(objective.anchor[:used])
            for start, stop, coefficient in objective.columns(layout):
                if isinstance(twice, Tensor):
                    twice[slot, start:stop] = coefficient
        if anchor is not None and isinstance(twice, Tensor):
            # columns without a coefficient may be infinite or NaN
            anchor.masked_fill_(twice == 0, 0)
        self.terms = Terms(self._hold("room", width), anchor, linear, [(0, used, twice)])

    def take(
        self,
        jobs: Sequence[LocalJob],
        steps: int,
        samples: Sequence[int],
    ) -> list[Trained]:
        """Copy the results of `jobs` out of the stack, before later steps overwrite their slots.

        Args:
            steps: number of steps that they have taken.
            samples: number of samples that each has trained on.
        """
        places = torch.tensor([job.place for job in jobs])
        slots = to_device(places, self.rows.device)
        rows = self.rows.index_select(0, slots)
        losses = self.losses.index_select(0, slots) / max(steps, 1)
        coaching = self.coaching.index_select(0, slots) / max(steps, 1)
        buffers = [bank.index_select(0, slots) for bank in self.buffers]
        trained = []
        for k, job in enumerate(jobs):
            length = total_step_length(self.config, job.lr, steps)
            fit = Fit(
                losses[k],
                coaching[k],
                steps,
                samples[k],
                length,
            )
            job_buffers = [bank[k] for bank in buffers]
            state = self._kept(job, steps)
            trained.append(Trained(rows[k], job_buffers, state, fit))
        return trained

    def _kept(self, job: LocalJob, steps: int) -> dict[str, Tensor]:
        """Return a copy of the state of the job's optimiser."""
        if not (job.keep and self.momentum is not None and steps):
            return job.kept
        state = dict(job.kept)
        for n, k in enumerate(self.trainable):
            if self._masks[job.place][k]:
                momentum = _view(self.momentum, self.module.layout.blocks[k])
                state[f"momentum.{n}"] = momentum[job.place].clone()
        return state


def _view(bank: Tensor, block: Block) -> Tensor:
    """Return the view of a block of all models in a bank, (width, *shape)."""
    view: Tensor = bank[:, block.start]
    if block.shape:
        view = bank[:, block.columns].unflatten(1, block.shape)
    return view


def _in_terms(job: LocalJob, count: int) -> np.ndarray | bool:
    """Return the mask of the first `count` blocks that are in a term of the job's objective."""
    objective = job.objective
    if objective.linear is not None:
        return True
    if objective.proximal_weight is None:
        return False
    reached: np.ndarray = objective.proximal_weight[:count] != 0
    return reached


@dataclass(frozen=True)
class Trained:
    """The result of a job, which has not been written to the job yet."""

    vector: Tensor
    buffers: Sequence[Tensor]
    kept: dict[str, Tensor]
    fit: Fit

    @torch.no_grad()
    def write(self, job: LocalJob) -> Fit:
        """Write the result to the job's tensors; returns the fit."""
        job.vector.copy_(self.vector)
        for buffer, value in zip(job.buffers, self.buffers, strict=True):
            buffer.copy_(value)
        job.kept = self.kept
        return self.fit


class Narrow:
    """A narrower view of a stack: its first `width` models, in the same memory."""

    def __init__(self, stack: Stack, width: int) -> None:
        self.stack = stack
        self.width = width
        self.views = [view[:width] for view in stack.views]
        self.gradient_views = [view[:width] for view in stack.gradient_views]
        self.fixed = {name: view[:width] for name, view in stack.fixed.items()}
        self.parameters = stack.parameters[:width]
        self.gradients = stack.gradients[:width]
        self.momentum = None if stack.momentum is None else stack.momentum[:width]
        self.lr = stack.lr[:width]
        self.losses = stack.losses[:width]
        self.coaching = stack.coaching[:width]
        self.terms: Terms | None = None
        """The terms of these models; set by the first step."""

    @torch.no_grad()
    def descend(self, losses: Tensor) -> None:
        """Take one SGD step with each model, and add its loss to the sum in `self.losses`.

        The gradient of the objective's terms (proximal and linear) is added to `self.gradients`,
        and their value to the loss.

        Args:
            losses: losses of the models in this step, without the terms, (width,).
        """
        stack = self.stack
        config = self.stack.config
        gradients = self.gradients
        if stack.terms is not None:
            if self.terms is None:
                self.terms = stack.terms.narrow(self.width)
            added = self.terms.value(self.parameters)
            gradients.add_(self.terms.gradient())
            losses = losses + added
            self.coaching.add_(added)
        self.losses.add_(losses)
        # otherwise parameters that do not train have no gradient anyway
        if stack.terms is not None or len(stack.trains) > 1:
            gradients.mul_(stack.trains[: self.width])
        if config.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
            gradients.mul_(clip_factor(norm, config.clip_norm))
        momenta = [] if self.momentum is None else [self.momentum]
        decay = stack.decay
        if isinstance(stack.decay, Tensor):
            decay = stack.decay[: self.width]
        [step] = direction(
            [self.parameters],
            [gradients],
            momenta,
            decay,
            config.momentum,
            config.nesterov,
        )
        self.parameters.addcmul_(step, self.lr, value=-1)
