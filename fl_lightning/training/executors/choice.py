"""Makes the configured executor, if it can train the model in this run, or measures the fastest."""

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
from fl_lightning.training.executors.together import Shared, Together
from fl_lightning.training.executors.vmap import Vmap
from fl_lightning.training.executors.widths import MOST_AT_ONCE
from fl_lightning.training.module import ClientModule
from fl_lightning.training.optimizers import LocalOptimizer

MEASURED_STEPS = 4
"""Largest number of steps of each client that `auto` measures."""

WORTH = 0.9
"""`auto` chooses another executor than the loop only if it takes at most this share of the loop's
time, as measured times vary by about a tenth."""


def make(
    name: Name,
    fabric: Fabric,
    module: ClientModule,
    optimizer: LocalOptimizer,
    spec: ExecutorSpec,
    together: Together | None = None,
    kind: Hashable = None,
) -> tuple[Executor, str | None]:
    """Make an executor; returns (the executor `name`, None), or (the loop, the reason) if `name`
    cannot train this model.

    It writes only to tensors to which the module is bound, and draws no random numbers.

    Args:
        together: scheduler of several runs in this process; all of its runs with an equal `kind`
            share one `vmap`. None: this run is the only one.
        kind: a key that is equal for runs whose clients can train in the same pass.
    """
    loop = Loop(fabric, module, optimizer)
    if name == "loop":
        return loop, None
    reason = why_not_vmap(fabric, module, spec)
    if reason is None:
        x, y, gradients, reason = _probe(fabric, module, spec)
    if reason is not None:
        return loop, reason
    if together is None:
        vmap = Vmap(fabric, module, optimizer, spec)
    else:
        widest = replace(spec, cohort=MOST_AT_ONCE)
        vmap = together.executor(kind, lambda: Vmap(fabric, module, optimizer, widest))
    reason = vmap.why_not_stackable(x, y, gradients, module)
    if reason is not None:
        return loop, reason
    return vmap if together is None else Shared(vmap, together), None


def why_not_vmap(
    fabric: Fabric,
    module: ClientModule,
    spec: ExecutorSpec,
) -> str | None:
    """Return the reason why settings or the model's type rule out `vmap`; None: they do not."""
    if module.own_step:
        return "the model has its own training_step"
    if module.draws_in_evaluation:
        return "the model draws random numbers in evaluation"
    if module.binding.spectral:
        return "the model's spectral normalisation writes to its buffers"
    if spec.config.name != "sgd":
        return f"optimizer.name is {spec.config.name}, and only sgd can be stacked"
    if fabric.strategy.precision.precision == "16-mixed":
        return "16-mixed scales each client's loss"
    if spec.weighted:
        return "data.balance weights gives each client another loss"
    if spec.whole_last:
        return "BatchNorm mixes the samples of a batch"
    return None


def _probe(
    fabric: Fabric,
    module: ClientModule,
    spec: ExecutorSpec,
) -> tuple[Tensor, Tensor, Sequence[Tensor | None], str | None]:
    """Run a step of a copy of the bound model on a made-up batch.

    Returns:
        The batch x, y; the gradient of each trainable parameter (None: the loss does not depend on
        it); and the reason why the forward pass rules out `vmap` (None: it does not).
    """
    device = fabric.device
    binding = module.binding
    model = module.model
    # smaller than the largest batch, so that `why_not_stackable` pads it
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
    module.step_state.read = None
    with rng_restored(device), module.step_state.trial():
        states = random_states(device)
        loss = module.metric.loss(model(x), y)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        draws_numbers = not same_states(states, random_states(device))
    after = _plain_attributes(model)
    changed = [name for name, value in after.items() if attributes.get(name) != value]
    reason = None
    if draws_numbers:
        reason = "the model draws random numbers (dropout)"
    elif module.step_state.read is not None:
        reason = f"the model reads {module.step_state.read}"
    elif changed:
        reason = f"the model's forward pass changes its {min(changed)}"
    elif any(not torch.equal(b, before[name]) for name, b in model.named_buffers()):
        reason = "the model's forward pass writes to its buffers"
    return x, y, gradients, reason


def _plain_attributes(model: nn.Module) -> dict[str, str]:
    """Return the attributes of the modules of `model` that are numbers, texts or collections of
    them, by dotted name."""
    attributes = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            leaves = tree_leaves(value)
            if all(isinstance(leaf, int | float | str | None) for leaf in leaves):
                attributes[f"{path}.{name}".lstrip(".")] = repr(value)
    return attributes


