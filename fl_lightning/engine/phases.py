"""A phase of training: what an executor trains, and what that costs in floating-point operations (a
multiply-add counts as two).

Matrix products and convolutions are counted by `torch.utils.flop_counter` on one small batch, and
are proportional to the samples. What it does not see (activations, normalisation, the optimiser's
step) is small beside them and left out; the proximal term, which papers count, and a linear term
have formulas. What hooks do with a client's model is metered as it runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
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
    """The batches of the phase of `client` after `index` of the same purpose and length, on its own
    data or on `public` ones, which a rehearsed round does not cut short (`batch_size` None: the
    federation's)."""
    most = run.most_batches if not public or run.config.smoke else None
    length = length if most is None else length.at_most(most)
    size = batch_size or run.config.federation.batch_size
    return BatchSchedule(
        run.config.seed, purpose, client, index, length, size, group.whole_last, most
    )


def on_own_data(client: Client, phase: Phase) -> bool:
    """Whether `phase` trains on the client's training data, or on a subset of them."""
    return phase.part is None or phase.part.whole is client.data.train


def job_of(
    client: Client, phase: Phase, index: int | None = None, purpose: str | None = None
) -> LocalJob:
    """`phase` of `client`, after `index` of its purpose (None: one for each round before), for an
    executor (`purpose`: in place of the phase's)."""
    run, group = client.run, client.group
    index = client.round - 1 if index is None else index
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
        run, group, client.id, index, purpose or phase.purpose, length, phase.batch_size, public
    )
    if phase.budget is not None:
        schedule = replace(schedule, budget=phase.budget, before=client.rounds)
    keep = run.config.optimizer.keep_state
    own = phase.step
    job = LocalJob(
        vector=client[phase.slot],
        buffers=client.state.buffers,
        part=part,
        schedule=schedule,
        lr=client.lr if phase.lr is None else phase.lr,
        objective=phase.objective,
        trains=phase.trains,
        step=None if own is None else partial(own, client),
        asker=client if phase.by_gradient else None,
    )
    # a stretch on public data begins cleared, and leaves nothing
    if keep and own is None and not public:
        job.keep, prefix = True, _prefix(phase)
        job.kept = {
            k.removeprefix(prefix): v for k, v in client.memory.items() if _belongs(k, prefix)
        }
    return job


def keep_optimizer(client: Client, phase: Phase, job: LocalJob) -> None:
    """Keep, with the client, what its optimiser was left with."""
    if not job.keep:
        return
    prefix, store = _prefix(phase), client.run.store
    others = {k: v for k, v in client.memory.items() if not _belongs(k, prefix)}
    kept = {f"{prefix}{k}": store.stow(v) if v.ndim else v for k, v in job.kept.items()}
    client.state.memory = others | kept


def _prefix(phase: Phase) -> str:
    """Of the names under which a client's memory has what the optimiser of such phases was left
    with.

    Phases of another slot or purpose (FedAS's alignment) are another descent: they share nothing.
    """
    of_slot = "optimizer." if phase.slot == MODEL else f"optimizer.slot {phase.slot}."
    return of_slot if phase.purpose == "train" else f"{of_slot}phase {phase.purpose}."


def _belongs(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and not name.removeprefix(prefix).startswith(("slot ", "phase "))


# ---------------------------------------------------------------- operations


@dataclass(frozen=True)
class SampleCost:
    """Operations for one training sample."""

    forward: float
    """One pass through the model."""
    backward: float
    """Back through it, to all parameters."""
    extra: float
    """What the training step does beyond that: further passes of a method or of a user's own
    step."""

    @property
    def step(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.extra

    def passes(self, forward: float, backward: float) -> int:
        """Operations of so many samples' passes, and ways back."""
        return round(self.forward * forward + self.backward * backward)

    def of(self, samples: int, steps: int, proximal: int, linear: int = 0) -> dict[str, int]:
        """`flops_forward`, `flops_backward`, `flops_extra` and `flops_penalty` of a phase of so
        many `samples` (epochs counted) and `steps`, with so many numbers in the proximal and in the
        linear term."""
        return {
            "flops_forward": round(self.forward * samples),
            "flops_backward": round(self.backward * samples),
            "flops_extra": round(self.extra * samples),
            "flops_penalty": (PROXIMAL_FLOPS * proximal + LINEAR_FLOPS * linear) * steps,
        }


def sample_cost(client: ClientModule, batch: tuple[Tensor, Tensor]) -> SampleCost:
    """Count the user's or the task's step on one `batch`.

    It writes to what is bound (running statistics): bind a copy first.
    """
    from torch.utils.flop_counter import FlopCounterMode

    def back(loss: Tensor) -> None:
        torch.autograd.grad(
            loss, [p for p in client.binding.parameters if p.requires_grad], allow_unused=True
        )

    client.model.train()
    client.set_objective(PLAIN)
    n = len(batch[1])
    with client.last.trial():
        with FlopCounterMode(display=False) as passed:
            out = client.model(batch[0])
        with FlopCounterMode(display=False) as returned:
            back(_total(out))
        with FlopCounterMode(display=False) as whole:
            back(client.training_step(batch, 0))
    forward, backward, step = (mode.get_total_flops() / n for mode in (passed, returned, whole))
    return SampleCost(forward, backward, max(step - forward - backward, 0.0))


def _total(out: Any) -> Tensor:
    """The sum of all numbers in what a model has returned that a gradient reaches."""
    tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([tensor.sum() for tensor in tensors]).sum()


def phase_flops(
    client: Client, phase: Phase, job: LocalJob, fit: Fit, plain: SampleCost, cost: SampleCost
) -> tuple[dict[str, int], float]:
    """Operations of a phase on the client's own data, as `SampleCost.of`, and all others.

    Own steps and own losses have been metered: of a loss only what goes beyond one pass for each
    sample is extra.

    Args:
        plain: of a sample, where all blocks train.
        cost: of a sample, where those of the phase do.
    """
    extra, samples, loss = 0.0, fit.samples, phase.objective.loss
    if job.passes is not None:  # of what was stacked, where no hook sees a pass
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
    """What the passes of a client's bound model come to that code beside the phases sends."""

    def __init__(self, module: ClientModule) -> None:
        super().__init__(module)
        self._parameters = module.binding.parameters
        self._client: Client
        self._cost: SampleCost | None = None
        self._before = 0

    def of(self, client: Client, cost: SampleCost | None) -> Meter:
        """Within, count for `client`, whose samples cost `cost`."""
        self._client, self._cost = client, cost
        return self

    def __enter__(self) -> Self:
        self._before = self._versions()
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if kind is not None:
            return
        client, cost = self._client, self._cost
        if cost is None or (not self.backward and self._versions() != self._before):
            client.flops = math.nan  # unknown: steps were taken, and no way back was seen
        elif self.forward or self.backward:
            client.flops += cost.passes(self.forward, self.backward)

    def _versions(self) -> int:
        return sum([p._version for p in self._parameters])  # each write in place adds one
