"""Trains the clients of one architecture on a rank: their module, optimiser and executor."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import InitVar, dataclass, field, replace

import numpy as np
import torch
from lightning import LightningModule
from lightning.fabric import Fabric
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from fl_lightning.core import PLAIN, ModelGroup, RunContext
from fl_lightning.engine.phases import Meter, SampleCost, sample_cost, schedule_of
from fl_lightning.foundation import log
from fl_lightning.foundation.device import digest, rng_restored
from fl_lightning.foundation.errors import redact
from fl_lightning.methods.base import Method
from fl_lightning.training.constants import constants
from fl_lightning.training.executors.base import Executor, ExecutorSpec, LocalJob, Loop, Name
from fl_lightning.training.executors.choice import (
    MEASURED_STEPS,
    Candidates,
    fastest,
    make,
    seconds_by_client,
)
from fl_lightning.training.executors.together import Shared, Together
from fl_lightning.training.local import autocast
from fl_lightning.training.module import ClientModule, Skipped
from fl_lightning.training.optimizers import make_optimizer
from fl_lightning.training.schedule import Length
from fl_lightning.training.standin import set_reported_device

WORTH_TOGETHER = 0.7
"""Runs train together if a stacked client takes at most this share of its time in the loop (ours:
below 1, as passes are not always full)."""


LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader")
"""Hooks of a LightningModule that provide data."""


@dataclass(eq=False)
class Trainer:
    """Holds the module, optimiser and executor of the clients of one architecture on this rank.

    Args:
        model: the network of these clients.
        together: scheduler of several runs in this process, whose clients train in the same
            passes; None: this run is the only one.
    """

    fabric: Fabric
    run: RunContext
    group: ModelGroup
    model: InitVar[nn.Module]
    together: Together | None = None
    cost: SampleCost | None = None
    """Cost of training on one sample; None before the run begins, or if it could not be counted."""
    uncounted: str = "the run has not begun"
    """Reason why `cost` is None."""
    written_buffers: list[str] = field(default_factory=list)
    """Names of floating-point buffers that training changes and that are not averaged."""

    def __post_init__(self, model: nn.Module) -> None:
        fabric = self.fabric
        run = self.run
        group = self.group
        data = run.data
        method = run.method
        model = model.to(fabric.device)
        name = type(method).__name__
        self.module = ClientModule(
            model,
            group.layout,
            data.num_classes,
            method.traits.features,
            data.metric,
            name,
        )
        group.module = self.module
        for tensor in group.frozen.values():
            tensor.data = tensor.data.to(run.dtype) if tensor.is_floating_point() else tensor.data
        set_reported_device(model, fabric.device, run.dtype)
        self.module.step_state.rounds = run.rounds
        self.meter = Meter(self.module)
        self.module.cast = autocast(fabric)
        self.bind_initial()
        self.optimizer = make_optimizer(fabric, self.module, run.config.optimizer)
        self.loop = Loop(fabric, self.module, self.optimizer)
        self.executor: Executor = self.loop
        """Trains the clients; the loop until `choose_executors` chooses another."""
        self._masked: dict[bytes, SampleCost | None] = {}

    def bind_initial(self) -> None:
        """Bind the module to a copy of the initial model."""
        self.module.binding.bind(self.group.initial.clone(), self.group.first_buffers())

    def make_executor(self, name: Name) -> tuple[Executor, str | None]:
        """Make an executor; returns (the executor `name`, None), or (the loop, the reason) if
        `name` cannot train these clients."""
        run = self.run
        config = run.config
        data = run.data
        sizes = [data.train_sizes[c] for c in self.group.members]
        spec = ExecutorSpec(
            config.optimizer,
            data.input_shape,
            data.num_classes,
            run.dtype,
            config.federation.batch_size,
            sizes,
            min(run.cohort_size, len(sizes)),
            self.group.whole_last,
            data.text,
            config.data.balance == "weights",
        )
        key = None if self.together is None else self._stacking_key(spec)
        return make(
            name,
            self.fabric,
            self.module,
            self.optimizer,
            spec,
            self.together,
            key,
        )

    def _stacking_key(self, spec: ExecutorSpec) -> Hashable:
        """Return a key that is equal for two runs if their clients can train in the same pass."""
        config = self.run.config
        module = self.module
        group = self.group
        return (
            repr(config.models[group.index].component),
            repr(module.model),
            "" if type(self.run.method).build is Method.build else repr(config.method),
            digest(group.frozen.values()),
            constants(module.model),
            tuple((b.name, b.start, b.stop) for b in group.layout.blocks),
            module.trainable.tobytes(),
            repr(replace(spec.config, lr=0.0)),
            spec.largest_batch,
            str(spec.dtype),
            config.fabric.precision,
            tuple(spec.input_shape),
            module.metric.name,
            module.keeps_features,
        )

    def candidates(self) -> Candidates:
        """Return the executors that can train these clients, and jobs by which their speed is
        measured: a few local steps of some clients, from copies of the initial model."""
        run = self.run
        group = self.group
        executors: dict[Name, Executor] = {"loop": self.loop}
        executor, reason = self.make_executor("vmap")
        if reason is None:
            executors["vmap"] = executor
        at_once = max(executor.at_once for executor in executors.values())
        clients = run.at_home(group.members)[: max(1, at_once // run.world_size)]
        length = Length.configured(run.config.federation)
        if length.steps is None:
            length = Length(epochs=1)
        steps = []
        schedules = {}
        for c in clients:
            schedule = schedule_of(
                run,
                group,
                c,
                0,
                "measurement",
                length,
            )
            per_epoch = schedule.steps_per_epoch(run.data.train_sizes[c])
            steps.append(schedule.length.steps_of(per_epoch))
            shortened = Length(steps=min(MEASURED_STEPS, steps[-1]))
            schedules[c] = replace(schedule, length=shortened)

        def jobs() -> list[LocalJob]:
            measured = []
            for c, schedule in schedules.items():
                part = run.data.client(c, run.device, run.dtype).train
                vector = group.initial.clone()
                buffers = group.first_buffers()
                measured.append(
                    LocalJob(
                        vector,
                        buffers,
                        part,
                        schedule,
                        run.learning_rate(1),
                    )
                )
            return measured

        return Candidates(group.name, executors, jobs, steps)

    def cost_of(self, trains: np.ndarray | None) -> SampleCost | None:
        """Return the cost of training the blocks `trains` (bool [B]; None: all) on one sample;
        None if it could not be counted."""
        if trains is None or self.cost is None:
            return self.cost
        key = trains.tobytes()
        if key not in self._masked:
            cost = self.measure_cost(trains)
            self._masked[key] = cost if isinstance(cost, SampleCost) else None
        return self._masked[key]

    def measure_cost(self, trains: np.ndarray | None = None) -> SampleCost | str:
        """Count the FLOPs of training on one sample, by a training step on two samples of a client
        of this rank; if the step fails, by that of the next client. Also sets `written_buffers` to
        the buffers that the step has changed.

        Args:
            trains: mask of the blocks that train (bool [B]); None: all.

        Returns:
            The cost; or, if every client's step failed, the reason in words. It raises no error, as
            a step that fails here usually fails again in a visit, where the error names client and
            round.
        """
        run = self.run
        reason = ""
        for client in run.at_home(self.group.members):
            self.bind_initial()
            try:
                x, y = run.data.example(client, run.device, run.dtype)
                with self.module.cast():
                    # BatchNorm cannot train on one
                    pair = torch.cat([x, x])[:2], torch.cat([y, y])[:2]
                    self.module.train_only(trains)
                    cost = sample_cost(self.module, pair)
                self.written_buffers = self._changed_buffers()
                return cost
            except Skipped:
                reason = "it returned None"
            except Exception as error:
                self.module.set_objective(PLAIN)
                reason = redact(f"{type(error).__name__}: {error}".splitlines()[0])
            finally:
                self.module.train_only(None)
        return reason

    def _changed_buffers(self) -> list[str]:
        """Return the names of floating-point buffers that differ from their initial values, except
        singular vectors, which each binding computes anew."""
        binding = self.module.binding
        fitted = {id(tensor) for weight in binding.spectral for tensor in weight.vectors}
        tensors = dict(self.module.model.named_buffers())
        pairs = zip(binding.buffers, self.group.initial_buffers, strict=True)
        changed = []
        for name, (buffer, first) in zip(self.group.layout.own_names, pairs, strict=True):
            fixed = not first.is_floating_point() or id(tensors[name]) in fitted
            if not fixed and not torch.equal(buffer, first):
                changed.append(name)
        return changed


def choose_executors(run: RunContext, trainers: Sequence[Trainer]) -> None:
    """Set each trainer's executor to that of `fabric.executor`.

    `auto` measures which is fastest; a resumed run uses the earlier measurement. The choice changes
    no result.

    Raises:
        BadInput: this machine cannot run the executor with which the resumed run began.
    """
    executor = run.config.fabric.executor
    if executor == "auto":
        candidates_by_group = [trainer.candidates() for trainer in trainers]
        file = run.folder / "executor.json"
        names = fastest(run.processes, file, candidates_by_group, bool(run.resumed_from))
    else:
        names = [executor] * len(trainers)
    for trainer, name in zip(trainers, names, strict=True):
        trainer.executor, reason = trainer.make_executor(name)
        if reason is not None and run.is_main:
            log.say(f"fabric.executor {name}: {reason}; {trainer.group.name} trains in the loop")


def faster_together(trainer: Trainer, jobs: int) -> str | tuple[Name, str]:
    """Measure whether clients of several runs train faster in stacked passes or in the loop.

    Args:
        jobs: number of clients that train at the same time in all runs.

    Returns:
        The name of the faster executor and the measured times in words. If clients cannot be
        stacked, so that there is nothing to measure: only the reason, a str.
    """
    executor, reason = trainer.make_executor("vmap")
    if not isinstance(executor, Shared):
        return reason or "nothing is stacked"
    candidates = trainer.candidates()
    copies = max(1, jobs // max(1, len(candidates.steps)))

    def many() -> list[LocalJob]:
        return [job for _ in range(copies) for job in candidates.jobs()]

    executors: dict[Name, Executor] = {"loop": trainer.loop, "vmap": executor.executor}
    with rng_restored(trainer.run.device):
        seconds = seconds_by_client(executors, many, repeats=2)
    loop = seconds["loop"]
    stacked = seconds.get("vmap", math.inf)
    times = f"a client: loop {1000 * loop:.3g} ms, stacked {1000 * stacked:.3g} ms"
    return ("vmap" if stacked < WORTH_TOGETHER * loop else "loop"), times


def log_unused_hooks(run: RunContext, trainers: Sequence[Trainer]) -> None:
    """Log the hooks of users' LightningModules that this run does not call."""
    optimizer = run.config.optimizer.name
    for model in [trainer.module.model for trainer in trainers if run.is_main]:
        if not isinstance(model, LightningModule):
            continue
        name = type(model).__name__
        loaders = [hook for hook in LOADERS if is_overridden(hook, model)]
        if loaders:
            log.say(
                f"model: {', '.join(loaders)} of {name}: not called, data come from data.source"
            )
        if optimizer != "module" and is_overridden("configure_optimizers", model):
            log.say(
                f"model: configure_optimizers of {name}: not called, optimizer.name is {optimizer} "
                f"(module: its own)"
            )


def count_costs(run: RunContext, trainers: Sequence[Trainer]) -> None:
    """Set each trainer's cost of training on one sample, and log buffers that are not averaged."""
    for trainer in trainers:
        costs = run.processes.gather_objects(trainer.measure_cost())
        cost = next((c for c in costs if isinstance(c, SampleCost)), None)
        trainer.cost = trainer.group.cost = cost
        trainer.uncounted = next((c for c in costs if isinstance(c, str)), "")
        if trainer.written_buffers and run.is_main:
            begins = "keeps its own"
            if run.policy.starts_from_server:
                begins = "begins every round with their initial values"
            log.say(
                f"model {trainer.group.name}: its buffers {', '.join(trainer.written_buffers)} "
                f"change in training and are not averaged: a client {begins}"
            )
