"""Tries each model in evaluation on made-up samples, before the first round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.core import Layout, RunContext
from fl_lightning.engine.trainer import Trainer
from fl_lightning.foundation import log
from fl_lightning.foundation.device import random_states, rng_restored, same_states
from fl_lightning.foundation.errors import BadInput
from fl_lightning.models import why_head_is_doubtful
from fl_lightning.models.base import inputs

TOGETHER, FEWER = 4, 2
"""Samples that are scored together, and the first of them, which are scored again. Ours: the least
numbers that tell."""
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}
"""How far scores may differ with the samples beside, relative to their norm. Ours: a hundred times
the differences of deep networks."""
SIZE = 0.1
"""Deviation of the numbers in place of parameters that are all 0, with which a classifier would
give 0 for any sample."""


@dataclass(frozen=True)
class _Pass:
    """A pass in evaluation."""

    scores: Tensor
    draws: bool
    """Whether it drew random numbers."""
    writes: list[str]
    """Names of the buffers that it wrote to."""
    by_batch: list[str]
    """Names of the BatchNorms that normalised by the batch."""

    @property
    def usual(self) -> bool:
        """Whether its scores can be compared."""
        return self.scores.dtype in ROUNDING and bool(self.scores.isfinite().all())


def try_evaluation(run: RunContext, trainers: Sequence[Trainer]) -> bool:
    """Whether scores may be remembered: no model writes to a buffer when it is scored. Logs what is
    odd about a model, and sets its `draws_in_evaluation`.

    Raises:
        BadInput: a model's scores of a sample depend on the samples beside it.
    """
    pure = True
    for trainer in trainers:
        name = trainer.group.name
        module = trainer.module
        passes = _passes(run, trainer)
        lines = [why_head_is_doubtful(module.model)]
        if passes is not None:
            together, alone = passes
            _check_alone(name, together, alone)
            module.draws_in_evaluation = together.draws
            pure = pure and not together.writes
            if together.draws:
                lines.append(
                    "it draws random numbers when it is scored: equal runs draw the same, and "
                    "scores are by chance"
                )
        for line in filter(None, lines if run.is_main else []):
            log.say(f"model {name}: {line}")
    return pure


def _check_alone(
    name: str,
    together: _Pass,
    alone: _Pass,
) -> None:
    """Raise `BadInput` where scores depend on the samples beside."""
    limit = ROUNDING[alone.scores.dtype] * torch.linalg.vector_norm(alone.scores)
    distance = torch.linalg.vector_norm(together.scores[:FEWER] - alone.scores)
    depends = together.by_batch if together.draws else distance > limit
    if not bool(depends):
        return
    layers = ", ".join(f"layer {name}" for name in together.by_batch)
    cure = "take track_running_stats=True (and call no train() in forward), or GroupNorm"
    if not layers:
        layers = "its forward pass"
        cure = "take each sample by itself, or running statistics (nn.BatchNorm1d)"
    requirement = (
        f"scores would depend on evaluation.batch_size: {layers} normalises by the scored batch; "
        f"{cure}"
    )
    raise BadInput("model", name, requirement)


def _passes(run: RunContext, trainer: Trainer) -> tuple[_Pass, _Pass] | None:
    """A pass of several samples, and one of the first of them; None: the model cannot be tried on
    made-up samples."""
    group = trainer.group
    data = run.data
    draws = torch.Generator().manual_seed(0)
    x = inputs(TOGETHER, data.input_shape, data.text, draws).to(run.device)
    x = x.to(run.dtype) if x.is_floating_point() else x
    vector = _without_zeros(group.initial, group.layout, draws)
    try:
        with rng_restored(run.device), torch.no_grad():
            passes = _pass(trainer, vector, x), _pass(trainer, vector, x[:FEWER])
    # a model may need samples that are like its data in more than their shape
    except Exception:
        return None
    finally:
        trainer.bind_initial()
    if all(one.usual for one in passes):
        return passes
    return None


def _without_zeros(
    vector: Tensor,
    layout: Layout,
    draws: torch.Generator,
) -> Tensor:
    """A copy of `vector` (D,) with random numbers in place of parameters that are all 0."""
    filled = vector.clone()
    for block in layout.blocks:
        numbers = filled[block.columns]
        if block.kind == "parameter" and not numbers.any():
            numbers.copy_(SIZE * torch.randn(block.size, generator=draws))
    return filled


def _pass(
    trainer: Trainer,
    vector: Tensor,
    x: Tensor,
) -> _Pass:
    """A pass of the model `vector` on samples `x`."""
    module = trainer.module
    module.binding.bind(vector.clone(), trainer.group.first_buffers())
    model = module.model.eval()
    by_batch: dict[str, None] = {}
    hooks = []
    for name, norm in model.named_modules():
        if isinstance(norm, _BatchNorm):

            def note(
                norm: _BatchNorm,
                inputs: Any,
                output: Any,
                name: str = name,
            ) -> None:
                if norm.training or norm.running_mean is None:
                    by_batch[name] = None

            hooks.append(norm.register_forward_hook(note))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    states = random_states(trainer.run.device)
    try:
        scores: Tensor = model(x)
    finally:
        for hook in hooks:
            hook.remove()
    drew = not same_states(states, random_states(trainer.run.device))
    writes = [
        name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])
    ]
    return _Pass(scores, drew, writes, list(by_batch))
