"""What `fabric.executor: auto` measures: a few local steps of some clients, on copies of the initial model."""

from __future__ import annotations

from typing import Any

from fl_lightning.core.run import Run
from fl_lightning.device import graph_type
from fl_lightning.engine.phases import schedule_of
from fl_lightning.training.executors.base import Executor, LocalJob, Name
from fl_lightning.training.executors.choice import MEASURED_STEPS, Contest
from fl_lightning.training.schedule import Length


def contest(run: Run, trainer: Any) -> Contest:
    """Of the clients of a `trainer`, with the executors that are fit for it."""
    names: list[Name] = ["loop", "vmap", "graph"] if graph_type(run.device) else ["loop", "vmap"]
    made = {name: trainer.made(name, run) for name in names}
    fit: dict[Name, Executor] = {n: e for n, (e, reason) in made.items() if reason is None}
    group = trainer.group
    at_once = max(executor.at_once for executor in fit.values())
    clients = run.at_home(group.members)[: max(1, at_once // run.world_size)]
    length = Length.of(run.config.federation)
    length = length if length.steps is not None else Length(epochs=1)
    steps = {}
    for c in clients:
        per_epoch = schedule_of(run, group, c, 0, "measurement", length).steps_per_epoch(run.data.train_sizes[c])
        steps[c] = length.steps_of(per_epoch)

    def jobs() -> list[LocalJob]:
        found = []
        for c in clients:
            length = Length(steps=min(MEASURED_STEPS, steps[c]))
            schedule = schedule_of(run, group, c, 0, "measurement", length)
            part = run.data.client(c, run.device, run.dtype).train
            buffers = [b.clone() for b in group.initial_buffers]
            found.append(LocalJob(group.initial.clone(), buffers, part, schedule, run.learning_rate(1)))
        return found

    return Contest(group.name, fit, jobs, list(steps.values()))
