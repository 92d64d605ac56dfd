"""Tries each model in evaluation mode on made-up samples before the first round."""

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
"""Number of samples scored in one pass, and of the first of them, scored again in a second pass.
Ours: the smallest numbers that suffice."""
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest difference of a sample's scores in the two passes, relative to their norm. Ours: a
hundred times the differences of deep networks."""
SIZE = 0.1
"""Standard deviation of the random numbers that replace parameters which are all 0: a classifier of
zeros would give 0 for any sample."""


@dataclass(frozen=True)
class _Pass:
    """A forward pass in evaluation mode."""

    scores: Tensor
    draws: bool
    """Whether the pass drew random numbers."""
    writes: list[str]
    """Names of the buffers that the pass wrote to."""
    by_batch: list[str]
    """Names of the BatchNorms that normalised by the batch."""

    @property
    def comparable(self) -> bool:
        """Whether the scores are finite numbers whose rounding is known."""
        return self.scores.dtype in ROUNDING and bool(self.scores.isfinite().all())


def scoring_is_pure(run: RunContext, trainers: Sequence[Trainer]) -> bool:
    """Try each model on made-up samples in evaluation mode; returns whether scores may be cached,
    which is so if no model writes to a buffer while it is scored.

    Also sets `ClientModule.draws_in_evaluation` of each model, and logs which models draw random
    numbers in evaluation mode and for which models the layer taken as classifier may be the wrong
    one.

    Raises:
        BadInput: a model's scores of a sample depend on the other samples of the batch.
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
                    "it draws random numbers when it is scored: equal runs draw equal numbers, but "
                    "scores depend on chance"
                )
        for line in filter(None, lines if run.is_main else []):
            log.say(f"model {name}: {line}")
    return pure


def _check_alone(
    name: str,
    together: _Pass,
    alone: _Pass,
) -> None:
    """Raise `BadInput` if scores depend on the other samples of the batch."""
    limit = ROUNDING[alone.scores.dtype] * torch.linalg.vector_norm(alone.scores)
    distance = torch.linalg.vector_norm(together.scores[:FEWER] - alone.scores)
    depends = together.by_batch if together.draws else distance > limit
    if not bool(depends):
        return
    layers = ", ".join(f"layer {name}" for name in together.by_batch)
    cure = "set track_running_stats=True (and do not call train() in forward), or use GroupNorm"
    if not layers:
        layers = "its forward pass"
        cure = "treat each sample by itself, or use running statistics (nn.BatchNorm1d)"
    requirement = (
        f"scores would depend on evaluation.batch_size: {layers} normalises by the scored batch; "
        f"{cure}"
    )
    raise BadInput("model", name, requirement)


def _passes(run: RunContext, trainer: Trainer) -> tuple[_Pass, _Pass] | None:
    """Run a pass of `TOGETHER` samples and one of the first `FEWER`; None if the model fails on
    made-up samples or gives scores that cannot be compared."""
    group = trainer.group
    data = run.data
    draws = torch.Generator().manual_seed(0)
    x = inputs(TOGETHER, data.input_shape, data.text, draws).to(run.device)
    x = x.to(run.dtype) if x.is_floating_point() else x
    vector = _without_zeros(group.initial, group.layout, draws)
    try:
        with rng_restored(run.device), torch.no_grad():
            passes = _pass(trainer, vector, x), _pass(trainer, vector, x[:FEWER])
    # a model may fail on samples that resemble its data in their shape only
    except Exception:
        return None
    finally:
        trainer.bind_initial()
    if all(result.comparable for result in passes):
        return passes
    return None


def _without_zeros(
    vector: Tensor,
    layout: Layout,
    draws: torch.Generator,
) -> Tensor:
    """Return a copy of `vector` (D,) with random numbers in each parameter tensor that is all 0."""
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
    """Run the model `vector` (D,) on samples `x` in evaluation mode."""
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
