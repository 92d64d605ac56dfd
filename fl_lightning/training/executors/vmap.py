"""Many clients at once: `torch.func` over stacked models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from fl_lightning.core.phase import Batch, Fit
from fl_lightning.device import sent
from fl_lightning.training.executors.base import TOLERANCE, ExecutorSpec, LocalJob
from fl_lightning.training.executors.stack import Stacked
from fl_lightning.training.module import ClientModule
from fl_lightning.training.optimizers import LocalOptimizer
from fl_lightning.training.schedule import stream

MOST_AT_ONCE = 32
"""Clients that `vmap` trains at once. Each takes memory for four models and its batches; beyond that, little is won."""

AHEAD = 16
"""Steps whose batches `vmap` lays out together: one copy for each client and so many steps, not one for each step."""


class Vmap(Stacked):
    """Many clients at once: `torch.func` over stacked models.

    Every pass has the same shape, [width, largest batch, ...]: clients and samples that are missing are filled up with
    copies of weight 0, and a client's place is that in the cohort. Its numbers then do not depend on who trains beside
    it, nor on the number of ranks.
    """

    name = "vmap"

    def __init__(self, fabric: Fabric, module: ClientModule, optimizer: LocalOptimizer, spec: ExecutorSpec) -> None:
        super().__init__(fabric, module, optimizer, spec, width_of(spec.cohort))
        self.at_once = self.stack.width
        stack, model = self.stack, module.model

        def loss(trained: Sequence[Tensor], fixed: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            scores = functional_call(model, dict(zip(stack.names, trained, strict=True)) | fixed, (x,))
            return (module.metric.loss(scores, y, "none") * weight).sum()

        self._gradients = vmap(grad_and_value(loss))

    def unlike(self, x: Tensor, y: Tensor, gradients: Sequence[Tensor]) -> str | None:
        """Why this model cannot be trained so, if it cannot: on the bound model, (x, y) must have these `gradients`."""
        stack, row = self.stack, self.module.binding.vector
        assert row is not None
        stack.rows.copy_(row)
        x, y, weight, _ = laid_out([[(x, y)], *[[]] * (stack.width - 1)], self.spec.largest_batch, self.spec.dtype)
        try:
            with self._cast():  # to see that it runs; the numbers are compared in full precision
                self._gradients(stack.views, stack.fixed, x[:, 0], y[:, 0], weight[:, 0])
            measured, _ = self._gradients(stack.views, stack.fixed, x[:, 0], y[:, 0], weight[:, 0])
        except Exception as error:  # whatever a user's forward pass does that torch.func cannot
            return f"torch.func cannot run the model ({type(error).__name__}: {error}".splitlines()[0] + ")"
        for ours, theirs in zip(measured, gradients, strict=True):
            if (ours[0] - theirs).norm() > TOLERANCE[theirs.dtype] * (1 + theirs.norm()):
                return "the model does not treat the samples of a batch one by one"
        return None

    def takes(self, job: LocalJob) -> bool:
        """Nor those whose batches are larger than its passes."""
        return super().takes(job) and min(job.schedule.batch_size, len(job.part)) <= self.spec.largest_batch

    def train(self, jobs: Sequence[LocalJob]) -> list[Fit]:
        """All at once.

        Raises:
            ValueError: a job is for the loop.
        """
        if not all(map(self.takes, jobs)):
            raise ValueError("what is larger than its batches, or has a loss or a step of its own, is for the loop")
        stack = self.stack
        stack.load(jobs)
        self.module.model.train()
        steps, samples = [0] * len(jobs), [0] * len(jobs)
        rest = [stream(job.part, job.schedule) for job in jobs]
        while any(ahead := [list(islice(it, AHEAD)) for it in rest]):
            slots: list[list[Batch]] = [[] for _ in range(stack.width)]
            for job, batches in zip(jobs, ahead, strict=True):
                slots[job.place] = batches
            self._steps(slots)
            for k, batches in enumerate(ahead):
                steps[k] += len(batches)
                samples[k] += sum(len(y) for _, y in batches)
        return stack.store(jobs, list(zip(steps, samples, strict=True)))

    def _steps(self, slots: Sequence[Sequence[Batch]]) -> None:
        """As many steps as the client with the most batches has in `slots`."""
        stack = self.stack
        x, y, weight, active = laid_out(slots, self.spec.largest_batch, self.spec.dtype)
        everyone = min(len(some) for some in slots)
        for k in range(active.shape[0]):
            with self._cast():
                gradients, losses = self._gradients(stack.views, stack.fixed, x[:, k], y[:, k], weight[:, k])
            torch._foreach_copy_(stack.gradient_views, list(gradients))
            stack.descend(losses, None if k < everyone else active[k])


def width_of(cohort: int) -> int:
    """How many of a cohort's clients `Vmap` trains at once."""
    groups = -(-cohort // MOST_AT_ONCE)
    return max(2, -(-cohort // groups))  # of one model, convolutions take another kernel


def laid_out(
    slots: Sequence[Sequence[Batch]], size: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The next batches by slot: x (width, steps, size, ...), y and weight (width, steps, size), active (steps, width).

    A sample's weight is 1 / its batch's samples, in numbers of `dtype` or of 32 bits; what fills a batch up is its
    client's first sample, which is finite if the others are, and has weight 0.
    """
    width = len(slots)
    first = next(batches for batches in slots if batches)
    count = max(len(batches) for batches in slots)
    like, label = first[0]
    x = like.new_empty(width, count * size, *like.shape[1:])
    y = label.new_empty(width, count * size, *label.shape[1:])
    weight = torch.zeros(width, count, size, dtype=torch.promote_types(dtype, torch.float32))
    active = torch.zeros(count, width, dtype=torch.bool)
    for slot, batches in enumerate(slots):
        x[slot] = batches[0][0][0] if batches else like[0]
        y[slot] = batches[0][1][0] if batches else label[0]
        active[: len(batches), slot] = True
        for place, run in _runs(batches, size):
            start, stop = place * size, place * size + sum(len(labels) for _, labels in run)
            torch.cat([images for images, _ in run], out=x[slot, start:stop])
            torch.cat([labels for _, labels in run], out=y[slot, start:stop])
        for k, (_, labels) in enumerate(batches):
            weight[slot, k, : len(labels)] = 1 / len(labels)
    device = like.device
    shaped = x.unflatten(1, (count, size)), y.unflatten(1, (count, size))
    return *shaped, sent(weight, device), sent(active, device)


def _runs(batches: Sequence[Batch], size: int) -> Iterator[tuple[int, Sequence[Batch]]]:
    """`found` in stretches that lie side by side, each with its place: only the last batch of each is not of `size`."""
    first = 0
    for k, (_, labels) in enumerate(batches):
        if len(labels) < size or k == len(batches) - 1:
            yield first, batches[first : k + 1]
            first = k + 1
