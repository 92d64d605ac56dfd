"""One model in fixed memory, whose steps are recorded as CUDA graphs and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.core.phase import Fit
from fl_lightning.errors import BadInput
from fl_lightning.training.executors.base import ExecutorSpec, LocalJob
from fl_lightning.training.executors.stack import Stacked
from fl_lightning.training.module import ClientModule
from fl_lightning.training.optimizers import LocalOptimizer
from fl_lightning.training.schedule import stream

WARM_UPS = 3
"""Steps on a side stream before `graph` records one, as torch's notes on CUDA graphs have it."""

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Makes of a function without arguments one that does the same work again."""


class Graph(Stacked):
    """One model in fixed memory, whose step is recorded as a CUDA graph (or by another `recorder`), once for each batch
    size, and replayed.

    Raises:
        BadInput: it does not run on CUDA.
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
        if recorder is None and fabric.device.type != "cuda":
            raise BadInput("fabric.executor", "graph", "CUDA graphs want a CUDA device; vmap runs anywhere")
        super().__init__(fabric, module, optimizer, spec, width=1)
        self._recorder = recorder or _CudaRecorder()
        self._steps: dict[tuple[object, ...], tuple[Tensor, Tensor, Callable[[], None]]] = {}

    def train(self, jobs: Sequence[LocalJob]) -> list[Fit]:
        """One after the other."""
        return [self._one(job) for job in jobs]

    def _one(self, job: LocalJob) -> Fit:
        stack, module = self.stack, self.module
        stack.load([job])
        module.binding.bind(stack.rows[0], [buffer[0] for buffer in stack.buffers])
        module.model.train()
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
        return stack.store([job], [(steps, samples)])[0]

    def _step(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Callable[[], None]]:
        """Where a batch like (x, y) is to be put, and what takes a step on it."""
        key = (*self.stack.kind, tuple(x.shape))
        if key not in self._steps:
            self._steps[key] = self._recorded(x.clone(), y.clone())
        return self._steps[key]

    def _recorded(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Callable[[], None]]:
        module, stack = self.module, self.stack
        parameters = [p for p in module.binding.parameters if p.requires_grad]

        def step() -> None:
            with self._cast():
                loss = module.metric.loss(module.model(x), y)
            gradients = torch.autograd.grad(loss, parameters)
            torch._foreach_copy_([view[0] for view in stack.gradient_views], list(gradients))
            stack.descend(loss.detach()[None])

        touched = [stack.rows, stack.losses, stack.pulls, *stack.buffers]
        touched += [] if stack.momentum is None else [stack.momentum]
        before = [t.clone() for t in touched]
        replay = self._recorder(step)
        for tensor, saved in zip(touched, before, strict=True):  # recording takes steps
            tensor.copy_(saved)
        return x, y, replay


class _CudaRecorder:
    """Records on one memory pool: nothing that a step leaves in it is read by another."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        replay: Callable[[], None] = graph.replay
        return replay