# ---------------------------------------------------------------- the fastest


@dataclass(frozen=True)
class Candidates:
    """The executors that can train the clients of one architecture, and jobs to measure their
    speed."""

    name: str
    """Name of the architecture."""
    executors: Mapping[Name, Executor]
    jobs: Callable[[], list[LocalJob]]
    """Makes the measured jobs: at most `MEASURED_STEPS` steps of some of this rank's clients, on
    copies of the initial model."""
    steps: Sequence[int]
    """Number of steps that each of those clients takes in an epoch or in a round, to which measured
    seconds are scaled."""


def fastest(
    group: RankGroup,
    file: Path,
    candidates_by_group: Sequence[Candidates],
    resumed: bool,
) -> list[Name]:
    """Measure the fastest executor for each architecture; returns their names, equal on every rank.

    Args:
        file: the result is written here, and a resumed run reads it.
        resumed: whether the run was resumed.
    """
    stored: list[Name] | None = None
    if resumed and group.rank == 0:
        stored = _stored(file, len(candidates_by_group))
    stored = group.gather_objects(stored)[0]
    if stored is not None:
        return stored
    chosen = []
    seconds = []
    for candidates in candidates_by_group:
        here = _measured(candidates) if len(candidates.executors) > 1 else {}
        everywhere = [times for times in group.gather_objects(here) if times]
        means = {}
        for name in candidates.executors if everywhere else ():
            if all(name in times for times in everywhere):
                means[name] = sum(times[name] for times in everywhere) / len(everywhere)
        faster = [name for name, mean in means.items() if mean < WORTH * means["loop"]]
        best: Name = min(faster, key=means.__getitem__, default="loop")
        chosen.append(best)
        seconds.append(means)
        if group.rank == 0:
            listed = ", ".join(f"{name} {1000 * mean:.3g} ms" for name, mean in means.items())
            times = listed or "no other is fit"
            log.say(f"fabric.executor auto: {best} for {candidates.name} (a client: {times})")
    if group.rank == 0:
        content = {"executors": chosen, "seconds_by_client": seconds}
        write_whole(file, json.dumps(content, indent=2) + "\n")
    return chosen


def _measured(candidates: Candidates) -> dict[Name, float]:
    """Measure the seconds for a client with each executor on this rank; empty if no client here can
    train."""
    executors = candidates.executors
    steps = candidates.steps
    device = executors["loop"].fabric.device
    with rng_restored(device):
        try:
            seconds = seconds_by_client(executors, candidates.jobs) if steps else {}
            for name in seconds:
                seconds[name] *= extrapolation_factor(steps, executors[name].at_once)
            return seconds
        # a client that fails here fails again in its visit, whose error names client and round
        except Exception:
            return {}
        finally:
            executors["loop"].module.set_objective(PLAIN)


def _stored(file: Path, architectures: int) -> list[Name] | None:
    """Read the executors that the run chose before it was resumed; None: there is no file."""
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


def extrapolation_factor(steps: Sequence[int], at_once: int) -> float:
    """Return the factor by which measured seconds are multiplied to give those of a whole training:
    the number of all steps divided by the number of measured steps, which is at most
    `MEASURED_STEPS` for each client.

    Args:
        steps: number of steps of each client.
        at_once: number of clients in a pass; all of them wait for the one with the most steps.
    """
    longest = []
    for first in range(0, len(steps), at_once):
        together = steps[first : first + at_once]
        longest.append(max(together))
    measured = sum(min(MEASURED_STEPS, count) for count in longest)
    return sum(longest) / max(1, measured)


def seconds_by_client(
    executors: Mapping[Name, Executor],
    jobs: Callable[[], list[LocalJob]],
    repeats: int = 3,
) -> dict[Name, float]:
    """Measure the seconds that each executor takes for one client; returns them by the executor's
    name.

    Executors take turns. The first measurement of each is a warm-up that does not count; of the
    others the shortest counts. If another executor than the loop fails, it is missing in the
    result, and the log says so.

    Args:
        executors: executors by name, among them `loop`.
        jobs: makes the jobs of one measurement, one for each client.
        repeats: number of measurements that count.
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
    """Train the jobs with one executor; returns the seconds that this takes, divided by the number
    of jobs."""
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
