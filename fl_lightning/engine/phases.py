"""Makes the executor's job of a phase, and counts the phase's floating-point operations (FLOPs; a
multiply-add counts as two).

`torch.utils.flop_counter` counts matrix products and convolutions on one small batch; they are
proportional to the number of samples. It does not count activations, normalisation and the
optimiser's step, which cost little. The proximal term, which papers count, and the linear term have
formulas. A `Meter` counts passes of a client's model in hooks while they run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fl_lightning.core import PLAIN, Client, Fit, ModelGroup, Phase, PureLoss, RunContext
from fl_lightning.data.part import TargetPart
from fl_lightning.storage.state import MODEL
from fl_lightning.training.executors.base import LocalJob
from fl_lightning.training.module import ClientModule, Passes
from fl_lightning.training.schedule import BatchSchedule, Length

PROXIMAL_FLOPS = 5
"""FLOPs of the proximal term for each parameter in it and each step: subtract, multiply, add for
the value; multiply, add for the gradient."""
LINEAR_FLOPS = 3
"""FLOPs of a linear term for each parameter and each step: multiply and add for the value, add for
the gradient."""


def schedule_of(
    run: RunContext,
    group: ModelGroup,
    client: int,
    index: int,
    purpose: str,
    length: Length,
    batch_size: int | None = None,
    public: bool = False,
) -> BatchSchedule:
    """Make the schedule of the batches of a client's phase.

    Args:
        index: number of phases of this purpose and length that the client has trained before. The
            batches continue where the last of these phases ended.
        purpose: seeds the order of samples.
        length: length of the phase.
        batch_size: number of samples in a batch; None: `federation.batch_size`.
        public: whether the phase trains on public data. `RunContext.most_batches` limits a phase on
            public data with `--smoke`, but not in `fl-train plan`.
    """
    most = None
    if not public or run.config.smoke:
        most = run.most_batches
    length = length if most is None else length.at_most(most)
    size = batch_size or run.config.federation.batch_size
    return BatchSchedule(
        run.config.seed,
        purpose,
        client,
        index,
        length,
        size,
        group.whole_last,
        most,
    )


def on_own_data(client: Client, phase: Phase) -> bool:
    """Whether `phase` trains on the client's training data, or a subset of them."""
    return phase.part is None or phase.part.whole is client.data.train


def job_of(
    client: Client,
    phase: Phase,
    index: int | None = None,
    purpose: str | None = None,
) -> LocalJob:
    """Make the job by which an executor trains a client's phase.

    Args:
        index: number of phases of this purpose that the client has trained before, so that the
            batches continue there; None: the number of earlier rounds of the run.
        purpose: seeds the order of samples; None: `phase.purpose`.
    """
    run = client.run
    part = client.data.train if phase.part is None else phase.part
    if phase.targets is not None:
        part = TargetPart(part, phase.targets)
    length = Length.configured(run.config.federation)
    if phase.steps is not None:
        length = Length(steps=phase.steps)
    elif phase.epochs is not None:
        length = Length(epochs=phase.epochs)
    public = not on_own_data(client, phase)
    schedule = schedule_of(
        run,
        client.group,
        client.id,
        client.round - 1 if index is None else index,
        purpose or phase.purpose,
        length,
        phase.batch_size,
        public,
    )
    if phase.budget is not None:
        schedule = replace(schedule, budget=phase.budget, before=client.rounds)
    step = phase.step
    job = LocalJob(
        vector=client[phase.slot],
        buffers=client.state.buffers,
        part=part,
        schedule=schedule,
        lr=client.lr if phase.lr is None else phase.lr,
        objective=phase.objective,
        trains=phase.trains,
        step=None if step is None else partial(step, client),
        asker=client if phase.by_gradient else None,
    )
    # on public data the optimiser begins without state, and its state is not kept
    job.keep = run.policy.keeps_optimizer and step is None and not public
    if job.keep:
        prefix = _prefix(phase)
        for name, value in client.memory.items():
            if _belongs(name, prefix):
                job.kept[name.removeprefix(prefix)] = value
    return job


def keep_optimizer(
    client: Client,
    phase: Phase,
    job: LocalJob,
) -> None:
    """Replace the state of the phase's optimiser in the client's memory by that of the job."""
    if not job.keep:
        return
    prefix = _prefix(phase)
    store = client.run.store
    memory = {name: v for name, v in client.memory.items() if not _belongs(name, prefix)}
    for name, value in job.kept.items():
        memory[f"{prefix}{name}"] = store.stow(value) if value.ndim else value
    client.state.memory = memory


def _prefix(phase: Phase) -> str:
    """Return the prefix of the names under which a client's memory keeps the optimiser's state.
    Phases of another slot or purpose (FedAS's alignment) have another state."""
    of_slot = "optimizer." if phase.slot == MODEL else f"optimizer.slot {phase.slot}."
    if phase.purpose == "train":
        return of_slot
    return f"{of_slot}phase {phase.purpose}."


def _belongs(name: str, prefix: str) -> bool:
    """Whether a tensor of a client's memory is part of the optimiser's state with this `_prefix`,
    and not of one with a longer prefix."""
    return name.startswith(prefix) and not name.removeprefix(prefix).startswith(("slot ", "phase "))


# ---------------------------------------------------------------- operations


