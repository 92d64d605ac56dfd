"""Runs methods' own losses (`PureLoss`) in stacked passes.

A loss may depend on its whole batch, so batches are not padded. In each step, clients with a batch
of full size go through one stacked pass; each smaller batch, the last of an epoch, goes through a
pass of its own. The operations of both are recorded.
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
from fl_lightning.foundation.device import random_states, rng_restored, same_states
from fl_lightning.foundation.errors import redact
from fl_lightning.training.executors.base import LocalJob, equal_but_rounding
from fl_lightning.training.executors.replay import Recordings
from fl_lightning.training.executors.stack import Narrow, Stack
from fl_lightning.training.executors.widths import WIDTHS, same_bits_at_all_widths
from fl_lightning.training.module import ClientModule, Passes


class _Bound(nn.Module):
    """Wraps the module for `functional_call`, which replaces its model's tensors within a call."""

    def __init__(self, module: ClientModule) -> None:
        super().__init__()
        self.module = module

    def forward(
        self,
        function: Callable[..., Tensor],
        tensors: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
    ) -> Tensor:
        return function(tensors, self.module, (x, y))


@dataclass(frozen=True)
class StackableLoss:
    """Properties of a method's loss that can run in stacked passes."""

    key: Hashable
    """Equal for jobs that can be in the same pass."""
    reached: np.ndarray
    """Bool: mask of the parameters, in the order of the blocks, that the loss depends on; the
    others do not train."""
    passes: tuple[float, float]
    """Number of forward and of backward passes through the model for each sample."""


