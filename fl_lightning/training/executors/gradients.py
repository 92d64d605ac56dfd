"""Own steps of many clients side by side: each stops where it asks for a gradient, and one pass
finds those of all.

Every client's phase is a greenlet, so that its step stays a plain function (docs/decisions/0028).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from fl_lightning.core import Batch
from fl_lightning.training.executors.base import LocalJob
from fl_lightning.training.executors.even import widened
from fl_lightning.training.executors.feed import fill_up, sample_weights
from fl_lightning.training.executors.stack import Stack
from fl_lightning.training.local import fit_of
from fl_lightning.training.schedule import stream

Gradients = Callable[[int, Tensor, Tensor, Tensor], tuple[list[Tensor], Tensor]]
"""`Vmap.gradients`: (number of a stack's models, x, y, weights of samples) -> gradients, losses."""


@dataclass
class _GradientRequest:
    """Asks for the gradient of the task loss at a vector (D,), on a batch."""

    job: LocalJob
    vector: Tensor
    batch: Batch


@dataclass(eq=False)
class OwnSteps:
    """Trains jobs whose steps look at the model through `Client.gradient` alone; a pass has `size`
    samples of each."""

    stack: Stack
    size: int
    gradients: Gradients
    _waiting: dict[greenlet, _GradientRequest] = field(default_factory=dict)

    def train(self, jobs: Sequence[LocalJob]) -> None:
        """Train all jobs without an `outcome` side by side. Each keeps its outcome, since its steps
        write to its vectors at once."""
        self.stack.gradients.zero_()  # also between the blocks, where nothing is written
        graded = torch.is_grad_enabled()

        def resume(run: greenlet, value: Any) -> None:
            if isinstance(value, Exception):
                run.throw(value)
            else:
                run.switch(value)
            torch.set_grad_enabled(graded)  # the step may have set it otherwise

        self._waiting.clear()  # clients that an earlier call left waiting when it was cut off
        for job in jobs:
            if job.outcome is None:
                resume(greenlet(self._phase), job)
        while self._waiting:
            waiting = self._waiting
            self._waiting = {}
            answers = self._answers(list(waiting.values()))
            for run, answer in zip(waiting, answers, strict=True):
                resume(run, answer)

    def _answers(
        self, requests: Sequence[_GradientRequest]
    ) -> Sequence[tuple[Tensor, Tensor] | Exception]:
        """The `_gradients`, or the error of each: where a pass fails, each request is tried
        alone."""
        try:
            return self._gradients(requests)
        except Exception as error:
            if len(requests) == 1:
                return [error]
            return [self._answers([request])[0] for request in requests]

    def _phase(self, job: LocalJob) -> None:
        """Train one job from start to end."""
        losses = []
        samples = 0
        asker = job.asker
        assert job.step is not None and asker is not None
        job.passes = 0.0, 0.0
        asker.gradients = partial(self._gradient, job)
        try:
            for batch in stream(job.part, job.schedule):
                losses.append(job.step(batch).detach())
                samples += len(batch[1])
            job.outcome = fit_of(
                self.stack.config,
                job.lr,
                losses,
                [],
                samples,
                job.vector.device,
            )
        except Exception as error:  # of this client alone
            job.outcome = error
        finally:
            asker.gradients = None

    def _gradient(
        self,
        job: LocalJob,
        vector: Tensor,
        batch: Batch,
        training: bool,
    ) -> tuple[Tensor, Tensor]:
        """Stop the step that calls this until its gradient has been found."""
        assert job.passes is not None and job.asker is not None
        samples = len(batch[1])
        run = getcurrent()
        graded = torch.is_grad_enabled()
        forward, backward = job.passes
        job.passes = forward + samples, backward + samples
        if samples > self.size or not training:  # no stacked pass can do that
            job.asker.gradients = None
            try:
                return job.asker.gradient(vector, batch, training=training)
            finally:
                job.asker.gradients = partial(self._gradient, job)
                self.stack.module.model.train()
        assert run.parent is not None
        self._waiting[run] = _GradientRequest(job, vector, batch)
        try:
            answer: tuple[Tensor, Tensor] = run.parent.switch()
        finally:
            torch.set_grad_enabled(graded)
        return answer

    @torch.no_grad()
    def _gradients(self, requests: Sequence[_GradientRequest]) -> list[tuple[Tensor, Tensor]]:
        """The loss, shape (), of each request and its gradient (D,), 0 where nothing trains."""
        stack = self.stack
        size = self.size
        answers: list[tuple[Tensor, Tensor]] = []
        for begin in range(0, len(requests), stack.width):
            together = requests[begin : begin + stack.width]
            width = widened(len(together))
            stack.place([(request.vector, request.job.buffers) for request in together])
            batch = together[0].batch
            rooms = [part.new_zeros(width, size, *part.shape[1:]) for part in batch]
            counts = np.zeros(width, dtype=np.int64)
            for slot, request in enumerate(together):
                counts[slot] = len(request.batch[1])
                for room, part in zip(rooms, request.batch, strict=True):
                    fill_up(room[slot], part)
            x, y = rooms
            weight = sample_weights(counts, size, stack.losses.dtype)
            gradients, losses = self.gradients(width, x, y, weight)
            torch._foreach_copy_(stack.narrow(width).gradient_views, gradients)
            flat = stack.rows.new_zeros(len(together), stack.module.layout.size)
            flat[:, : stack.module.used] = stack.gradients[: len(together)]
            answers += zip(losses.unbind(), flat.unbind(), strict=False)
        return answers