@dataclass(frozen=True)
class SampleCost:
    """FLOPs for one training sample."""

    forward: float
    """A forward pass through the model."""
    backward: float
    """A backward pass to all parameters."""
    extra: float
    """The rest of the training step: further passes of a method or of a user's `training_step`."""

    @property
    def step(self) -> float:
        """FLOPs of the whole training step for one sample."""
        return self.forward + self.backward + self.extra

    def passes(self, forward: float, backward: float) -> int:
        """Return the FLOPs of passes through the model.

        Args:
            forward: number of samples in forward passes.
            backward: number of samples in backward passes.
        """
        return round(self.forward * forward + self.backward * backward)

    def by_column(
        self,
        samples: int,
        steps: int,
        proximal: int,
        linear: int = 0,
    ) -> dict[str, int]:
        """Return the FLOPs of a phase in the columns `flops_forward`, `flops_backward`,
        `flops_extra` and `flops_penalty`.

        Args:
            samples: number of samples in all of its steps.
            steps: number of steps.
            proximal: number of parameters in the proximal term.
            linear: number of parameters in the linear term.
        """
        penalty = PROXIMAL_FLOPS * proximal + LINEAR_FLOPS * linear
        return {
            "flops_forward": round(self.forward * samples),
            "flops_backward": round(self.backward * samples),
            "flops_extra": round(self.extra * samples),
            "flops_penalty": penalty * steps,
        }


def sample_cost(client: ClientModule, batch: tuple[Tensor, Tensor]) -> SampleCost:
    """Count the FLOPs of a training step on one `batch`, divided by its samples.

    The step is the task's, or the user's `training_step`. It changes running statistics of the
    model to which `client` is bound, so bind it to a copy first.
    """
    from torch.utils.flop_counter import FlopCounterMode

    parameters = [p for p in client.binding.parameters if p.requires_grad]
    client.model.train()
    client.set_objective(PLAIN)
    n = len(batch[1])
    with client.step_state.trial():
        with FlopCounterMode(display=False) as forward_mode:
            output = client.model(batch[0])
        with FlopCounterMode(display=False) as backward_mode:
            torch.autograd.grad(_total(output), parameters, allow_unused=True)
        with FlopCounterMode(display=False) as step_mode:
            loss = client.training_step(batch, 0)
            torch.autograd.grad(loss, parameters, allow_unused=True)
    forward = forward_mode.get_total_flops() / n
    backward = backward_mode.get_total_flops() / n
    step = step_mode.get_total_flops() / n
    return SampleCost(forward, backward, max(step - forward - backward, 0.0))


def _total(output: Any) -> Tensor:
    """Return the sum of all numbers in a model's output that require a gradient."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return torch.stack([leaf.sum() for leaf in leaves if leaf.requires_grad]).sum()


def phase_flops(
    client: Client,
    phase: Phase,
    job: LocalJob,
    fit: Fit,
    plain: SampleCost,
    cost: SampleCost,
) -> tuple[dict[str, int], float]:
    """Count the FLOPs of a phase.

    The passes of a method's own loss or step are counted while it runs, by a `Meter` or in
    `job.passes`.

    Args:
        plain: cost of a sample if all blocks train.
        cost: cost of a sample if the blocks of this phase train.

    Returns:
        Two parts, which add up to the phase's FLOPs together with those that a meter has added to
        `Client.flops`. First, the columns of `SampleCost.by_column`; they are empty if the phase
        has its own step or trains on other data than the client's. Second, the FLOPs to add to
        `Client.flops`; NaN if they are unknown. This number may be negative: with the method's own
        loss, the columns contain a forward and a backward pass of each sample that has been counted
        already, and it subtracts them.
    """
    extra = 0.0
    samples = fit.samples
    loss = phase.objective.loss
    if job.passes is not None:  # stacked passes, which the meter does not count
        extra = plain.passes(*job.passes) if job.passes[1] or not fit.steps else math.nan
    if phase.step is not None:
        return {}, extra
    if isinstance(loss, PureLoss):
        extra += loss.flops * samples
    once = plain.passes(samples, samples)
    if not on_own_data(client, phase):
        return {}, extra if loss is not None else extra + once
    linear = 0 if phase.objective.linear is None else client.layout.parameters.stop
    columns = cost.by_column(samples, fit.steps, job.proximal_numbers, linear)
    return columns, extra if loss is None else extra - once


class Meter(Passes):
    """Counts the passes of the bound model that hooks run outside of the phases, and adds their
    FLOPs to `client.flops`."""

    def __init__(self, module: ClientModule) -> None:
        super().__init__(module)
        self._parameters = module.binding.parameters
        self._client: Client
        self._cost: SampleCost | None = None
        self._before = 0

    def attach(self, client: Client, cost: SampleCost | None) -> Meter:
        """Set the client whose passes the next `with` block counts; returns the meter.

        Args:
            cost: FLOPs of the client's model for one sample; None: unknown.
        """
        self._client = client
        self._cost = cost
        return self

    def __enter__(self) -> Self:
        self._before = self._versions()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if exception[0] is not None:
            return
        client = self._client
        cost = self._cost
        if cost is None or (not self.backward and self._versions() != self._before):
            client.flops = math.nan  # unknown: parameters changed without a backward pass
        elif self.forward or self.backward:
            client.flops += cost.passes(self.forward, self.backward)

    def _versions(self) -> int:
        """Return a number that each write in place to a parameter increases."""
        return sum([p._version for p in self._parameters])
