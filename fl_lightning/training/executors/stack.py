"""Models side by side, for executors whose steps run over all of them in a fixed number of operations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.config import OptimizerConfig
from fl_lightning.core.phase import Fit
from fl_lightning.training.executors.base import Executor, ExecutorSpec, LocalJob
from fl_lightning.training.kernels import Terms, clip_factor, direction
from fl_lightning.training.local import autocast
from fl_lightning.training.module import ClientModule
from fl_lightning.training.optimizers import LocalOptimizer, step_sizes


class Stack:
    """`width` models side by side, and SGD over all of them in operations whose number does not grow with theirs."""

    def __init__(self, module: ClientModule, config: OptimizerConfig, width: int, dtype: torch.dtype) -> None:
        layout, device = module.layout, module.device_of_model
        self.module, self.config, self.width = module, config, width
        self.rows = torch.zeros(width, layout.size, dtype=dtype, device=device)
        self.parameters = self.rows[:, : module.used]
        self.gradients = torch.zeros_like(self.parameters)
        self.momentum = torch.zeros_like(self.parameters) if config.momentum else None
        wide = torch.promote_types(dtype, torch.float32)
        self.lr = torch.zeros(width, 1, dtype=wide, device=device)
        self.losses, self.pulls = (torch.zeros(width, dtype=wide, device=device) for _ in range(2))
        own = dict(module.model.named_buffers())
        self.buffers = [torch.stack([own[n].detach()] * width) for n in layout.own_names]
        self.trainable = [k for k, t in enumerate(module.trainable.tolist()) if t]
        """The blocks (parameters come first) that an optimiser's state counts."""
        self._masks: dict[int, np.ndarray] = {}
        self._held: dict[tuple[str, int], Tensor] = {}
        self._chosen: np.ndarray | None = None
        self._choose(module.trainable)
        self.terms: Terms | None = None
        self.decay: float | Tensor = 0.0

    def _hold(self, name: str, width: int) -> Tensor:
        """Memory (width, columns of parameters) by name: the same at every call, since a CUDA graph reads it."""
        if (name, width) not in self._held:
            self._held[name, width] = torch.zeros_like(self.parameters[:width])
        return self._held[name, width]

    @property
    def kind(self) -> tuple[object, ...]:
        """What the operations of `descend` and of a backward pass depend on, but for the batch."""
        terms = self.terms
        added = (False, False) if terms is None else (terms.anchor is not None, terms.linear is not None)
        return *added, tuple(self.names)

    def _choose(self, wanted: np.ndarray) -> None:
        """The parameters (bool, in the order of the blocks) whose gradients a backward pass is to find."""
        if self._chosen is not None and (wanted == self._chosen).all():
            return
        self._chosen = wanted
        layout = self.module.layout
        trained = [b for b, t in zip(layout.blocks, wanted.tolist(), strict=False) if t]
        self.names = [b.name for b in trained]
        self.views = [self._view(self.rows, b.start, b.stop, b.shape) for b in trained]
        self.gradient_views = [self._view(self.gradients, b.start, b.stop, b.shape) for b in trained]
        rest = [b for b in layout.blocks if b.name not in set(self.names)]
        self.fixed = {b.name: self._view(self.rows, b.start, b.stop, b.shape) for b in rest}
        self.fixed |= dict(zip(layout.own_names, self.buffers, strict=True))

    @staticmethod
    def _view(bank: Tensor, start: int, stop: int, shape: tuple[int, ...]) -> Tensor:
        return bank[:, start:stop].unflatten(1, shape) if shape else bank[:, start]

    @torch.no_grad()
    def load(self, jobs: Sequence[LocalJob]) -> None:
        """Lay out the clients of `jobs`, each in its slot; the others hold the first one's model, without any term.

        Raises:
            ValueError: one has a loss or a step of its own, which would be left out.
        """
        if any(job.alone for job in jobs):
            raise ValueError("a loss or a step of one's own is for the loop")
        self.lr.zero_()
        for bank in (self.losses, self.pulls, self.gradients, self.momentum):
            if bank is not None:
                bank.zero_()
        at = {job.place: job for job in jobs}
        for slot in range(self.width):
            job = at.get(slot, jobs[0])
            self.rows[slot].copy_(job.vector)
            for bank, buffer in zip(self.buffers, job.buffers, strict=True):
                bank[slot].copy_(buffer)
        self._mask(jobs)
        self._set_terms(jobs)
        for slot, job in at.items():
            self.lr[slot] = job.lr
            for name, value in job.kept.items():
                assert self.momentum is not None
                k = self.trainable[int(name.rsplit(".", 1)[1])]
                if self._masks[slot][k]:  # else it waits where it is
                    block = self.module.layout.blocks[k]
                    self.momentum[slot, block.start : block.stop].copy_(value.flatten())

    def _mask(self, jobs: Sequence[LocalJob]) -> None:
        """What trains, and decays: one row where that is the same for all of `jobs`."""
        all_of_them = self.module.trainable
        masks = [all_of_them if j.trains is None else all_of_them & j.trains[: len(all_of_them)] for j in jobs]
        if not all(mask.any() for mask in masks):
            raise ValueError("no block is left to train")
        self._masks = {job.place: mask for job, mask in zip(jobs, masks, strict=True)}
        self._choose(np.logical_or.reduce(masks))
        alike = all((mask == masks[0]).all() for mask in masks)
        slots = [0] if alike else [job.place for job in jobs]
        width = 1 if alike else self.width
        self.trains = self._hold("trains", width).zero_()  # also 0 between two blocks
        for slot, mask in zip(slots, masks, strict=False):
            for block, t in zip(self.module.layout.blocks, mask.tolist(), strict=False):
                if t:
                    self.trains[slot, block.start : block.stop] = 1
        if self.config.weight_decay:
            self.decay = torch.mul(self.trains, self.config.weight_decay, out=self._hold("decay", width))

    def _set_terms(self, jobs: Sequence[LocalJob]) -> None:
        pulls = any(job.objective.pulls for job in jobs)
        has_linear = any(job.objective.linear is not None for job in jobs)
        layout, used, width = self.module.layout, self.module.used, self.width
        self.terms = None
        for job in jobs:
            job.pulled_numbers = job.objective.pulled_numbers(layout)
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
            anchor.masked_fill_(twice == 0, 0)  # not finite, or left by others: it means nothing there
        columns = [(0, used, 0.0 if twice is None else twice)]
        self.terms = Terms(self._hold("room", width), anchor, linear, columns)

    @torch.no_grad()
    def store(self, jobs: Sequence[LocalJob], counts: Sequence[tuple[int, int]]) -> list[Fit]:
        """Write back what `load` has laid out; `counts`: steps and samples of each job."""
        fits = []
        for job, (steps, samples) in zip(jobs, counts, strict=True):
            slot = job.place
            job.vector.copy_(self.rows[slot])
            for bank, buffer in zip(self.buffers, job.buffers, strict=True):
                buffer.copy_(bank[slot])
            if job.keep and self.momentum is not None and steps:
                blocks = [(n, k, self.module.layout.blocks[k]) for n, k in enumerate(self.trainable)]
                job.kept = job.kept | {
                    f"momentum.{n}": self._view(self.momentum, b.start, b.stop, b.shape)[slot].clone()
                    for n, k, b in blocks
                    if self._masks[slot][k]
                }
            each = max(steps, 1)
            sizes = step_sizes(self.config, job.lr, steps)
            fits.append(Fit(self.losses[slot] / each, self.pulls[slot] / each, steps, samples, sizes))
        return fits

    @torch.no_grad()
    def descend(self, losses: Tensor, active: Tensor | None = None) -> None:
        """One step of SGD down the gradients in `gradients` and down the terms.

        Args:
            losses: of each model (width,), to be added up.
            active: which models take the step, bool (width,); None: all.
        """
        config, gradients, momentum = self.config, self.gradients, self.momentum
        if self.terms is not None:
            added = self.terms.value(self.parameters)
            gradients.add_(self.terms.gradient())
            losses = losses + added
            self.pulls.add_(added if active is None else torch.where(active, added, 0))
        self.losses.add_(losses if active is None else torch.where(active, losses, 0))
        gradients.mul_(self.trains)
        if config.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
            gradients.mul_(clip_factor(norm, config.clip_norm))
        before = None if momentum is None or active is None else momentum.clone()
        momenta = [] if momentum is None else [momentum]
        [step] = direction([self.parameters], [gradients], momenta, self.decay, config.momentum, config.nesterov)
        if active is not None:
            step = torch.where(active[:, None], step, 0)  # a factor of 0 would let a number that is not finite through
            if momentum is not None and before is not None:
                momentum.copy_(torch.where(active[:, None], momentum, before))
        self.parameters.addcmul_(step, self.lr, value=-1)


class Stacked(Executor):
    """Executors that step through a `Stack`, for jobs that are not to be trained `alone`."""

    def __init__(
        self, fabric: Fabric, module: ClientModule, optimizer: LocalOptimizer, spec: ExecutorSpec, width: int
    ) -> None:
        super().__init__(fabric, module, optimizer)
        self.spec = spec
        self.stack = Stack(module, spec.config, width, spec.dtype)
        self._cast = autocast(fabric)

    def takes(self, job: LocalJob) -> bool:
        """Not those that are to be trained `alone`."""
        return not job.alone