class MethodLosses:
    """Runs methods' own losses in stacked passes, and caches which of them can be stacked.

    Args:
        cast: the autocast context of the run's precision.
    """

    def __init__(
        self,
        module: ClientModule,
        stack: Stack,
        cast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.module = module
        self.stack = stack
        self._cast = cast
        self._stackable: dict[Hashable, StackableLoss | None] = {}
        self._recordings = Recordings(module)
        self._bound = _Bound(module)

    def stackable(self, job: LocalJob) -> StackableLoss | None:
        """Return the properties of a job's loss, or None if it cannot be stacked. A new loss is
        tried once, on a copy of the job's model and its first batch."""
        key = _key(job)
        loss = job.pure
        if key is None or loss is None:
            return None
        if key not in self._stackable:
            self._stackable[key] = self._try(key, job, loss)
        return self._stackable[key]

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
        """Compute the losses (width,) of all models in `narrow`, each on its own batch, and their
        gradients.

        Args:
            key: `StackableLoss.key` of the loss.
            tensors: `PureLoss.tensors` of all clients, (width, ...) each.
            x, y: batches, (width, n, ...).

        Returns:
            The gradient for each trained parameter, (width, *shape), and at the end the losses.
        """
        inputs = [*narrow.views, *narrow.fixed.values(), *tensors, x, y]
        return self._run((key, "stacked", tuple(x.shape)), loss, inputs, vmap)

    def single(
        self,
        key: Hashable,
        loss: PureLoss,
        narrow: Narrow,
        slot: int,
        x: Tensor,
        y: Tensor,
    ) -> list[Tensor]:
        """Compute the loss of one model of the stack on a batch, shape (), and its gradients.

        Args:
            key: `StackableLoss.key` of the loss.
            slot: position of the model in the stack.
            x, y: batch, (n, ...).

        Returns:
            The gradient for each trained parameter, and at the end the loss.
        """
        inputs = [view[slot] for view in (*narrow.views, *narrow.fixed.values())]
        inputs += [t.clone() for t in (*loss.tensors.values(), x, y)]  # copies are aligned
        return self._run((key, "single", tuple(x.shape)), loss, inputs, lambda function: function)

    def _run(
        self,
        key: Hashable,
        loss: PureLoss,
        inputs: Sequence[Tensor],
        over: Callable[[Any], Any],
    ) -> list[Tensor]:
        """Compute gradients and losses, recorded or replayed.

        Args:
            key: equal for calls with the same operations.
            inputs: trained tensors, fixed tensors, the loss's tensors, x and y, in this order.
            over: turns the function of one model into that of all models: `vmap`, or the identity.
        """
        trained_names = list(self.stack.names)
        kinds = (trained_names, list(self.stack.fixed), list(loss.tensors))

        def value(trained: Tensors, fixed: Tensors, tensors: Tensors, *batch: Tensor) -> Tensor:
            named = {f"module.model.{name}": x for name, x in {**trained, **fixed}.items()}
            result: Tensor = functional_call(self._bound, named, (loss.function, tensors, *batch))
            return result

        def step(*inputs: Tensor) -> list[Tensor]:
            rest = iter(inputs)
            parts = [{name: next(rest) for name in names} for names in kinds]
            with self._cast():
                gradients, losses = over(grad_and_value(value))(*parts, *rest)
            return [*gradients.values(), losses]

        with warnings.catch_warnings():
            # torch would loop over slots
            warnings.filterwarnings("error", "There is a performance drop")
            return self._recordings.run((key, tuple(trained_names)), step, inputs)

    # ---------------------------------------------------------------- whether it can be stacked

    def _try(
        self,
        key: Hashable,
        job: LocalJob,
        loss: PureLoss,
    ) -> StackableLoss | None:
        """Try a loss; returns its properties, or None with the reason in the log if it cannot be
        stacked."""
        module = self.module
        vector = module.binding.vector
        buffers = module.binding.buffers
        try:
            with rng_restored(module.device_of_model):
                stackable, gradients, reason = self._in_loop(key, job, loss)
                reason = reason or self._why_not_stackable(stackable, gradients, job, loss)
        except Exception as error:  # the loss fails, or torch.func cannot run it
            reason = f"{type(error).__name__}: {redact(str(error))}".splitlines()[0]
        finally:
            module.train_only(None)
            module.binding.bind(vector, buffers)
        if reason is None:
            return stackable
        name = getattr(loss.function, "__qualname__", "it")
        log.say(f"fabric.executor vmap: the loss {name} trains in the loop ({reason})")
        return None

    def _in_loop(
        self,
        key: Hashable,
        job: LocalJob,
        loss: PureLoss,
    ) -> tuple[StackableLoss, list[Tensor], str | None]:
        """Run the loss as the loop does; returns its properties, its gradients, and the reason why
        it is not pure (None: it is)."""
        module = self.module
        x, y = _batch(job)
        module.binding.bind(job.vector.clone(), [b.clone() for b in job.buffers])
        module.train_only(job.trains)
        module.model.train()
        parameters = module.binding.parameters
        trained = [p for p in parameters if p.requires_grad]
        before = [b.clone() for b in module.model.buffers()]
        states = random_states(module.device_of_model)
        with Passes(module) as passes, torch.enable_grad():
            value = loss(module, (x, y))
            gradients = iter(torch.autograd.grad(value, trained, allow_unused=True))
        by_parameter = [next(gradients) if p.requires_grad else None for p in parameters]
        reached = np.array([g is not None for g in by_parameter])
        by_sample = passes.forward / len(y), passes.backward / len(y)
        stackable = StackableLoss(key, reached, by_sample)
        reason = None
        if not same_states(states, random_states(module.device_of_model)):
            reason = "it draws random numbers"
        elif not all(map(torch.equal, before, module.model.buffers())):
            reason = "it writes to the model's buffers"
        return stackable, [g for g in by_parameter if g is not None], reason

    def _why_not_stackable(
        self,
        stackable: StackableLoss,
        gradients: Sequence[Tensor],
        job: LocalJob,
        loss: PureLoss,
    ) -> str | None:
        """Run stacked passes; returns the reason if their gradients differ from those of the loop
        or depend on the width or slot, else None."""
        key = stackable.key
        stack = self.stack
        batch = _batch(job)
        stack.choose(stackable.reached)
        stack.place([(job.vector, job.buffers)] * stack.width)

        def run(
            size: int,
            images: Tensor,
            labels: Tensor,
        ) -> list[Tensor]:
            tensors = [_repeated(tensor, size) for tensor in loss.tensors.values()]
            return self.stacked(
                key,
                loss,
                stack.narrow(size),
                tensors,
                images,
                labels,
            )

        width = WIDTHS[0]
        stacked = run(width, *(_repeated(tensor, width) for tensor in batch))
        first = [gradient[0] for gradient in stacked[:-1]]
        single = self.single(
            key,
            loss,
            stack.narrow(width),
            0,
            *batch,
        )[:-1]
        for measured in (first, single):
            if not equal_but_rounding(measured, gradients):
                return "its gradients differ in a stacked pass"
        if not same_bits_at_all_widths(stack.parameters, *batch, run):
            return "on this machine its results depend on the number of stacked models"
        return None


class LossPass:
    """The training of jobs that have the same loss and go through the same stacked passes. It takes
    their steps, with the gradients that `MethodLosses` computes."""

    def __init__(self, losses: MethodLosses, jobs: Sequence[LocalJob]) -> None:
        stackable = losses.stackable(jobs[0])
        assert stackable is not None
        self.losses = losses
        self.key = stackable.key
        self.reached = stackable.reached
        self._losses = {job.place: job.pure for job in jobs if job.pure is not None}
        self._first = self._losses[jobs[0].place]
        filled = [self._losses.get(slot, self._first) for slot in range(losses.stack.width)]
        self._tensors = []
        for name in self._first.tensors:
            self._tensors.append(torch.stack([loss.tensors[name] for loss in filled]))

    def step(
        self,
        width: int,
        x: Tensor,
        y: Tensor,
        counts: Sequence[int],
    ) -> None:
        """Take one SGD step with each of the first `width` models of the stack.

        Args:
            x, y: batches (width, largest batch, ...).
            counts: number of samples in each model's batch; 0: it takes no step.
        """
        losses = self.losses
        narrow = losses.stack.narrow(width)
        full = x.shape[1]
        values = losses.stack.losses.new_zeros(width)
        if full in counts:
            tensors = [tensor[:width] for tensor in self._tensors]
            batch = x.contiguous(), y.contiguous()
            *gradients, value = losses.stacked(
                self.key,
                self._first,
                narrow,
                tensors,
                *batch,
            )
            torch._foreach_copy_(narrow.gradient_views, gradients)
            values.copy_(value)
        for slot, count in enumerate(counts):
            if 0 < count < full:
                batch = x[slot, :count], y[slot, :count]
                loss = self._losses[slot]
                *gradients, value = losses.single(
                    self.key,
                    loss,
                    narrow,
                    slot,
                    *batch,
                )
                torch._foreach_copy_([view[slot] for view in narrow.gradient_views], gradients)
                values[slot] = value
        narrow.descend(values)


def _repeated(tensor: Tensor, width: int) -> Tensor:
    """Return `width` copies of a tensor, stacked: (width, ...)."""
    return tensor.expand(width, *tensor.shape).contiguous()


def largest_batch(job: LocalJob) -> int:
    """Return the number of samples in the largest batch of a job."""
    return min(job.schedule.batch_size, len(job.part))


def _batch(job: LocalJob) -> tuple[Tensor, Tensor]:
    """Return the first samples of a job, as many as its largest batch has."""
    assert job.part.tensors is not None
    x, y = job.part.tensors
    n = largest_batch(job)
    return x[:n], y[:n]


def _key(job: LocalJob) -> Hashable | None:
    """Return a key that is equal for jobs that can be in the same pass; None: the job cannot be
    stacked."""
    loss = job.pure
    if loss is None or job.part.tensors is None or not len(job.part):
        return None
    function = loss.function
    identity: Hashable = function
    if inspect.ismethod(function):
        identity = (function.__func__, function.__self__)
    try:
        hash(identity)
    except TypeError:
        return None
    tensors = tuple((name, t.shape, t.dtype) for name, t in loss.tensors.items())
    batch = tuple((t.shape[1:], t.dtype) for t in job.part.tensors)
    blocks = None
    if job.trains is not None:
        blocks = job.trains.tobytes()
    return identity, tensors, largest_batch(job), batch, blocks
