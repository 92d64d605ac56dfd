"""Chooses the executor: the configured one, if it is fit for the model and the run, or the
fastest."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fl_lightning.core import PLAIN
from fl_lightning.foundation import log
from fl_lightning.foundation.device import random_states, rng_restored, same_states, synchronize
from fl_lightning.foundation.errors import BadInput, redact
from fl_lightning.foundation.files import write_whole
from fl_lightning.foundation.parallel import RankGroup
from fl_lightning.models.base import inputs, targets
from fl_lightning.training.executors.base import Executor, ExecutorSpec, LocalJob, Loop, Name
from fl_lightning.training.executors.even import MOST_AT_ONCE
from fl_lightning.training.executors.together import Shared, Together
from fl_lightning.training.executors.vmap import Vmap
from fl_lightning.training.module import ClientModule
from fl_lightning.training.optimizers import LocalOptimizer

MEASURED_STEPS = 4
"""Steps of each client that `auto` measures."""

WORTH = 0.9
"""`auto` leaves the loop only for an executor that takes at most this share of its time: timings
scatter by about a tenth."""


def make(
    name: Name,
    fabric: Fabric,
    module: ClientModule,
    optimizer: LocalOptimizer,
    spec: ExecutorSpec,
    together: Together | None = None,
    kind: Hashable = None,
) -> tuple[Executor, str | None]:
    """The executor `name` for the `module` and None; or the loop, and why `name` is unfit here.

    Only the module's bound tensors are written to, and no random number is drawn. With `together`,
    all runs that it drives whose clients are of this `kind` share one `vmap`.
    """
    loop = Loop(fabric, module, optimizer)
    if name == "loop":
        return loop, None
    reason = unfit(fabric, module, spec)
    if reason is None:
        x, y, gradients, reason = _probed(fabric, module, spec)
    if reason is not None:
        return loop, reason
    if together is None:
        vmap = Vmap(fabric, module, optimizer, spec)
    else:
        widest = replace(spec, cohort=MOST_AT_ONCE)
        vmap = together.executor(kind, lambda: Vmap(fabric, module, optimizer, widest))
    reason = vmap.unlike(x, y, gradients, module)
    if reason is not None:
        return loop, reason
    return vmap if together is None else Shared(vmap, together), None


def unfit(
    fabric: Fabric,
    module: ClientModule,
    spec: ExecutorSpec,
) -> str | None:
    """Why `vmap` cannot take this run's steps, as far as its settings tell; None: it can."""
    if module.own_step:
        return "the model has a training_step of its own"
    if module.draws_in_evaluation:
        return "the model draws random numbers in evaluation"
    if module.binding.spectral:
        return "the model's spectral normalisation writes to its buffers"
    if spec.config.name != "sgd":
        return f"optimizer.name is {spec.config.name}, and it knows sgd"
    if fabric.strategy.precision.precision == "16-mixed":
        return "16-mixed scales each client's loss"
    if spec.weighted:
        return "data.balance weights gives each client a loss of its own"
    if spec.whole_last:
        return "BatchNorm mixes the samples of a batch"
    return None


def _probed(
    fabric: Fabric,
    module: ClientModule,
    spec: ExecutorSpec,
) -> tuple[Tensor, Tensor, Sequence[Tensor | None], str | None]:
    """A made-up batch x, y, the gradients of a copy of the bound model on it (None: the loss does
    not depend on a parameter), and why its forward pass is unfit (None: it is fit)."""
    device = fabric.device
    binding = module.binding
    model = module.model
    # less than a whole batch, which is then filled up
    size = max(1, min(3, spec.largest_batch - 1))
    draws = torch.Generator().manual_seed(0)
    shape = spec.input_shape
    x = inputs(size, shape, spec.text, draws)
    if spec.text is None:
        x = x.to(spec.dtype)
    x = x.to(device)
    floats = not module.metric.rises
    y = targets(
        size,
        shape,
        spec.num_classes,
        spec.text,
        floats=floats,
    ).to(device)
    buffers = dict(model.named_buffers())
    copies = [buffers[name].detach().clone() for name in module.layout.own_names]
    binding.bind(binding.vector.clone(), copies)
    module.set_objective(PLAIN)
    model.train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    attributes = _plain_attributes(model)
    parameters = [p for p in binding.parameters if p.requires_grad]
    module.last.read = None
    with rng_restored(device), module.last.trial():
        states = random_states(device)
        loss = module.metric.loss(model(x), y)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        draws_numbers = not same_states(states, random_states(device))
    after = _plain_attributes(model)
    changed = [name for name, value in after.items() if attributes.get(name) != value]
    reason = None
    if draws_numbers:
        reason = "the model draws random numbers (dropout)"
    elif module.last.read is not None:
        reason = f"the model reads {module.last.read}"
    elif changed:
        reason = f"the model's forward pass changes its {min(changed)}"
    elif any(not torch.equal(b, before[name]) for name, b in model.named_buffers()):
        reason = "the model's forward pass writes to its buffers"
    return x, y, gradients, reason


