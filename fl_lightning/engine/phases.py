"""A phase of training: the executor's job, and its cost in floating-point operations (a
multiply-add counts as two).

Matrix products and convolutions are counted by `torch.utils.flop_counter` on one small batch, and
are proportional to the samples. Operations that it does not see (activations, normalisation, the
optimiser's step) are few beside them and left out; the proximal term, which papers count, and a
linear term have formulas. Passes of a client's model in hooks are metered as they run.
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
"""Per number of the proximal term and step: subtract, multiply, add for the value; multiply, add
for the gradient."""
LINEAR_FLOPS = 3
"""Per number of a linear term and step: multiply and add for the value, add for the gradient."""


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
    """The batches of a client's phase.

    Args:
        index: how many phases of this purpose and length it has trained before; batches follow on.
        batch_size: None: the federation's.
        public: the phase is on public data: `most_batches` (of `fl-train plan`) does not cut it
            short, but `--smoke` does.
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
    """The executor's job for a client's phase.

    Args:
        index: how many phases of this purpose the client has trained before; None: one for each
            round before.
        purpose: in place of the phase's.
    """
    run = client.run
    part = client.data.train if phase.part is None else phase.part
    if phase.targets is not None:
        part = TargetPart(part, phase.targets)
    length = Length.of(run.config.federation)
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
    """Prefix of the optimiser's state for such phases in a client's memory.

    Phases of another slot or purpose (FedAS's alignment) have a state of their own.
    """
    of_slot = "optimizer." if phase.slot == MODEL else f"optimizer.slot {phase.slot}."
    if phase.purpose == "train":
        return of_slot
    return f"{of_slot}phase {phase.purpose}."


def _belongs(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and not name.removeprefix(prefix).startswith(("slot ", "phase "))


# ---------------------------------------------------------------- operations


@dataclass(frozen=True)
class SampleCost:
    """Operations for one training sample."""

    forward: float
    """A forward pass through the model."""
    backward: float
    """A backward pass to all parameters."""
    extra: float
    """The rest of the training step: further passes of a method or of a user's own step."""

    @property
    def step(self) -> float:
        """The whole training step."""
        return self.forward + self.backward + self.extra

    def passes(self, forward: float, backward: float) -> int:
        """Operations of so many samples' forward and backward passes."""
        return round(self.forward * forward + self.backward * backward)

    def of(
        self,
        samples: int,
        steps: int,
        proximal: int,
        linear: int = 0,
    ) -> dict[str, int]:
        """Operations of a phase of so many `samples` (in all epochs) and `steps`, with so many
        numbers in the proximal and in the linear term: `flops_forward`, `flops_backward`,
        `flops_extra` and `flops_penalty`."""
        penalty = PROXIMAL_FLOPS * proximal + LINEAR_FLOPS * linear
        return {
            "flops_forward": round(self.forward * samples),
            "flops_backward": round(self.backward * samples),
            "flops_extra": round(self.extra * samples),
            "flops_penalty": penalty * steps,
        }


def sample_cost(client: ClientModule, batch: tuple[Tensor, Tensor]) -> SampleCost:
    """Count the user's or the task's training step on one `batch`.

    Running statistics of the bound model are written to: bind a copy first.
    """
    from torch.utils.flop_counter import FlopCounterMode

    parameters = [p for p in client.binding.parameters if p.requires_grad]
    client.model.train()
    client.set_objective(PLAIN)
    n = len(batch[1])
    with client.last.trial():
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
    """The sum of all numbers in a model's output that have a gradient."""
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
    """Operations of a phase: by column as `SampleCost.of`, and others, to add to `Client.flops`.

    The columns are those of training on the client's own data: there are none for other data, and
    for own steps. All passes of own losses have been metered, or counted as stacked; one for each
    sample is in the columns, too, and is subtracted from the others.

    Args:
        plain: of a sample, where all blocks train.
        cost: of a sample, where the blocks of the phase train.
    """
    extra = 0.0
    samples = fit.samples
    loss = phase.objective.loss
    if job.passes is not None:  # stacked passes, which no hook sees
        extra = plain.passes(*job.passes) if job.passes[1] or not fit.steps else math.nan
    if phase.step is not None:
        return {}, extra
    if isinstance(loss, PureLoss):
        extra += loss.flops * samples
    once = plain.passes(samples, samples)
    if not on_own_data(client, phase):
        return {}, extra if loss is not None else extra + once
    linear = 0 if phase.objective.linear is None else client.layout.parameters.stop
    counted = cost.of(samples, fit.steps, job.proximal_numbers, linear)
    return counted, extra if loss is None else extra - once


class Meter(Passes):
    """Adds to `client.flops` the operations of the bound model's passes outside of plain
    training."""

    def __init__(self, module: ClientModule) -> None:
        super().__init__(module)
        self._parameters = module.binding.parameters
        self._client: Client
        self._cost: SampleCost | None = None
        self._before = 0

    def of(self, client: Client, cost: SampleCost | None) -> Meter:
        """Count for `client`, whose samples cost `cost`, within the next `with`; returns the
        meter."""
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
        return sum([p._version for p in self._parameters])  # each write in place adds one
