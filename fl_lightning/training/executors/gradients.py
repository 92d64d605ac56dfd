"""Runs methods' own steps (`Phase.step` with `by_gradient`) of several clients together: each step
pauses when it requests a gradient, and one stacked pass computes the gradients of all.

Each client's phase is a greenlet, so that a step remains an ordinary function
(docs/decisions/0028).
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
from fl_lightning.training.executors.feed import fill_up, sample_weights
from fl_lightning.training.executors.stack import Stack
from fl_lightning.training.executors.widths import pass_width
from fl_lightning.training.local import make_fit
from fl_lightning.training.schedule import stream

Gradients = Callable[[int, Tensor, Tensor, Tensor], tuple[list[Tensor], Tensor]]
"""`Vmap.gradients`: (number of models, x, y, sample weights) -> gradients, losses."""


@dataclass
class _GradientRequest:
    """A request for the gradient of the task loss at a vector (D,) on a batch."""

    job: LocalJob
    vector: Tensor
    batch: Batch


@dataclass(eq=False)
class GradientSteps:
    """Trains jobs with steps of the method's own that use the model through `Client.gradient` alone
    (`Phase.by_gradient`).

    Args:
        size: number of samples of each client in a pass; smaller batches are padded.
    """

    stack: Stack
    size: int
    gradients: Gradients
    _waiting: dict[greenlet, _GradientRequest] = field(default_factory=dict)

    def train(self, jobs: Sequence[LocalJob]) -> None:
        """Train all jobs that have no `outcome` together, and set the `outcome` of each to its fit
        or its error. A job with an outcome is left out: its steps have written to the client's
        vectors already, and must not do so twice."""
        self.stack.gradients.zero_()  # including the gaps between blocks, which are not written to
        graded = torch.is_grad_enabled()

        def resume(run: greenlet, value: Any) -> None:
            if isinstance(value, Exception):
                run.throw(value)
            else:
                run.switch(value)
            torch.set_grad_enabled(graded)  # the step may have changed it

        self._waiting.clear()  # an interrupted call may have left some
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
        """Return for each request its loss and gradient as from `_gradients`, or the error that it
        causes. If a pass of several requests fails, each is tried by itself."""
        try:
            return self._gradients(requests)
        except Exception as error:
            if len(requests) == 1:
                return [error]
            return [self._answers([request])[0] for request in requests]

    def _phase(self, job: LocalJob) -> None:
        """Train one job from start to end, and set its `outcome`."""
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
            job.outcome = make_fit(
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
        """Pause the step that calls this until its gradient has been computed; returns loss and
        gradient."""
        assert job.passes is not None and job.asker is not None
        samples = len(batch[1])
        run = getcurrent()
        graded = torch.is_grad_enabled()
        forward, backward = job.passes
        job.passes = forward + samples, backward + samples
        if samples > self.size or not training:  # a stacked pass cannot compute it
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
        """Compute the loss, shape (), and the gradient (D,) of each request; the gradient is 0 for
        blocks that do not train."""
        stack = self.stack
        size = self.size
        answers: list[tuple[Tensor, Tensor]] = []
        for begin in range(0, len(requests), stack.width):
            together = requests[begin : begin + stack.width]
            width = pass_width(len(together))
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
