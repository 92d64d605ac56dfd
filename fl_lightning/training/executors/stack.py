"""Models side by side, and steps that run over all of them in a fixed number of operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fl_lightning.configuration.config import OptimizerConfig
from fl_lightning.core.phase import Fit
from fl_lightning.foundation.device import sent
from fl_lightning.training.executors.base import LocalJob
from fl_lightning.training.kernels import Terms, clip_factor, direction
from fl_lightning.training.module import ClientModule
from fl_lightning.training.optimizers import step_sizes

ALIGNED = 16
"""Numbers: every model in a stack begins at a multiple of as many (64 bytes), since kernels may go
by that."""


class Stack:
    """`width` models side by side, and SGD over all of them in operations whose number does not
    grow with theirs.

    Between two models there is a gap: no operation then takes the numbers of two models for one run
    of them, and what becomes of a model does not depend on its slot.
    """

    def __init__(
        self, module: ClientModule, config: OptimizerConfig, width: int, dtype: torch.dtype
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
        self.losses, self.pulls = (torch.zeros(width, dtype=wide, device=device) for _ in range(2))
        own = dict(module.model.named_buffers())
        self.buffers = [torch.stack([own[n].detach()] * width) for n in layout.own_names]
        self.trainable = [k for k, t in enumerate(module.trainable.tolist()) if t]
        """The blocks (parameters come first) that an optimiser's state counts."""
        self._masks: dict[int, np.ndarray] = {}
        self._banks: dict[tuple[str, int], Tensor] = {}
        self._chosen: np.ndarray | None = None
        self._narrow: dict[int, Narrow] = {}
        self.choose(module.trainable)
        self.terms: Terms | None = None
        self.decay: float | Tensor = 0.0

    def _bank(self, columns: int | None = None, width: int | None = None) -> Tensor:
        """Memory for `columns` (None: those of parameters) of each model, with a gap behind them;
        zeros."""
        columns = self.module.used if columns is None else columns
        apart = (columns // ALIGNED + 1) * ALIGNED
        return self._like.new_zeros(self.width if width is None else width, apart)[:, :columns]

    def _hold(self, name: str, width: int) -> Tensor:
        """Memory (width, columns of parameters) by name."""
        if (name, width) not in self._banks:
            self._banks[name, width] = self._bank(width=width)
        return self._banks[name, width]

    @property
    def kind(self) -> tuple[object, ...]:
        """What the operations of `descend` and of a backward pass depend on, but for the batch."""
        terms = self.terms
        added = (
            (False, False)
            if terms is None
            else (terms.anchor is not None, terms.linear is not None)
        )
        return *added, tuple(self.names)

    def choose(self, trains: np.ndarray) -> None:
        """The parameters (bool, in the order of the blocks) whose gradients a backward pass is to
        find."""
        if self._chosen is not None and (trains == self._chosen).all():
            return
        self._chosen = trains
        self._narrow.clear()
        layout = self.module.layout
        trained = [b for b, t in zip(layout.blocks, trains.tolist(), strict=False) if t]
        self.names = [b.name for b in trained]
        self.views = [self._view(self.rows, b.start, b.stop, b.shape) for b in trained]
        self.gradient_views = [
            self._view(self.gradients, b.start, b.stop, b.shape) for b in trained
        ]
        rest = [b for b in layout.blocks if b.name not in set(self.names)]
        self.fixed = {b.name: self._view(self.rows, b.start, b.stop, b.shape) for b in rest}
        self.fixed |= dict(zip(layout.own_names, self.buffers, strict=True))

    @staticmethod
    def _view(bank: Tensor, start: int, stop: int, shape: tuple[int, ...]) -> Tensor:
        return bank[:, start:stop].unflatten(1, shape) if shape else bank[:, start]

    def narrow(self, width: int) -> Narrow:
        """The first `width` of the models."""
        if width not in self._narrow:
            self._narrow[width] = Narrow(self, width)
        return self._narrow[width]

    def place(self, models: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> None:
        """Copy models, vectors (D,) and their buffers, to the first slots, in this order."""
        if not models:
            return
        torch._foreach_copy_(self._slots[: len(models)], [vector for vector, _ in models])
        for slot, (_, buffers) in enumerate(models):
            for bank, buffer in zip(self.buffers, buffers, strict=True):
                bank[slot].copy_(buffer)

    @torch.no_grad()
    def load(self, jobs: Sequence[LocalJob], reached: np.ndarray | None = None) -> None:
        """Lay out the clients of `jobs`, each in the slot that is its place; the others hold the
        first one's model, without any term.

        Args:
            jobs: of which no two have the same place.
            reached: the parameters (bool, in the order of the blocks) that the loss depends on;
                None: all.

        Raises:
            ValueError: one has a loss or a step of its own, which would be left out.
        """
        if any(job.alone for job in jobs):
            raise ValueError("a loss or a step of one's own is for the loop")
        for bank in (self.losses, self.pulls, self.gradients, self.momentum):
            if bank is not None:
                bank.zero_()
        at = {job.place: job for job in jobs}
        rates = [0.0] * self.width
        slots = [at.get(slot, jobs[0]) for slot in range(self.width)]
        self.place([(job.vector, job.buffers) for job in slots])
        self._mask(jobs, reached)
        self._set_terms(jobs)
        for slot, job in at.items():
            rates[slot] = job.lr
            for name, value in job.kept.items():
                assert self.momentum is not None
                k = self.trainable[int(name.rsplit(".", 1)[1])]
                if self._masks[slot][k]:  # else it waits where it is
                    block = self.module.layout.blocks[k]
                    self.momentum[slot, block.start : block.stop].copy_(value.flatten())
        if len(set(rates)) == 1:
            self.lr.fill_(rates[0])  # the host does not wait for the device
        else:
            self.lr.copy_(torch.tensor(rates, dtype=self.lr.dtype)[:, None])

    def _mask(self, jobs: Sequence[LocalJob], reached: np.ndarray | None) -> None:
        """What trains, and decays: one row where that is the same for all of `jobs`. What neither
        the loss nor a term reaches has no gradient, and stays with all that an optimiser would do
        to it."""
        all_of_them = self.module.trainable
        masks = [
            all_of_them if j.trains is None else all_of_them & j.trains[: len(all_of_them)]
            for j in jobs
        ]
        if reached is not None and not reached.all():
            masks = [m & (reached | _in_terms(j, len(m))) for m, j in zip(masks, jobs, strict=True)]
        different = list({id(mask): mask for mask in masks}.values())
        if not all(mask.any() for mask in different):
            raise ValueError("no block is left to train")
        self._masks = {job.place: mask for job, mask in zip(jobs, masks, strict=True)}
        self.choose(np.logical_or.reduce(different))
        alike = all((mask == masks[0]).all() for mask in different)
        slots = [0] if alike else [job.place for job in jobs]
        width = 1 if alike else self.width
        self.trains = self._hold("trains", width).zero_()  # also 0 between two blocks
        for slot, mask in zip(slots, masks, strict=False):
            for block, t in zip(self.module.layout.blocks, mask.tolist(), strict=False):
                if t:
                    self.trains[slot, block.start : block.stop] = 1
        if self.config.weight_decay:
            self.decay = torch.mul(
                self.trains, self.config.weight_decay, out=self._hold("decay", width)
            )

    def _set_terms(self, jobs: Sequence[LocalJob]) -> None:
        pulls = any(job.objective.pulls for job in jobs)
        has_linear = any(job.objective.linear is not None for job in jobs)
        layout = self.module.layout
        used = self.module.used
        width = self.width
        self.terms = None
        for narrow in self._narrow.values():
            narrow.terms = None
        for job in jobs:
            job.proximal_numbers = job.objective.proximal_numbers(layout)
        if not pulls and not has_linear:
            return
        anchor = self._hold("anchor", width).zero_() if pulls else None
        twice = self._hold("pull", width).zero_() if pulls else None
        linear = self._hold("linear", width).zero_() if has_linear else None
        for job in jobs:
            if anchor is not None and twice is not None and job.objective.anchor is not None:
                anchor[job.place].copy_(job.objective.anchor[:used])
                for start, stop, coefficient in job.objective.columns(layout):
                    twice[job.place, start:stop] = coefficient
            if linear is not None and job.objective.linear is not None:
                linear[job.place].copy_(job.objective.linear[:used])
        if anchor is not None and twice is not None:
            # not finite, or left by others: it means nothing there
            anchor.masked_fill_(twice == 0, 0)
        columns = [(0, used, 0.0 if twice is None else twice)]
        self.terms = Terms(self._hold("room", width), anchor, linear, columns)

    def take(self, jobs: Sequence[LocalJob], steps: int, samples: Sequence[int]) -> list[Trained]:
        """What has become of `jobs` after so many steps, and samples of each, as copies: what
        follows may write over their slots."""
        slots = sent(torch.tensor([job.place for job in jobs]), self.rows.device)
        each = max(steps, 1)
        parts = [self.rows, self.losses, self.pulls, *self.buffers]
        rows, losses, pulls, *buffers = (part.index_select(0, slots) for part in parts)
        fits = (
            Fit(loss, pull, steps, seen, step_sizes(self.config, job.lr, steps))
            for job, loss, pull, seen in zip(
                jobs, losses / each, pulls / each, samples, strict=True
            )
        )
        copies = zip(rows, zip(*buffers, strict=True) if buffers else [()] * len(jobs), strict=True)
        return [
            Trained(vector, own, self._kept(job, steps), fit)
            for job, (vector, own), fit in zip(jobs, copies, fits, strict=True)
        ]

    def _kept(self, job: LocalJob, steps: int) -> dict[str, Tensor]:
        """What the optimiser of `job` is left with, as copies."""
        if not (job.keep and self.momentum is not None and steps):
            return job.kept
        blocks = [(n, k, self.module.layout.blocks[k]) for n, k in enumerate(self.trainable)]
        return job.kept | {
            f"momentum.{n}": self._view(self.momentum, b.start, b.stop, b.shape)[job.place].clone()
            for n, k, b in blocks
            if self._masks[job.place][k]
        }


def _in_terms(job: LocalJob, count: int) -> np.ndarray | bool:
    """Bool: the first `count` blocks that the terms of a job's objective reach."""
    objective = job.objective
    if objective.linear is not None:
        return True
    return (
        objective.proximal_weight[:count] != 0 if objective.proximal_weight is not None else False
    )


@dataclass(frozen=True)
class Trained:
    """What has become of a job, before anything of the job is written to."""

    vector: Tensor
    buffers: Sequence[Tensor]
    kept: dict[str, Tensor]
    fit: Fit

    @torch.no_grad()
    def write(self, job: LocalJob) -> Fit:
        """Have the job be what has become of it."""
        job.vector.copy_(self.vector)
        for buffer, value in zip(job.buffers, self.buffers, strict=True):
            buffer.copy_(value)
        job.kept = self.kept
        return self.fit


class Narrow:
    """The first `width` models of a stack: views of its memory, and a step of them."""

    def __init__(self, stack: Stack, width: int) -> None:
        self.stack = stack
        self.width = width
        self.views, self.gradient_views = (
            [v[:width] for v in views] for views in (stack.views, stack.gradient_views)
        )
        self.fixed = {name: view[:width] for name, view in stack.fixed.items()}
        self.parameters = stack.parameters[:width]
        self.gradients = stack.gradients[:width]
        self.momentum = None if stack.momentum is None else stack.momentum[:width]
        self.lr = stack.lr[:width]
        self.losses = stack.losses[:width]
        self.pulls = stack.pulls[:width]
        self.terms: Terms | None = None
        """Those of the stack, once a step has been taken."""

    @torch.no_grad()
    def descend(self, losses: Tensor) -> None:
        """One step of SGD down the gradients in `gradients` and down the terms; `losses` (width,)
        are added up."""
        stack = self.stack
        config = self.stack.config
        gradients = self.gradients
        if stack.terms is not None:
            if self.terms is None:
                self.terms = stack.terms.narrow(self.width)
            added = self.terms.value(self.parameters)
            gradients.add_(self.terms.gradient())
            losses = losses + added
            self.pulls.add_(added)
        self.losses.add_(losses)
        # else nothing but what trains has a gradient
        if stack.terms is not None or len(stack.trains) > 1:
            gradients.mul_(stack.trains[: self.width])
        if config.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
            gradients.mul_(clip_factor(norm, config.clip_norm))
        momenta = [] if self.momentum is None else [self.momentum]
        decay = stack.decay[: self.width] if isinstance(stack.decay, Tensor) else stack.decay
        [step] = direction(
            [self.parameters], [gradients], momenta, decay, config.momentum, config.nesterov
        )
        self.parameters.addcmul_(step, self.lr, value=-1)
