"""Methods' own losses in stacked passes: pure functions of a model, a batch and a client's tensors.

A loss may be any function of its batch, so no batch is filled up. In each step the clients whose
batch is whole go through one stacked pass; a smaller one, the rest of an epoch, is stepped by
itself, its operations written down too.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fl_lightning.core import PureLoss, Tensors
from fl_lightning.foundation import log
from fl_lightning.foundation.device import no_draws, random_states, same_states
from fl_lightning.foundation.errors import redact
from fl_lightning.training.executors.base import TOLERANCE, LocalJob
from fl_lightning.training.executors.even import WIDTHS, even
from fl_lightning.training.executors.replay import Recordings
from fl_lightning.training.executors.stack import Narrow, Stack
from fl_lightning.training.module import ClientModule, Passes


class _Bound(nn.Module):
    """The module as `functional_call` takes it: within a call its model has the tensors that are
    given."""

    def __init__(self, module: ClientModule) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, function: Callable[..., Tensor], tensors: dict[str, Tensor], x: Tensor, y: Tensor
    ) -> Tensor:
        return function(tensors, self.module, (x, y))


@dataclass(frozen=True)
class Known:
    """What has been seen of a loss."""

    key: Hashable
    reached: np.ndarray
    """Bool: the parameters, in the order of the blocks, that the loss depends on; the others do not
    train."""
    passes: tuple[float, float]
    """For each sample: how many go through the model, and back."""


class OwnLosses:
    """The own losses that a stack has met, and their operations.

    `cast` gives the precision of the run.
    """

    def __init__(
        self, module: ClientModule, stack: Stack, cast: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.module = module
        self.stack = stack
        self._cast = cast
        self._known: dict[Hashable, Known | None] = {}
        self._recordings = Recordings(module)
        self._bound = _Bound(module)

    def known(self, job: LocalJob) -> Known | None:
        """What its loss is, if it can be stacked: tried, the first time, on a copy of its model and
        its first batch."""
        key = _key(job)
        loss = job.pure
        if key is None or loss is None:
            return None
        if key not in self._known:
            self._known[key] = self._tried(key, job, loss)
        return self._known[key]

    # ---------------------------------------------------------------- steps

    def stacked(
        self,
        key: Hashable,
        loss: PureLoss,
        narrow: Narrow,
        tensors: Sequence[Tensor],
        x: Tensor,
        y: Tensor,
    ) -> list[Tensor]:
        """Gradients and losses (width,) of all models in `narrow` on batches x, y (width, n,
        ...)."""
        inputs = [*narrow.views, *narrow.fixed.values(), *tensors, x, y]
        return self._run((key, "stacked", tuple(x.shape)), loss, inputs, vmap)

    def single(
        self, key: Hashable, loss: PureLoss, narrow: Narrow, slot: int, x: Tensor, y: Tensor
    ) -> list[Tensor]:
        """Gradients and loss () of the model in a slot on one batch x, y (n, ...)."""
        models = [view[slot] for view in (*narrow.views, *narrow.fixed.values())]
        # aligned, wherever it lay
        inputs = [*models, *(t.clone() for t in (*loss.tensors.values(), x, y))]
        return self._run((key, "single", tuple(x.shape)), loss, inputs, lambda function: function)

    def _run(
        self, key: Hashable, loss: PureLoss, inputs: Sequence[Tensor], over: Callable[[Any], Any]
    ) -> list[Tensor]:
        names = list(self.stack.names)
        fixed = list(self.stack.fixed)
        of_client = list(loss.tensors)

        def value(trained: Tensors, rest: Tensors, tensors: Tensors, *batch: Tensor) -> Tensor:
            named = {f"module.model.{name}": x for name, x in {**trained, **rest}.items()}
            result: Tensor = functional_call(self._bound, named, (loss.function, tensors, *batch))
            return result

        def step(*all_of_them: Tensor) -> list[Tensor]:
            values = iter(all_of_them)
            parts = [{name: next(values) for name in some} for some in (names, fixed, of_client)]
            with self._cast():
                gradients, losses = over(grad_and_value(value))(*parts, *values)
            return [*gradients.values(), losses]

        with warnings.catch_warnings():
            # torch would go slot by slot
            warnings.filterwarnings("error", "There is a performance drop")
            return self._recordings.run((key, tuple(names)), step, inputs)

    # ---------------------------------------------------------------- whether it can be stacked

    def _tried(self, key: Hashable, job: LocalJob, loss: PureLoss) -> Known | None:
        """`known`; where it cannot be stacked a line says why."""
        module = self.module
        vector = module.binding.vector
        buffers = module.binding.buffers
        try:
            with no_draws(module.device_of_model):
                known, gradients, why = self._alone(key, job, loss)
                why = why or self._unlike(known, gradients, job, loss)
        except Exception as error:  # whatever a loss does that torch.func cannot, or that fails
            why = f"{type(error).__name__}: {redact(str(error))}".splitlines()[0]
        finally:
            module.train_only(None)
            if vector is not None:
                module.binding.bind(vector, buffers)
        if why is None:
            return known
        name = getattr(loss.function, "__qualname__", "it")
        log.say(f"fabric.executor vmap: the loss {name} trains in the loop ({why})")
        return None

    def _alone(
        self, key: Hashable, job: LocalJob, loss: PureLoss
    ) -> tuple[Known, list[Tensor], str | None]:
        """What the loop makes of the loss: its gradients of what it reaches; and why it is not
        pure, if it is not."""
        module, (x, y) = self.module, _batch(job)
        module.binding.bind(job.vector.clone(), [b.clone() for b in job.buffers])
        module.train_only(job.trains)
        module.model.train()
        parameters = module.binding.parameters
        trained = [p for p in parameters if p.requires_grad]
        before = [b.clone() for b in module.model.buffers()]
        states = random_states(module.device_of_model)
        with Passes(module) as passes, torch.enable_grad():
            gradients = iter(torch.autograd.grad(loss(module, (x, y)), trained, allow_unused=True))
        by_parameter = [next(gradients) if p.requires_grad else None for p in parameters]
        reached = np.array([g is not None for g in by_parameter])
        known = Known(key, reached, (passes.forward / len(y), passes.backward / len(y)))
        why = None
        if not same_states(states, random_states(module.device_of_model)):
            why = "it draws random numbers"
        elif not all(map(torch.equal, before, module.model.buffers())):
            why = "it writes to the model's buffers"
        return known, [g for g in by_parameter if g is not None], why

    def _unlike(
        self, known: Known, gradients: Sequence[Tensor], job: LocalJob, loss: PureLoss
    ) -> str | None:
        """Why passes come to other gradients, or to some that depend on who is beside; None: they
        do not."""
        stack, (x, y) = self.stack, _batch(job)
        stack.choose(known.reached)
        stack.place([(job.vector, job.buffers)] * stack.width)

        def run(size: int, images: Tensor, labels: Tensor) -> list[Tensor]:
            given = [t.expand(size, *t.shape).contiguous() for t in loss.tensors.values()]
            return self.stacked(known.key, loss, stack.narrow(size), given, images, labels)

        few = WIDTHS[0]
        stacked = run(few, *(t.expand(few, *t.shape).contiguous() for t in (x, y)))
        for measured in (
            [g[0] for g in stacked[:-1]],
            self.single(known.key, loss, stack.narrow(few), 0, x, y)[:-1],
        ):
            for ours, theirs in zip(measured, gradients, strict=True):
                if (ours - theirs).norm() > TOLERANCE[theirs.dtype] * (1 + theirs.norm()):
                    return "stacked it comes to other gradients"
        alike = even(stack.parameters, x, y, run)
        return None if alike else "on this machine its numbers depend on how many train beside it"


class OwnPass:
    """Steps of the jobs of one pass, which have the same loss."""

    def __init__(self, losses: OwnLosses, jobs: Sequence[LocalJob]) -> None:
        first = losses.known(jobs[0])
        assert first is not None
        self.losses = losses
        self.key = first.key
        self.reached = first.reached
        self._losses = {job.place: job.pure for job in jobs if job.pure is not None}
        some = self._losses[jobs[0].place]
        at = [self._losses.get(slot, some) for slot in range(losses.stack.width)]
        self._tensors = [torch.stack([loss.tensors[name] for loss in at]) for name in some.tensors]

    def step(self, width: int, x: Tensor, y: Tensor, counts: Sequence[int]) -> None:
        """A step of the first `width` models, on so many of the samples x, y (width, whole batch,
        ...) of each."""
        narrow = self.losses.stack.narrow(width)
        whole = x.shape[1]
        some = next(iter(self._losses.values()))
        values = self.losses.stack.losses.new_zeros(width)
        if whole in counts:
            tensors = [tensor[:width] for tensor in self._tensors]
            *gradients, of_all = self.losses.stacked(
                self.key, some, narrow, tensors, x.contiguous(), y.contiguous()
            )
            torch._foreach_copy_(narrow.gradient_views, gradients)
            values.copy_(of_all)
        for slot, count in enumerate(counts):
            if 0 < count < whole:
                loss = self._losses[slot]
                *gradients, value = self.losses.single(
                    self.key, loss, narrow, slot, x[slot, :count], y[slot, :count]
                )
                torch._foreach_copy_([view[slot] for view in narrow.gradient_views], gradients)
                values[slot] = value
        narrow.descend(values)


def whole_batch(job: LocalJob) -> int:
    """Samples of the largest batch of a job."""
    return min(job.schedule.batch_size, len(job.part))


def _batch(job: LocalJob) -> tuple[Tensor, Tensor]:
    assert job.part.tensors is not None
    x, y = (tensor[: whole_batch(job)] for tensor in job.part.tensors)
    return x, y


def _key(job: LocalJob) -> Hashable | None:
    """What is the same for jobs that may be in one pass; None: it can be in none."""
    loss = job.pure
    if loss is None or job.part.tensors is None or not len(job.part):
        return None
    function = loss.function
    same = (function.__func__, function.__self__) if inspect.ismethod(function) else function
    try:
        hash(same)
    except TypeError:
        return None
    tensors = tuple((name, tuple(t.shape), t.dtype) for name, t in loss.tensors.items())
    batch = whole_batch(job), *((tuple(t.shape[1:]), t.dtype) for t in job.part.tensors)
    return same, tensors, batch, None if job.trains is None else job.trains.tobytes()
