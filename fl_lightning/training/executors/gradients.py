"""Own steps of many clients side by side: each stops where it asks for a gradient, and one pass
finds those of all.

Every client's phase is a greenlet, so that its step stays a plain function (docs/decisions/0028).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
from fl_lightning.training.schedule import stream

Gradients = Callable[[int, Tensor, Tensor, Tensor], tuple[list[Tensor], Tensor]]
"""Of the first models of a stack, so many, on x, y and the samples' weights: `Vmap.gradients`."""


@dataclass
class _Request:
    """What a step waits for: the gradient of the task loss at a vector (D,), on a batch."""

    job: LocalJob
    vector: Tensor
    batch: Batch


class OwnSteps:
    """Trains jobs whose steps look at the model through `Client.gradient` alone; a pass has `size`
    samples of each."""

    def __init__(self, stack: Stack, size: int, gradients: Gradients) -> None:
        self.stack, self.size, self.gradients = stack, size, gradients
        self._waiting: dict[greenlet, _Request] = {}

    def train(self, jobs: Sequence[LocalJob]) -> None:
        """All that have no `outcome` yet, side by side: it is kept with each, since its step has
        written as it went."""
        self.stack.gradients.zero_()  # also between the blocks, where nothing is written
        graded = torch.is_grad_enabled()

        def goes_on(run: greenlet, value: Any) -> None:
            if isinstance(value, Exception):
                run.throw(value)
            else:
                run.switch(value)
            torch.set_grad_enabled(graded)  # it may have stopped where it had set it otherwise

        self._waiting.clear()  # clients that an earlier call left waiting when it was cut off
        for job in jobs:
            if job.outcome is None:
                goes_on(greenlet(self._phase), job)
        while self._waiting:
            waiting, self._waiting = self._waiting, {}
            for run, answer in zip(waiting, self._answers(list(waiting.values())), strict=True):
                goes_on(run, answer)

    def _answers(self, requests: Sequence[_Request]) -> Sequence[tuple[Tensor, Tensor] | Exception]:
        """`_gradients`, or why there is none: where a pass fails, each is tried alone."""
        try:
            return self._gradients(requests)
        except Exception as error:
            return [error] if len(requests) == 1 else [self._answers([one])[0] for one in requests]

    def _phase(self, job: LocalJob) -> None:
        """One job from start to end."""
        losses, samples, asker = list[Tensor](), 0, job.asker
        assert job.step is not None and asker is not None
        job.passes, asker.gradients = (0.0, 0.0), partial(self._gradient, job)
        try:
            for batch in stream(job.part, job.schedule):
                losses.append(job.step(batch).detach())
                samples += len(batch[1])
            job.outcome = fit_of(self.stack.config, job.lr, losses, [], samples, job.vector.device)
        except Exception as error:  # of this client alone
            job.outcome = error
        finally:
            asker.gradients = None

    def _gradient(
        self, job: LocalJob, vector: Tensor, batch: Batch, training: bool
    ) -> tuple[Tensor, Tensor]:
        """Stop the step that calls this until its gradient has been found."""
        assert job.passes is not None and job.asker is not None
        samples, run, graded = len(batch[1]), getcurrent(), torch.is_grad_enabled()
        job.passes = job.passes[0] + samples, job.passes[1] + samples
        if samples > self.size or not training:  # for no pass
            own, job.asker.gradients = job.asker.gradients, None
            try:
                return job.asker.gradient(vector, batch, training=training)
            finally:
                job.asker.gradients = own
                self.stack.module.model.train()
        assert run.parent is not None
        self._waiting[run] = _Request(job, vector, batch)
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
                torch._foreach_copy_(
                    [slot[: len(b)] for slot, b in zip(room, own, strict=False)], list(own)
                )
                for slot, some_of_them in zip(room, own, strict=False):
                    # finite if the others are; its weight is 0
                    slot[len(some_of_them) :] = some_of_them[:1]
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
