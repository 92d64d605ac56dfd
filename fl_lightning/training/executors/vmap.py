"""Trains several clients in one pass, by `torch.func` on stacked models."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from fl_lightning.core import PLAIN, Fit, Tensors
from fl_lightning.data import Part
from fl_lightning.foundation.metric import ACCURACY
from fl_lightning.training.executors.base import (
    Executor,
    ExecutorSpec,
    LocalJob,
    Scored,
    ScoreJob,
    equal_but_rounding,
)
from fl_lightning.training.executors.feed import Feed, lay_out
from fl_lightning.training.executors.gradients import GradientSteps
from fl_lightning.training.executors.own import LossPass, MethodLosses, largest_batch
from fl_lightning.training.executors.replay import Recordings
from fl_lightning.training.executors.stack import Stack, Trained
from fl_lightning.training.executors.widths import WIDTHS, pass_width, same_bits_at_all_widths
from fl_lightning.training.local import autocast
from fl_lightning.training.module import ClientModule
from fl_lightning.training.optimizers import LocalOptimizer

MOST_IN_PASS = 32
"""Largest number of models in a pass on an accelerator, where each needs memory for four models and
its batches."""
SCORED = 32
"""Number of samples in each slot when models are scored. Ours: a client of the digits has some 30
test samples."""
MOST_SCORED = 256
"""Largest number of samples in a part that is scored in stacked passes: every `SCORED` samples need
a copy of the model."""
AHEAD = 16
"""Number of steps whose batches are prepared together, by one copy for each client."""


class Vmap(Executor):
    """Trains several clients in one pass, by `torch.func` on stacked models. The operations are
    recorded once for each shape.

    A pass has the shape [width, largest batch, ...]; smaller batches are padded with samples of
    weight 0. On a CPU the width is one of `WIDTHS`, and `why_not_stackable` has tested that results
    on this machine do not depend on width and slot. On an accelerator there is one width, and a
    client's position in the stack is `LocalJob.place`. So a client's results depend neither on the
    other clients in the pass nor on the number of ranks. A `PureLoss` is stacked on a CPU only, in
    batches without padding (`own.py`).
    """

    name = "vmap"

    def __init__(
        self,
        fabric: Fabric,
        module: ClientModule,
        optimizer: LocalOptimizer,
        spec: ExecutorSpec,
    ) -> None:
        super().__init__(fabric, module, optimizer)
        self.on_cpu = fabric.device.type == "cpu"
        """Whether passes have several widths and contain jobs of one kind, and methods' own losses
        and scores are stacked, too."""
        self.spec = spec
        self.at_once = stack_width(spec.cohort, fabric.device.type)
        self.stack = Stack(module, spec.config, self.at_once, spec.dtype)
        self._cast = autocast(fabric)
        self._same_bits: bool | None = None
        """Whether results are the same at all widths and in all slots; None: not tested yet."""
        self._recordings = Recordings(module)
        self._reached = module.trainable
        """Bool: mask of the parameters, in the order of the blocks, that the task loss depends
        on."""
        self._own = MethodLosses(module, self.stack, self._cast)
        self._steps = GradientSteps(self.stack, spec.largest_batch, self.gradients)
        model = module.model
        metric = module.metric

        def loss(
            trained: Tensors,
            fixed: Tensors,
            x: Tensor,
            y: Tensor,
            weight: Tensor,
        ) -> Tensor:
            scores = functional_call(model, trained | fixed, (x,))
            return (metric.loss(scores, y, "none") * weight).sum()

        self._differentiated = vmap(grad_and_value(loss))

    # ---------------------------------------------------------------- one step

    def gradients(
        self,
        width: int,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        cast: bool = True,
    ) -> tuple[list[Tensor], Tensor]:
        """Compute the gradients of the first `width` models on their batches, a tensor for each
        parameter, and their losses (width,).

        Args:
            x, y: batches, (width, size, ...).
            weight: weights of the samples, (width, size).
            cast: whether to use the run's autocast.
        """
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

    def why_not_stackable(
        self,
        x: Tensor,
        y: Tensor,
        gradients: Sequence[Tensor | None],
        module: ClientModule,
    ) -> str | None:
        """Run a stacked pass of the model of `module`; returns the reason why the model cannot be
        stacked, or None if it can. Also stores which parameters the task loss depends on.

        Args:
            x, y: a batch, not stacked.
            gradients: the gradient of each trainable parameter on this batch, computed in the loop;
                None: the loss does not depend on the parameter.
        """
        stack = self.stack
        binding = module.binding
        stack.place([(binding.vector, binding.buffers)] * stack.width)
        self._reached = module.trainable.copy()
        self._reached[module.trainable] = [g is not None for g in gradients]
        stack.choose(self._reached)
        reached = [g for g in gradients if g is not None]
        width = stack.width
        if self.on_cpu:
            width = WIDTHS[0]
        size = self.spec.largest_batch
        n = len(y)
        x = torch.cat([x, x[:1].expand(size - n, *x.shape[1:])])
        y = torch.cat([y, y[:1].expand(size - n, *y.shape[1:])])
        batch = x.expand(width, *x.shape), y.expand(width, *y.shape)
        weight = stack.losses.new_zeros(width, size)
        weight[:, :n] = 1 / n
        try:
            self.gradients(width, *batch, weight)  # with autocast, which may fail, too
            stacked, _ = self.gradients(width, *batch, weight, cast=False)
        except Exception as error:  # torch.func does not support every forward pass
            first_line = f"{type(error).__name__}: {error}".splitlines()[0]
            return f"torch.func cannot run the model ({first_line})"
        if not equal_but_rounding([gradient[0] for gradient in stacked], reached):
            return "the model does not treat the samples of a batch one by one"
        if self.on_cpu and self._same_bits is None:
            self._same_bits = self._test_widths(x, y)
        if self._same_bits is False:
            return "on this machine a model's results depend on the number of stacked models"
        return None

    def _test_widths(self, x: Tensor, y: Tensor) -> bool:
        """Test whether results are bit-identical at each width and in each slot, on batches with
        the shapes of x and y."""
        shape = self.stack.width, len(y)
        weight = self.stack.losses.new_full(shape, 1 / len(y))

        def run(
            size: int,
            images: Tensor,
            labels: Tensor,
        ) -> list[Tensor]:
            gradients, losses = self.gradients(size, images, labels, weight[:size])
            return [*gradients, losses]

        return same_bits_at_all_widths(self.stack.parameters, x, y, run)

    # ---------------------------------------------------------------- scores

    def can_score(self, part: Part) -> bool:
        """Whether `score` can score models on `part`: only on a CPU, and if the part is small and
        in memory."""
        fits = 0 < len(part) <= MOST_SCORED
        return self.on_cpu and fits and part.tensors is not None

    @torch.no_grad()
    def score(self, jobs: Sequence[ScoreJob]) -> list[Scored]:
        """Score all models in stacked passes. Each position in the stack gets `SCORED` samples: a
        model whose part has more samples takes several positions."""
        stack = self.stack
        xs, ys = zip(*(job.part.tensors or () for job in jobs), strict=True)
        chunks = []
        for job, x in zip(jobs, xs, strict=True):
            chunks += [(job, samples) for samples in x.split(SCORED)]
        outputs = []
        for begin in range(0, len(chunks), stack.width):
            chosen = chunks[begin : begin + stack.width]
            width = pass_width(len(chosen))
            stack.place([(job.vector, job.buffers) for job, _ in chosen])
            inputs = [samples for _, samples in chosen]
            x = inputs[0].new_zeros(width, SCORED, *inputs[0].shape[1:])
            filled = [slot[: len(samples)] for slot, samples in zip(x, inputs, strict=False)]
            torch._foreach_copy_(filled, inputs)
            for slot, samples in zip(self._outputs(width, x), inputs, strict=False):
                outputs.append(slot[: len(samples)])
        scores = torch.cat(outputs)
        sizes = [len(job.part) for job in jobs]
        metric = self.module.metric
        totals = metric.totals(scores.split(sizes), ys, self.module.num_classes)
        predicted: Sequence[Tensor | None] = [None] * len(jobs)
        if metric is ACCURACY and scores.ndim == 2:
            predicted = scores.argmax(1).split(sizes)
        return list(map(Scored, totals, predicted))

    def _outputs(self, width: int, x: Tensor) -> Tensor:
        """Return the outputs of the first `width` models on inputs x (width, SCORED, ...), in
        evaluation mode."""
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

    def can_train(self, job: LocalJob) -> bool:
        """Whether the executor can train this job. It cannot if steps are protected by DP-SGD, if a
        batch is larger than those of its passes, or if the method's own loss or step cannot be
        stacked."""
        fits = largest_batch(job) <= self.spec.largest_batch
        if job.asker is not None:
            plain = job.trains is None and job.private is None and job.objective is PLAIN
            return fits and plain and self.on_cpu and self._cast is nullcontext
        if job.alone:
            return False
        if job.own:
            return self.on_cpu and self._own.stackable(job) is not None
        return fits

    def train(self, jobs: Sequence[LocalJob]) -> list[Fit]:
        """Train all jobs. On a CPU, a pass contains jobs with the same loss, terms and trained
        blocks; those with the most batches come first.

        Raises:
            ValueError: a job cannot be stacked.
        """
        if not all(map(self.can_train, jobs)):
            raise ValueError(
                "a batch is too large, or a loss or step cannot be stacked: train it in the loop"
            )
        self.module.model.train()
        with_steps = [job for job in jobs if job.asker is not None]
        if with_steps:
            self.stack.choose(self._reached)
            self._steps.train(with_steps)
        for job in with_steps:
            if isinstance(job.outcome, Exception):
                raise job.outcome
        trained: dict[int, Trained] = {}
        others = {k: job for k, job in enumerate(jobs) if job.asker is None}
        for numbers in self._passes(others):
            trained |= self._pass({k: jobs[k] for k in numbers})
        fits = []
        for k, job in enumerate(jobs):
            if k not in trained:
                assert isinstance(job.outcome, Fit)
                fits.append(job.outcome)
                continue
            fit = trained[k].write(job)
            loss = None
            if job.own:
                loss = self._own.stackable(job)
            if loss is not None:
                forward, backward = loss.passes
                job.passes = forward * fit.samples, backward * fit.samples
            fits.append(fit)
        return fits

    def _passes(self, jobs: Mapping[int, LocalJob]) -> Iterator[list[int]]:
        """Yield the numbers of the jobs in each pass, in the order of their slots; on a CPU also
        sets their `place`."""
        if not self.on_cpu:
            yield list(jobs)
            return
        steps = {}
        for k, job in jobs.items():
            pieces = job.schedule.pieces(len(job.part))
            steps[k] = sum(count for _, _, count in pieces)
        kinds: dict[Hashable, list[int]] = {}
        for k in sorted(jobs, key=lambda k: -steps[k]):
            job = jobs[k]
            objective = job.objective
            blocks = None
            if job.trains is not None:
                blocks = job.trains.tobytes()
            loss = None
            if job.own:
                loss = self._own.stackable(job)
            key = None
            if loss is not None:
                key = loss.key
            kind = (objective.has_proximal, objective.linear is not None, blocks, key)
            kinds.setdefault(kind, []).append(k)
        for alike in kinds.values():
            for first in range(0, len(alike), self.stack.width):
                numbers = alike[first : first + self.stack.width]
                for place, k in enumerate(numbers):
                    jobs[k].place = place
                yield numbers

    def _pass(self, jobs: dict[int, LocalJob]) -> dict[int, Trained]:
        """Train the jobs of one pass; returns the results without writing to the jobs."""
        stack = self.stack
        trained: dict[int, Trained] = {}
        alike = list(jobs.values())
        own_pass = None
        size = self.spec.largest_batch
        reached = self._reached
        if alike[0].own:
            own_pass = LossPass(self._own, alike)
            size = largest_batch(alike[0])
            reached = own_pass.reached
        stack.load(alike, reached)
        feeds = {k: Feed(job, size) for k, job in jobs.items()}
        ends: dict[int, list[int]] = {}
        for k, feed in feeds.items():
            ends.setdefault(len(feed), []).append(k)
        steps = max(ends)
        for step in range(steps + 1):
            ended = ends.get(step, [])
            if ended:  # copy results before a later step overwrites their slots
                samples = [sum(feeds[k].counts) for k in ended]
                results = stack.take([jobs[k] for k in ended], step, samples)
                trained |= zip(ended, results, strict=True)
            rest = {jobs[k].place: feed for k, feed in feeds.items() if k not in trained}
            if not rest:
                break
            width = stack.width
            if self.on_cpu:
                width = pass_width(len(rest))
            if step % AHEAD == 0:
                count = min(AHEAD, steps - step)
                batches = lay_out(
                    rest,
                    width,
                    step,
                    count,
                    self.spec.dtype,
                )
            x, y, weight = (tensor[:width, step % AHEAD] for tensor in batches)
            if own_pass is None:
                self._step(width, x, y, weight)
                continue
            counts = [rest[slot].counts[step] if slot in rest else 0 for slot in range(width)]
            own_pass.step(width, x, y, counts)
        return trained

    def _step(
        self,
        width: int,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
    ) -> None:
        """Take one SGD step with each of the first `width` models; arguments as in `gradients`."""
        narrow = self.stack.narrow(width)
        gradients, losses = self.gradients(width, x, y, weight)
        torch._foreach_copy_(narrow.gradient_views, gradients)
        narrow.descend(losses)


def stack_width(cohort: int, device: str) -> int:
    """Return the number of slots in a stack for a cohort of this size on a type of device."""
    if device == "cpu":
        return pass_width(cohort)
    groups = -(-cohort // MOST_IN_PASS)
    return max(2, -(-cohort // groups))  # a single model's convolutions use another kernel
