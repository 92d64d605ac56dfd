"""How the clients of one architecture train on a rank: the module they are bound to, the optimiser,
the executor."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning import LightningModule
from lightning.fabric import Fabric
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from fl_lightning.core import PLAIN, ModelGroup, RunContext
from fl_lightning.engine.phases import Meter, SampleCost, sample_cost, schedule_of
from fl_lightning.foundation import log
from fl_lightning.foundation.device import digest, no_draws
from fl_lightning.foundation.errors import redact
from fl_lightning.methods.base import Method
from fl_lightning.training.constants import constants
from fl_lightning.training.executors.base import Executor, ExecutorSpec, LocalJob, Loop, Name
from fl_lightning.training.executors.choice import (
    MEASURED_STEPS,
    Contest,
    fastest,
    make,
    seconds_by_client,
)
from fl_lightning.training.executors.together import Shared, Together
from fl_lightning.training.local import autocast
from fl_lightning.training.module import ClientModule, Skipped
from fl_lightning.training.optimizers import make_optimizer
from fl_lightning.training.schedule import Length
from fl_lightning.training.standin import place

WORTH_TOGETHER = 0.7
"""Runs train together for what takes at most this share of the loop's time: passes are not always
full."""


LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader")
"""Hooks of a LightningModule that give data."""


class Trainer:
    """What trains the clients of `group`, who have the network `model`, on this rank."""

    def __init__(
        self,
        fabric: Fabric,
        run: RunContext,
        group: ModelGroup,
        model: nn.Module,
        together: Together | None = None,
    ) -> None:
        self.fabric, self.run, self.group = fabric, run, group
        self.together = together
        """What drives the run beside others, with which its clients then train."""
        data, method = run.data, run.method
        model = model.to(fabric.device)
        name = type(method).__name__
        self.module = ClientModule(
            model, group.layout, data.num_classes, method.traits.features, data.metric, name
        )
        group.module = self.module
        for tensor in group.frozen.values():
            tensor.data = tensor.data.to(run.dtype) if tensor.is_floating_point() else tensor.data
        place(model, fabric.device, run.dtype)
        self.module.last.rounds = run.rounds
        self.meter = Meter(self.module)
        self.module.cast = autocast(fabric)
        if run.config.fabric.channels_last:
            model.register_forward_pre_hook(_channels_last)
        self.bind_initial()
        self.optimizer = make_optimizer(fabric, self.module, run.config.optimizer)
        self.loop = Loop(fabric, self.module, self.optimizer)
        self.executor: Executor = self.loop
        """How its clients train; the loop until the run begins."""
        self.cost: SampleCost | None = None
        """What training on one sample costs, once the run has begun; None where it could not be
        counted."""
        self.uncounted = "the run has not begun"
        """Then: why not."""
        self.moved: list[str] = []
        """Names of buffers of numbers that a training step has written to, and that are in no
        vector."""
        self._masked: dict[bytes, SampleCost | None] = {}

    def bind_initial(self) -> None:
        """Have the module be a copy of the initial model, which may be written to."""
        self.module.binding.bind(self.group.initial.clone(), self.group.first_buffers())

    def made(self, name: Name) -> tuple[Executor, str | None]:
        """The executor `name`, or the loop, and why it is not that of `name`."""
        run, config, data = self.run, self.run.config, self.run.data
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
            config.fabric.channels_last,
            data.text,
            config.data.balance == "weights",
        )
        kind = None if self.together is None else self._kind(spec)
        return make(name, self.fabric, self.module, self.optimizer, spec, self.together, kind)

    def _kind(self, spec: ExecutorSpec) -> Hashable:
        """What must be the same for the clients of two runs to train in one pass."""
        run, module, method = self.run, self.module, type(self.run.method)
        built = "" if method.build is Method.build else repr(run.config.method)
        frozen = digest(self.group.frozen.values())
        component = repr(run.config.models[self.group.index].component)
        network = component, repr(module.model), built, frozen, constants(module.model)
        blocks = tuple((b.name, b.start, b.stop) for b in self.group.layout.blocks)
        steps = (
            repr(replace(spec.config, lr=0.0)),
            spec.largest_batch,
            str(spec.dtype),
            run.config.fabric.precision,
        )
        seen = tuple(spec.input_shape), module.metric.name, module.looks
        return network, blocks, module.trainable.tobytes(), steps, *seen

    def contest(self) -> Contest:
        """What `fabric.executor: auto` measures: a few local steps of some clients, on copies of
        the initial model, by each executor that is fit for them."""
        run, group = self.run, self.group
        names: list[Name] = ["loop", "vmap"]
        made = {name: self.made(name) for name in names}
        fit: dict[Name, Executor] = {n: e for n, (e, reason) in made.items() if reason is None}
        at_once = max(executor.at_once for executor in fit.values())
        clients = run.at_home(group.members)[: max(1, at_once // run.world_size)]
        length = Length.of(run.config.federation)
        length = length if length.steps is not None else Length(epochs=1)
        steps = {}
        for c in clients:
            per_epoch = schedule_of(run, group, c, 0, "measurement", length).steps_per_epoch(
                run.data.train_sizes[c]
            )
            steps[c] = length.steps_of(per_epoch)

        def jobs() -> list[LocalJob]:
            measured = []
            for c, most in steps.items():
                schedule = schedule_of(
                    run, group, c, 0, "measurement", Length(steps=min(MEASURED_STEPS, most))
                )
                part = run.data.client(c, run.device, run.dtype).train
                vector, buffers = group.initial.clone(), group.first_buffers()
                measured.append(LocalJob(vector, buffers, part, schedule, run.learning_rate(1)))
            return measured

        return Contest(group.name, fit, jobs, list(steps.values()))

    def cost_of(self, trains: np.ndarray | None) -> SampleCost | None:
        """What training the blocks `trains` (bool [B]; None: all) on one sample costs."""
        if trains is None or self.cost is None:
            return self.cost
        if trains.tobytes() not in self._masked:
            cost = self.count(trains)
            self._masked[trains.tobytes()] = cost if isinstance(cost, SampleCost) else None
        return self._masked[trains.tobytes()]

    def count(self, trains: np.ndarray | None = None) -> SampleCost | str:
        """What training on one sample costs, counted on two samples of the first client here whose
        step does not fail.

        Why it could not be counted where there is none: mostly they fail again in their visits,
        where client and round are named.
        """
        run, why = self.run, ""
        for client in run.at_home(self.group.members):
            self.bind_initial()
            try:
                x, y = run.data.example(client, run.device, run.dtype)
                with self.module.cast():
                    # BatchNorm cannot train on one
                    pair = torch.cat([x, x])[:2], torch.cat([y, y])[:2]
                    self.module.train_only(trains)
                    cost = sample_cost(self.module, pair)
                self.moved = self._moved()
                return cost
            except Skipped:
                why = "it returned None"
            except Exception as error:
                self.module.set_objective(PLAIN)
                why = redact(f"{type(error).__name__}: {error}".splitlines()[0])
            finally:
                self.module.train_only(None)
        return why

    def _moved(self) -> list[str]:
        binding, names = self.module.binding, self.group.layout.own_names
        fitted = {id(tensor) for weight in binding.spectral for tensor in (weight.u, weight.v)}
        tensors = dict(self.module.model.named_buffers())
        return [
            name
            for name, buffer, first in zip(
                names, binding.buffers, self.group.initial_buffers, strict=True
            )
            if first.is_floating_point()
            and id(tensors[name]) not in fitted
            and not torch.equal(buffer, first)
        ]


def choose_executors(run: RunContext, trainers: Sequence[Trainer]) -> None:
    """How the clients of each architecture train from now on: as `fabric.executor` says.

    `auto` measures, unless the run was resumed and has measured already. No number of the run is
    touched by it.

    Raises:
        BadInput: this machine cannot do it.
    """
    executor = run.config.fabric.executor
    if executor == "auto":
        contests = [trainer.contest() for trainer in trainers]
        file = run.folder / "executor.json"
        names = fastest(run.processes, file, contests, bool(run.resumed_from))
    else:
        names = [executor] * len(trainers)
    for trainer, name in zip(trainers, names, strict=True):
        trainer.executor, reason = trainer.made(name)
        if reason is not None and run.is_main:
            log.say(f"fabric.executor {name}: {reason}; {trainer.group.name} trains in the loop")


def faster_together(trainer: Trainer, jobs: int) -> str | tuple[Name, str]:
    """How clients of several runs train faster, `jobs` at once: one by one or stacked, with what
    was measured; or why they cannot be stacked."""
    executor, reason = trainer.made("vmap")
    if not isinstance(executor, Shared):
        return reason or "nothing is stacked"
    contest = trainer.contest()
    copies = max(1, jobs // max(1, len(contest.steps)))

    def many() -> list[LocalJob]:
        return [job for _ in range(copies) for job in contest.jobs()]

    with no_draws(trainer.run.device):
        seconds = seconds_by_client(
            {"loop": trainer.loop, "vmap": executor.executor}, many, repeats=2
        )
    loop, stacked = seconds["loop"], seconds.get("vmap", math.inf)
    times = f"a client: loop {1000 * loop:.3g} ms, stacked {1000 * stacked:.3g} ms"
    return ("vmap" if stacked < WORTH_TOGETHER * loop else "loop"), times


def say_unused(run: RunContext, trainers: Sequence[Trainer]) -> None:
    """Lines that name what users' LightningModules define and this run does not call."""
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
    """Find out what training on one sample costs in each architecture."""
    for trainer in trainers:
        counted = run.processes.gather_objects(trainer.count())
        trainer.cost = trainer.group.cost = next(
            (c for c in counted if isinstance(c, SampleCost)), None
        )
        trainer.uncounted = next((c for c in counted if isinstance(c, str)), "")
        if trainer.moved and run.is_main:
            begins = (
                "begins every round with their initial values"
                if run.policy.starts_from_server
                else "keeps its own"
            )
            listed = ", ".join(trainer.moved)
            line = (
                f"its buffers {listed} change in training and are not averaged: a client {begins}"
            )
            log.say(f"model {trainer.group.name}: {line}")


def _channels_last(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Weights stay as they are in the vector: convolutions turn them, which costs little beside
    what they compute."""
    last = torch.channels_last
    return tuple(
        x.contiguous(memory_format=last) if isinstance(x, Tensor) and x.ndim == 4 else x
        for x in inputs
    )
