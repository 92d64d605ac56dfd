"""Many clients at once: `torch.func` over stacked models."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import cast

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from fl_lightning.core.phase import PLAIN, Fit
from fl_lightning.data import Part
from fl_lightning.foundation.metric import ACCURACY
from fl_lightning.training.executors.base import (
    TOLERANCE,
    Executor,
    ExecutorSpec,
    LocalJob,
    Scored,
    ScoreJob,
)
from fl_lightning.training.executors.even import WIDTHS, even, widened
from fl_lightning.training.executors.feed import Feed, laid_out
from fl_lightning.training.executors.gradients import OwnSteps
from fl_lightning.training.executors.own import OwnLosses, OwnPass, whole_batch
from fl_lightning.training.executors.replay import Recordings
from fl_lightning.training.executors.stack import Stack, Trained
from fl_lightning.training.local import autocast
from fl_lightning.training.module import ClientModule
from fl_lightning.training.optimizers import LocalOptimizer

MOST_BESIDE = 32
"""Models of one pass on an accelerator, where each takes memory for four models and its batches."""
SCORED = 32
"""Samples of a slot where models are scored. Ours: a client of the digits has some 30 test
samples."""
MOST_SCORED = 256
"""Samples of a part that is scored in slots: each takes a copy of the model."""
AHEAD = 16
"""Steps whose batches `vmap` lays out together: one copy for each client and so many steps, not one
for each step."""


class Vmap(Executor):
    """Many clients at once: `torch.func` over stacked models, its operations written down once for
    each shape.

    A pass has the shape [width, largest batch, ...]: what is missing is filled up with copies of
    weight 0. On a CPU it has one of the `WIDTHS`, for which it has been tested on this machine that
    a model's numbers depend neither on the width nor on the slot (`unlike`). An accelerator's
    passes have one width, and a client's slot is its place in the cohort. Either way its numbers do
    not depend on who trains beside it, nor on the number of ranks. A `PureLoss` is stacked on a
    CPU, in batches as large as they are (`own.py`).
    """

    name = "vmap"

    def __init__(
        self, fabric: Fabric, module: ClientModule, optimizer: LocalOptimizer, spec: ExecutorSpec
    ) -> None:
        self.sorts = fabric.device.type == "cpu"
        super().__init__(fabric, module, optimizer)
        self.spec = spec
        self.at_once = width_of(spec.cohort, fabric.device.type)
        self.stack = Stack(module, spec.config, self.at_once, spec.dtype)
        self._cast = autocast(fabric)
        self._even: bool | None = None
        """Whether a model's numbers are the same in all passes; None: it has not been tested."""
        self._recordings = Recordings(module)
        self._reached: np.ndarray | None = None
        """Bool: the parameters, in the order of the blocks, that the task loss depends on; None:
        all."""
        self._own = OwnLosses(module, self.stack, self._cast)
        self._steps = OwnSteps(self.stack, spec.largest_batch, self.gradients)
        model = module.model
        metric = module.metric

        def loss(
            trained: dict[str, Tensor],
            fixed: dict[str, Tensor],
            x: Tensor,
            y: Tensor,
            weight: Tensor,
        ) -> Tensor:
            return (
                metric.loss(functional_call(model, trained | fixed, (x,)), y, "none") * weight
            ).sum()

        self._differentiated = vmap(grad_and_value(loss))

    # ---------------------------------------------------------------- one step

    def gradients(
        self, width: int, x: Tensor, y: Tensor, weight: Tensor, cast: bool = True
    ) -> tuple[list[Tensor], Tensor]:
        """Gradients of the first `width` models on their batches, one tensor for each parameter,
        and losses (width,); with `cast` in the precision of the run."""
        narrow = self.stack.narrow(width)
        names = self.stack.names
        fixed = list(self.stack.fixed)

        def step(*tensors: Tensor) -> list[Tensor]:
            trained = dict(zip(names, tensors[: len(names)], strict=True))
            rest = dict(zip(fixed, tensors[len(names) : -3], strict=True))
            with self._cast() if cast else nullcontext():
                gradients, losses = self._differentiated(trained, rest, *tensors[-3:])
            return [*gradients.values(), losses]

        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in (x, y, weight)]
        inputs = [*narrow.views, *narrow.fixed.values(), x, y, weight]
        *gradients, losses = self._recordings.run((cast, *names, *shapes), step, inputs)
        return gradients, losses

    def unlike(
        self, x: Tensor, y: Tensor, gradients: Sequence[Tensor | None], module: ClientModule
    ) -> str | None:
        """Why the model of `module` cannot be trained so, if it cannot: as it is bound, (x, y) must
        have these `gradients` of what trains (None: the loss does not depend on it)."""
        stack = self.stack
        bound = module.binding
        assert bound.vector is not None
        stack.place([(bound.vector, bound.buffers)] * stack.width)
        self._reached = module.trainable.copy()
        self._reached[module.trainable] = [g is not None for g in gradients]
        stack.choose(self._reached)
        reached = [g for g in gradients if g is not None]
        width = WIDTHS[0] if self.sorts else stack.width
        size = self.spec.largest_batch
        n = len(y)
        x, y = (
            torch.cat([tensor, tensor[:1].expand(size - n, *tensor.shape[1:])]) for tensor in (x, y)
        )
        batch = x.expand(width, *x.shape), y.expand(width, *y.shape)
        weight = torch.zeros(width, size, dtype=losses_type(self.spec.dtype), device=x.device)
        weight[:, :n] = 1 / n
        try:
            self.gradients(width, *batch, weight)  # to see that it runs
            measured, _ = self.gradients(width, *batch, weight, cast=False)
        except Exception as error:  # whatever a user's forward pass does that torch.func cannot
            return (
                f"torch.func cannot run the model ({type(error).__name__}: {error}".splitlines()[0]
                + ")"
            )
        for ours, theirs in zip(measured, reached, strict=True):
            if (ours[0] - theirs).norm() > TOLERANCE[theirs.dtype] * (1 + theirs.norm()):
                return "the model does not treat the samples of a batch one by one"
        if self.sorts and self._even is None:
            self._even = self._same_everywhere(x, y)
        if self._even is False:
            return "on this machine a model's numbers depend on how many are trained beside it"
        return None

    def _same_everywhere(self, x: Tensor, y: Tensor) -> bool:
        """Whether models have the same bits at each width, and in each slot; batches are made up,
        after (x, y)."""
        weight = torch.full(
            (self.stack.width, len(y)), 1 / len(y), dtype=losses_type(self.spec.dtype)
        )

        def run(size: int, images: Tensor, labels: Tensor) -> list[Tensor]:
            slopes, losses = self.gradients(size, images, labels, weight[:size])
            return [*slopes, losses]

        return even(self.stack.parameters, x, y, run)

    # ---------------------------------------------------------------- scores

    def scores(self, part: Part) -> bool:
        """Small parts that lie in memory, on a CPU."""
        return self.sorts and 0 < len(part) <= MOST_SCORED and part.tensors is not None

    @torch.no_grad()
    def score(self, jobs: Sequence[ScoreJob]) -> list[Scored]:
        """All at once, `SCORED` samples of a model in each slot."""
        chunks = [
            (k, first) for k, job in enumerate(jobs) for first in range(0, len(job.part), SCORED)
        ]
        stack = self.stack
        sizes = [len(job.part) for job in jobs]
        outputs = list[Tensor]()
        xs, ys = zip(*(job.part.tensors or () for job in jobs), strict=True)
        for begin in range(0, len(chunks), stack.width):
            some = chunks[begin : begin + stack.width]
            width = widened(len(some))
            stack.place([(jobs[k].vector, jobs[k].buffers) for k, _ in some])
            x = xs[0].new_zeros(width, SCORED, *xs[0].shape[1:])
            inputs = [xs[k][first : first + SCORED] for k, first in some]
            torch._foreach_copy_(
                [slot[: len(own)] for slot, own in zip(x, inputs, strict=False)], inputs
            )
            answers = self._outputs(width, x)
            outputs += [slot[: len(own)] for slot, own in zip(answers, inputs, strict=False)]
        every = torch.cat(outputs)
        totals = self.module.metric.totals(every.split(sizes), ys, self.module.num_classes)
        classified = self.module.metric is ACCURACY and every.ndim == 2
        predicted = every.argmax(1).split(sizes) if classified else [None] * len(jobs)
        return list(map(Scored, totals, predicted))

    def _outputs(self, width: int, x: Tensor) -> Tensor:
        """What the first `width` models make of their inputs x (width, SCORED, ...), in evaluation
        mode."""
        narrow = self.stack.narrow(width)
        names = [*self.stack.names, *self.stack.fixed]
        model = self.module.model

        def forward(*tensors: Tensor) -> list[Tensor]:
            training = model.training
            model.eval()
            with self._cast():
                passed = vmap(lambda named, x: functional_call(model, named, (x,)))
                scores = passed(dict(zip(names, tensors[:-1], strict=True)), tensors[-1])
            model.train(training)
            return [scores]

        key = "scores", *names, *x.shape
        [outputs] = self._recordings.run(key, forward, [*narrow.views, *narrow.fixed.values(), x])
        return outputs

    # ---------------------------------------------------------------- training

    def takes(self, job: LocalJob) -> bool:
        """Not private steps, batches larger than its passes, or an own loss or step that cannot be
        stacked."""
        if job.asker is not None:
            plain = job.trains is None and job.private is None and self._cast is nullcontext
            return (
                plain
                and self.sorts
                and job.objective is PLAIN
                and whole_batch(job) <= self.spec.largest_batch
            )
        if job.alone:
            return False
        if job.own:
            return self.sorts and self._own.known(job) is not None
        return whole_batch(job) <= self.spec.largest_batch

    def train(self, jobs: Sequence[LocalJob]) -> list[Fit]:
        """All at once; of many, those together that are alike in what trains, and in the number of
        their batches.

        Raises:
            ValueError: a job is for the loop.
        """
        if not all(map(self.takes, jobs)):
            raise ValueError(
                "what is larger than its batches, or has a loss or step that cannot be stacked: "
                "the loop"
            )
        self.module.model.train()
        own = [job for job in jobs if job.asker is not None]
        if own:
            self.stack.choose(self.module.trainable if self._reached is None else self._reached)
            self._steps.train(own)
        for job in own:
            if isinstance(job.outcome, Exception):
                raise job.outcome
        trained: dict[int, Trained] = {}
        for some in self._passes({k: job for k, job in enumerate(jobs) if job.asker is None}):
            trained |= self._pass({k: jobs[k] for k in some})
        for k, one in trained.items():
            known = self._own.known(jobs[k]) if jobs[k].own else None
            if known is not None:
                jobs[k].passes = (
                    known.passes[0] * one.fit.samples,
                    known.passes[1] * one.fit.samples,
                )
        fits = [
            job.outcome if job.outcome is not None else trained[k].write(job)
            for k, job in enumerate(jobs)
        ]
        return cast("list[Fit]", fits)

    def _passes(self, jobs: Mapping[int, LocalJob]) -> Iterator[list[int]]:
        """Which jobs, by their numbers, are in one pass, in the order of their slots."""
        if not self.sorts:
            yield list(jobs)
            return
        steps = {
            k: sum(count for _, _, count in job.schedule.pieces(len(job.part)))
            for k, job in jobs.items()
        }
        kinds: dict[Hashable, list[int]] = {}
        for k in sorted(jobs, key=lambda k: -steps[k]):
            objective = jobs[k].objective
            trains = jobs[k].trains
            kind: Hashable = (
                objective.pulls,
                objective.linear is not None,
                None if trains is None else trains.tobytes(),
            )
            if jobs[k].own:
                known = self._own.known(jobs[k])
                kind = kind, known and known.key
            kinds.setdefault(kind, []).append(k)
        for alike in kinds.values():
            for first in range(0, len(alike), self.stack.width):
                some = alike[first : first + self.stack.width]
                for place, k in enumerate(some):
                    jobs[k].place = place
                yield some

    def _pass(self, jobs: dict[int, LocalJob]) -> dict[int, Trained]:
        """Train so many as there are slots; nothing of the jobs is written to."""
        stack = self.stack
        trained = dict[int, Trained]()
        some = list(jobs.values())
        own = OwnPass(self._own, some) if some[0].own else None
        size = self.spec.largest_batch if own is None else whole_batch(some[0])
        stack.load(some, self._reached if own is None else own.reached)
        feeds = {k: Feed(job, size) for k, job in jobs.items()}
        ends: dict[int, list[int]] = {}
        for k, feed in feeds.items():
            ends.setdefault(len(feed), []).append(k)
        for step in range(max(ends) + 1):
            if ended := ends.get(step):  # before a step of others writes over their slots
                taken = stack.take(
                    [jobs[k] for k in ended], step, [sum(feeds[k].counts) for k in ended]
                )
                trained |= zip(ended, taken, strict=True)
            rest = {jobs[k].place: feed for k, feed in feeds.items() if k not in trained}
            if not rest:
                break
            width = widened(len(rest)) if self.sorts else stack.width
            if step % AHEAD == 0:
                count = min(AHEAD, max(ends) - step)
                laid = laid_out(rest, width, step, count, self.spec.dtype)
            x, y, weight = (tensor[:width, step % AHEAD] for tensor in laid)
            if own is None:
                self._step(width, x, y, weight)
            else:
                own.step(
                    width,
                    x,
                    y,
                    [rest[slot].counts[step] if slot in rest else 0 for slot in range(width)],
                )
        return trained

    def _step(self, width: int, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """A step of the first `width` models."""
        narrow = self.stack.narrow(width)
        gradients, losses = self.gradients(width, x, y, weight)
        torch._foreach_copy_(narrow.gradient_views, gradients)
        narrow.descend(losses)


def losses_type(dtype: torch.dtype) -> torch.dtype:
    """In which losses of models of `dtype` are weighted."""
    return torch.promote_types(dtype, torch.float32)


def width_of(cohort: int, device: str) -> int:
    """Models of a pass for a cohort on a kind of device."""
    if device == "cpu":
        return widened(cohort)
    groups = -(-cohort // MOST_BESIDE)
    return max(2, -(-cohort // groups))  # of one model, convolutions take another kernel
