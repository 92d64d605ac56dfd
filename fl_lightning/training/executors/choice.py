"""Which executor: the one that is asked for, where it is fit for the model and the run, or the
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

from fl_lightning.core.phase import PLAIN
from fl_lightning.foundation import log
from fl_lightning.foundation.device import no_draws, random_states, same_states, synchronize
from fl_lightning.foundation.errors import BadInput, redact
from fl_lightning.foundation.files import write_whole
from fl_lightning.foundation.parallel import Group
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
"""`auto` leaves the loop only for what takes at most this share of its time: timings scatter by
about a tenth."""


def make(
    name: Name,
    fabric: Fabric,
    module: ClientModule,
    optimizer: LocalOptimizer,
    spec: ExecutorSpec,
    together: Together | None = None,
    kind: Hashable = None,
) -> tuple[Executor, str | None]:
    """The executor `name` for the `module`; or the loop, and why the other is not fit for this run.

    It writes to nothing but what is bound to it, and draws no random number. With `together`,
    `vmap` is shared by all runs that it drives whose clients are of this `kind`.
    """
    loop = Loop(fabric, module, optimizer)
    if name == "loop":
        return loop, None
    reason = unfit(fabric, module, spec)
    if reason is None:
        x, y, gradients, reason = _probed(fabric, module, spec)
    if reason is not None:
        return loop, reason

    def stacked(cohort: int) -> Vmap:
        return Vmap(fabric, module, optimizer, replace(spec, cohort=cohort))

    if together is None:
        vmap = stacked(spec.cohort)
    else:
        vmap = together.executor(kind, lambda: stacked(MOST_AT_ONCE))
    reason = vmap.unlike(x, y, gradients, module)
    if reason is not None:
        return loop, reason
    return vmap if together is None else Shared(vmap, together), None


def unfit(fabric: Fabric, module: ClientModule, spec: ExecutorSpec) -> str | None:
    """Why what this run asks of a step is beyond `vmap`, as far as its settings tell; None: it is
    not."""
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
    if spec.channels_last:
        return "it knows no fabric.channels_last"
    if spec.whole_last:
        return "BatchNorm mixes the samples of a batch"
    return None


def _probed(
    fabric: Fabric, module: ClientModule, spec: ExecutorSpec
) -> tuple[Tensor, Tensor, Sequence[Tensor | None], str | None]:
    """A made-up batch, the gradients of the bound model's copy on it (None: of what the loss does
    not depend on), and what is unfit in its forward pass."""
    device, binding = fabric.device, module.binding
    # less than a whole batch, which is then filled up
    size = max(1, min(3, spec.largest_batch - 1))
    draws = torch.Generator().manual_seed(0)
    x = inputs(size, spec.input_shape, spec.text, draws)
    y = targets(
        size, spec.input_shape, spec.num_classes, spec.text, floats=not module.metric.rises
    ).to(device)
    x = x.to(device, spec.dtype if spec.text is None else x.dtype)
    assert binding.vector is not None
    own = dict(module.model.named_buffers())
    binding.bind(binding.vector.clone(), [own[n].detach().clone() for n in module.layout.own_names])
    module.set_objective(PLAIN)
    module.model.train()
    before, counted = (
        {n: b.clone() for n, b in module.model.named_buffers()},
        _counted(module.model),
    )
    parameters = [p for p in binding.parameters if p.requires_grad]
    module.last.read = None
    with no_draws(device), module.last.trial():
        states = random_states(device)
        loss = module.metric.loss(module.model(x), y)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        drawn = not same_states(states, random_states(device))
    changed = {
        place for place, value in _counted(module.model).items() if counted.get(place) != value
    }
    reason = None
    if drawn:
        reason = "the model draws random numbers (dropout)"
    elif module.last.read is not None:
        reason = f"the model reads {module.last.read}"
    elif changed:
        reason = f"the model's forward pass changes its {min(changed)}"
    elif any(not torch.equal(b, before[n]) for n, b in module.model.named_buffers()):
        reason = "the model's forward pass writes to its buffers"
    return x, y, gradients, reason


def _counted(model: nn.Module) -> dict[str, str]:
    """Numbers, words, and lists of them that the modules of `model` have as attributes, by dotted
    name."""
    return {
        f"{path}.{name}".lstrip("."): repr(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if all(isinstance(leaf, int | float | str | None) for leaf in tree_leaves(value))
    }


# ---------------------------------------------------------------- the fastest


@dataclass(frozen=True)
class Contest:
    """The executors that are fit for the clients of one model, and what they are measured on."""

    name: str
    """Of the model."""
    executors: Mapping[Name, Executor]
    jobs: Callable[[], list[LocalJob]]
    """Makes the measured jobs anew: at most `MEASURED_STEPS` steps of some of this rank's clients,
    on copies."""
    steps: Sequence[int]
    """Steps that those clients will take, in an epoch or in a round: what is measured is scaled to
    them."""


def fastest(group: Group, file: Path, contests: Sequence[Contest], resumed: bool) -> list[Name]:
    """The fastest executor for each model, equal on every rank; `file` keeps it, and a resumed run
    goes by that.

    Each rank takes a few steps of some of its clients, on copies of the initial model and with
    draws of their own.
    """
    known: list[Name] | None = _known(file, len(contests)) if resumed and group.rank == 0 else None
    known = group.gather_objects(known)[0]
    if known is not None:
        return known
    chosen: list[Name] = []
    seconds: list[dict[Name, float]] = []
    for contest in contests:
        here = _measured(contest) if len(contest.executors) > 1 else {}
        everywhere = [part for part in group.gather_objects(here) if part]
        able = [
            n for n in contest.executors if everywhere and all(n in part for part in everywhere)
        ]
        total = {n: sum(part[n] for part in everywhere) / len(everywhere) for n in able}
        worth = [name for name, one in total.items() if one < WORTH * total["loop"]]
        best: Name = min(worth, key=total.__getitem__, default="loop")
        chosen.append(best)
        seconds.append(total)
        if group.rank == 0:
            times = (
                ", ".join(f"{name} {1000 * s:.3g} ms" for name, s in total.items())
                or "no other is fit"
            )
            log.say(f"fabric.executor auto: {best} for {contest.name} (a client: {times})")
    if group.rank == 0:
        write_whole(
            file, json.dumps({"executors": chosen, "seconds_by_client": seconds}, indent=2) + "\n"
        )
    return chosen


def _measured(contest: Contest) -> dict[Name, float]:
    """Seconds of a client on this rank; none where it has no client that can train."""
    executors, steps = contest.executors, contest.steps
    device = executors["loop"].fabric.device
    with no_draws(device):
        try:
            taken = seconds_by_client(executors, contest.jobs) if steps else {}
            return {
                name: one * more_steps(steps, executors[name].at_once)
                for name, one in taken.items()
            }
        # a client fails; it will again in its visit, where client and round are named
        except Exception:
            return {}
        finally:
            executors["loop"].module.set_objective(PLAIN)


def _known(file: Path, architectures: int) -> list[Name] | None:
    """What an earlier part of the run has found."""
    try:
        names: list[Name] = json.loads(file.read_text(encoding="utf-8"))["executors"]
        if len(names) == architectures and set(names) <= set(get_args(Name)):
            return names
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    allowed = f"its {file.name} is damaged: name a fabric.executor"
    raise BadInput("run", str(file.parent), allowed)


def more_steps(steps: Sequence[int], at_once: int) -> float:
    """How many times as long an epoch of clients with so many `steps` takes as the first
    `MEASURED_STEPS` of each.

    Clients that train at once take as many as the one with most of them.
    """
    most = [max(steps[first : first + at_once]) for first in range(0, len(steps), at_once)]
    return sum(most) / max(1, sum(min(MEASURED_STEPS, m) for m in most))


def seconds_by_client(
    executors: Mapping[Name, Executor], jobs: Callable[[], list[LocalJob]], repeats: int = 3
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
                why = redact(f"{type(error).__name__}: {error}".splitlines()[0])
                log.say(f"fabric.executor auto: {name} fails and is left out ({why})")
                del seconds[name]
    return {name: min(times[1:]) for name, times in seconds.items()}


def _seconds(executor: Executor, todo: list[LocalJob]) -> float:
    """Seconds that the executor takes for one of the jobs `todo`."""
    for k, job in enumerate(todo):
        job.place = k % executor.at_once
    synchronize(executor.fabric.device)
    start = time.perf_counter()
    for first in range(0, len(todo), executor.at_once):
        executor.train(todo[first : first + executor.at_once])
    synchronize(executor.fabric.device)
    return (time.perf_counter() - start) / len(todo)