def _plain_attributes(model: nn.Module) -> dict[str, str]:
    """Numbers, words, and lists of them that the modules of `model` have as attributes, by dotted
    name."""
    attributes = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            leaves = tree_leaves(value)
            if all(isinstance(leaf, int | float | str | None) for leaf in leaves):
                attributes[f"{path}.{name}".lstrip(".")] = repr(value)
    return attributes


# ---------------------------------------------------------------- the fastest


@dataclass(frozen=True)
class Contest:
    """The executors that are fit for the clients of one model, and jobs to measure them by."""

    name: str
    """Of the model."""
    executors: Mapping[Name, Executor]
    jobs: Callable[[], list[LocalJob]]
    """Makes the measured jobs anew: at most `MEASURED_STEPS` steps of some of this rank's clients,
    on copies."""
    steps: Sequence[int]
    """Steps that those clients will take, in an epoch or in a round: measured seconds are scaled to
    them."""


def fastest(
    group: RankGroup,
    file: Path,
    contests: Sequence[Contest],
    resumed: bool,
) -> list[Name]:
    """The fastest executor for each model, equal on every rank; written to `file`, from which a
    resumed run reads it.

    Each rank takes a few steps of some of its clients, on copies of the initial model and with
    draws of their own.
    """
    stored: list[Name] | None = None
    if resumed and group.rank == 0:
        stored = _stored(file, len(contests))
    stored = group.gather_objects(stored)[0]
    if stored is not None:
        return stored
    chosen = []
    seconds = []
    for contest in contests:
        here = _measured(contest) if len(contest.executors) > 1 else {}
        everywhere = [times for times in group.gather_objects(here) if times]
        means = {}
        for name in contest.executors if everywhere else ():
            if all(name in times for times in everywhere):
                means[name] = sum(times[name] for times in everywhere) / len(everywhere)
        faster = [name for name, mean in means.items() if mean < WORTH * means["loop"]]
        best: Name = min(faster, key=means.__getitem__, default="loop")
        chosen.append(best)
        seconds.append(means)
        if group.rank == 0:
            listed = ", ".join(f"{name} {1000 * mean:.3g} ms" for name, mean in means.items())
            times = listed or "no other is fit"
            log.say(f"fabric.executor auto: {best} for {contest.name} (a client: {times})")
    if group.rank == 0:
        content = {"executors": chosen, "seconds_by_client": seconds}
        write_whole(file, json.dumps(content, indent=2) + "\n")
    return chosen


def _measured(contest: Contest) -> dict[Name, float]:
    """Seconds of a client on this rank; none where it has no client that can train."""
    executors = contest.executors
    steps = contest.steps
    device = executors["loop"].fabric.device
    with rng_restored(device):
        try:
            seconds = seconds_by_client(executors, contest.jobs) if steps else {}
            for name in seconds:
                seconds[name] *= more_steps(steps, executors[name].at_once)
            return seconds
        # a client that fails here fails again in its visit, where client and round are named
        except Exception:
            return {}
        finally:
            executors["loop"].module.set_objective(PLAIN)


def _stored(file: Path, architectures: int) -> list[Name] | None:
    """The executors that an earlier part of the run has chosen; None: there is no file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        names: list[Name] = content["executors"]
        if len(names) == architectures and set(names) <= set(get_args(Name)):
            return names
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    requirement = f"its {file.name} is damaged: set fabric.executor to loop or vmap"
    raise BadInput("run", str(file.parent), requirement)


def more_steps(steps: Sequence[int], at_once: int) -> float:
    """The ratio of all `steps` of clients to the measured ones, at most `MEASURED_STEPS` of each.

    Clients that train at once take as many as the one with most of them.
    """
    most = []
    for first in range(0, len(steps), at_once):
        together = steps[first : first + at_once]
        most.append(max(together))
    measured = sum(min(MEASURED_STEPS, count) for count in most)
    return sum(most) / max(1, measured)


def seconds_by_client(
    executors: Mapping[Name, Executor],
    jobs: Callable[[], list[LocalJob]],
    repeats: int = 3,
) -> dict[Name, float]:
    """Seconds that each executor takes for one of the `jobs`, which are made anew for every
    measurement.

    Executors take turns; the least of `repeats` counts, after one run that does not. One that fails
    (but the loop) is left out, which stderr says.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in executors}
    for _ in range(1 + repeats):
        for name in list(seconds):
            try:
                seconds[name].append(_seconds(executors[name], jobs()))
            except Exception as error:
                if name == "loop":
                    raise
                reason = redact(f"{type(error).__name__}: {error}".splitlines()[0])
                log.say(f"fabric.executor auto: {name} fails and is left out ({reason})")
                del seconds[name]
    return {name: min(times[1:]) for name, times in seconds.items()}


def _seconds(executor: Executor, jobs: list[LocalJob]) -> float:
    """Seconds that the executor takes for one of the jobs."""
    at_once = executor.at_once
    device = executor.fabric.device
    for k, job in enumerate(jobs):
        job.place = k % at_once
    synchronize(device)
    start = time.perf_counter()
    for first in range(0, len(jobs), at_once):
        executor.train(jobs[first : first + at_once])
    synchronize(device)
    return (time.perf_counter() - start) / len(jobs)
