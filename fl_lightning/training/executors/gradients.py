"""Own steps of many clients side by side: each stops where it asks for a gradient, and one pass finds those of all.

Every client's phase is a greenlet, so that its step stays a plain function (docs/decisions/0028).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from fl_lightning.core.module import Batch
from fl_lightning.training.executors.base import LocalJob
from fl_lightning.training.executors.even import widened
from fl_lightning.training.executors.stack import Stack
from fl_lightning.training.local import fit_of
from fl_lightning.training.schedule import batches

Gradients = Callable[[int, Tensor, Tensor, Tensor], tuple[list[Tensor], Tensor]]
"""Of the first models of a stack, so many, on x, y and the samples' weights: `Vmap.gradients`."""


@dataclass
class _Request:
    """What a step waits for: the gradient of the task loss at a vector (D,), on a batch."""

    job: LocalJob
    vector: Tensor
    batch: Batch


class OwnSteps:
    """Trains jobs whose steps look at the model through `Client.gradient` alone; a pass has `size` samples of each."""

    def __init__(self, stack: Stack, size: int, gradients: Gradients) -> None:
        self.stack, self.size, self.gradients = stack, size, gradients
        self._waiting: dict[greenlet, _Request] = {}

    def train(self, jobs: Sequence[LocalJob]) -> None:
        """All that have no `outcome` yet, side by side: it is kept with each, since its step has written as it went."""
        self.stack.gradients.zero_()  # also between the blocks, where nothing is written
        graded = torch.is_grad_enabled()

        def goes_on(run: greenlet, value: Any) -> None:
            run.switch(value)
            torch.set_grad_enabled(graded)  # it may have stopped where it had set it otherwise

        for job in jobs:
            if job.outcome is None:
                goes_on(greenlet(self._phase), job)
        while self._waiting:
            waiting, self._waiting = self._waiting, {}
            try:
                answers = self._gradients(list(waiting.values()))
            except Exception as error:
                for run in waiting:
                    run.throw(error)
                return
            for run, answer in zip(waiting, answers, strict=True):
                goes_on(run, answer)

    def _phase(self, job: LocalJob) -> None:
        """One job from start to end."""
        losses, samples, asker = list[Tensor](), 0, job.asker
        assert job.step is not None and asker is not None
        job.passes, asker.gradients = (0.0, 0.0), lambda vector, batch: self._wait(_Request(job, vector, batch))
        try:
            for epoch, first, count in job.schedule.pieces(len(job.part)):
                for k, batch in enumerate(batches(job.part, job.schedule, epoch, first, count), first):
                    losses.append(job.step(batch, k).detach())
                    samples += len(batch[1])
            job.outcome = fit_of(self.stack.config, job.lr, losses, [], samples, job.vector.device)
        except Exception as error:  # of this client alone
            job.outcome = error
        finally:
            asker.gradients = None

    def _wait(self, request: _Request) -> tuple[Tensor, Tensor]:
        """Stop the step that calls this until its gradient has been found."""
        job, run, samples, graded = request.job, getcurrent(), len(request.batch[1]), torch.is_grad_enabled()
        assert job.passes is not None and job.asker is not None and run.parent is not None
        job.passes = job.passes[0] + samples, job.passes[1] + samples
        if samples > self.size:  # it fits into no pass
            own, job.asker.gradients = job.asker.gradients, None
            try:
                return job.asker.gradient(request.vector, request.batch)
            finally:
                job.asker.gradients = own
        self._waiting[run] = request
        try:
            answer: tuple[Tensor, Tensor] = run.parent.switch()
        finally:
            torch.set_grad_enabled(graded)
        return answer

    @torch.no_grad()
    def _gradients(self, requests: Sequence[_Request]) -> list[tuple[Tensor, Tensor]]:
        """Of each the loss, shape (), and its gradient (D,), 0 where nothing trains."""
        stack, size = self.stack, self.size
        answers: list[tuple[Tensor, Tensor]] = []
        for begin in range(0, len(requests), stack.width):
            some = requests[begin : begin + stack.width]
            width = widened(len(some))
            stack.place([(one.vector, one.job.buffers) for one in some])
            filled = list[Tensor]()
            for own in zip(*(one.batch for one in some), strict=True):
                room = own[0].new_zeros(width, size, *own[0].shape[1:])
                torch._foreach_copy_([slot[: len(b)] for slot, b in zip(room, own, strict=False)], list(own))
                filled.append(room)
            counts = np.array([[len(one.batch[1])] for one in some] + [[0]] * (width - len(some)))
            each = np.where(np.arange(size) < counts, 1 / np.maximum(counts, 1), 0.0)
            weight = torch.from_numpy(each).to(stack.losses.dtype)
            gradients, losses = self.gradients(width, filled[0], filled[1], weight)
            torch._foreach_copy_(stack.narrow(width).gradient_views, gradients)
            flat = stack.rows.new_zeros(len(some), stack.module.layout.size)
            flat[:, : stack.module.used] = stack.gradients[: len(some)]
            answers += zip(losses.unbind(), flat.unbind(), strict=False)
        return answers
