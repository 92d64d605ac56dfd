"""One model in fixed memory, whose steps are recorded as graphs of operations (CUDA, XPU) and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.core.phase import Fit
from fl_lightning.device import graph_type, module_of
from fl_lightning.errors import BadInput
from fl_lightning.training.executors.base import TOLERANCE, ExecutorSpec, LocalJob
from fl_lightning.training.executors.stack import Stacked
from fl_lightning.training.module import ClientModule
from fl_lightning.training.optimizers import LocalOptimizer
from fl_lightning.training.schedule import stream

WARM_UPS = 3
"""Steps on a side stream before `graph` records one, as torch's notes on CUDA graphs have it."""

MOST_GRAPHS = 32
"""Graphs that are kept at most: further sizes of batches, mostly lone last ones, take their steps as the loop does."""

TRIALS = 3
"""Steps that are taken both ways before a run relies on replays: what a model counts in Python shows in the second."""

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Makes of a function without arguments one that does the same work again."""


class Graph(Stacked):
    """One model in fixed memory, whose step is recorded as a graph, once for each batch size, and replayed.

    Args: as all executors.
        recorder: how a step is recorded; None: as a graph of the device.

    Raises:
        BadInput: the device records none.
    """

    name = "graph"

    def __init__(
        self,
        fabric: Fabric,
        module: ClientModule,
        optimizer: LocalOptimizer,
        spec: ExecutorSpec,
        recorder: Recorder | None = None,
    ) -> None:
        if recorder is None and graph_type(fabric.device) is None:
            raise BadInput("fabric.executor", "graph", "graphs want a CUDA or XPU device; vmap runs anywhere")
        super().__init__(fabric, module, optimizer, spec, width=1)
        self._recorder = recorder or _DeviceRecorder(fabric.device)
        self._steps: dict[tuple[object, ...], tuple[Tensor, Tensor, Callable[[], None]]] = {}

    def unlike(self, x: Tensor, y: Tensor) -> str | None:
        """Why steps of this model cannot be replayed, if they cannot, tried on copies of what is bound and (x, y)."""
        stack, bound = self.stack, self.module.binding
        assert bound.vector is not None
        nothing: Any = None
        job = LocalJob(bound.vector.clone(), [b.clone() for b in bound.buffers], nothing, nothing, self.spec.config.lr)
        tensors = []
        try:
            for recorded in (False, True):
                self._bind(job)
                step = self._step(x, y)[2] if recorded else self._stepper(x, y)
                for _ in range(TRIALS):
                    step()
                tensors.append(stack.rows[0].clone())
        except Exception as error:  # whatever a user's forward pass does that cannot be recorded
            return f"its steps cannot be recorded ({type(error).__name__}: {error}".splitlines()[0] + ")"
        eager, replayed = (row - job.vector for row in tensors)
        if (eager - replayed).norm() > TOLERANCE[job.vector.dtype] * (1 + eager.norm()):
            return "replayed steps are not those that the model takes: it goes by what Python counts or draws"
        return None

    def takes(self, job: LocalJob) -> bool:
        """None with a loss or a step of its own, or private steps."""
        return not job.own and job.private is None

    def train(self, jobs: Sequence[LocalJob]) -> list[Fit]:
        """One after the other.

        Raises:
            ValueError: a job has a loss or a step of its own.
        """
        if not all(map(self.takes, jobs)):
            raise ValueError("a loss or a step of one's own is for the loop")
        return [self._one(job) for job in jobs]

    def _one(self, job: LocalJob) -> Fit:
        module = self.module
        self._bind(job)
        module.train_only(job.trains)
        steps = samples = 0
        try:
            for x, y in stream(job.part, job.schedule):
                own_x, own_y, replay = self._step(x, y)
                own_x.copy_(x)
                own_y.copy_(y)
                replay()
                steps, samples = steps + 1, samples + len(y)
        finally:
            module.train_only(None)
        [trained] = self.stack.take([job], steps, [samples])
        return trained.write(job)

    def _bind(self, job: LocalJob) -> None:
        """From now on the module is the model of `job`, laid out in the stack."""
        self.stack.load([job])
        self.module.binding.bind(self.stack.rows[0], [buffer[0] for buffer in self.stack.buffers])
        self.module.model.train()

    def _step(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Callable[[], None]]:
        """Where a batch like (x, y) is to be put, and what takes a step on it."""
        key = (*self.stack.kind, tuple(x.shape))
        if key not in self._steps:
            x, y = x.clone(), y.clone()
            if len(self._steps) == MOST_GRAPHS:
                return x, y, self._stepper(x, y)
            self._steps[key] = x, y, self._recorded(self._stepper(x, y))
        return self._steps[key]

    def _stepper(self, x: Tensor, y: Tensor) -> Callable[[], None]:
        """Takes a step on the batch in (x, y)."""
        module, stack = self.module, self.stack
        parameters = [p for p in module.binding.parameters if p.requires_grad]

        def step() -> None:
            with self._cast():
                loss = module.metric.loss(module.model(x), y)
            gradients = torch.autograd.grad(loss, parameters)
            torch._foreach_copy_([view[0] for view in stack.gradient_views], list(gradients))
            stack.narrow(1).descend(loss.detach()[None])

        return step

    def _recorded(self, step: Callable[[], None]) -> Callable[[], None]:
        stack = self.stack
        touched = [stack.rows, stack.losses, stack.pulls, *stack.buffers]
        touched += [] if stack.momentum is None else [stack.momentum]
        before = [t.clone() for t in touched]
        replay = self._recorder(step)
        for tensor, saved in zip(touched, before, strict=True):  # recording takes steps
            tensor.copy_(saved)
        return replay


class _DeviceRecorder:
    """Records on one memory pool: nothing that a step leaves in it is read by another."""

    def __init__(self, device: torch.device) -> None:
        self._module, self._graph = module_of(device), graph_type(device)
        self._pool = self._module.graph_pool_handle()

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        module, side = self._module, self._module.Stream()
        side.wait_stream(module.current_stream())
        with module.stream(side):
            for _ in range(WARM_UPS):
                step()
        module.current_stream().wait_stream(side)
        graph = self._graph()
        try:
            with module.graph(graph, pool=self._pool):
                step()
        except BaseException:
            self._pool = module.graph_pool_handle()  # the old one may count as being recorded for ever
            raise
        replay: Callable[[], None] = graph.replay
        return replay
