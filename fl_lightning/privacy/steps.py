"""Private training steps (DP-SGD): Poisson batches, per-sample gradients that are clipped and
summed, and noise.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang: Deep Learning with Differential Privacy.
CCS 2016.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from fl_lightning.core.module import Batch, Module
from fl_lightning.data import Part
from fl_lightning.privacy.accounting import sampling_rate


@dataclass(frozen=True)
class Private:
    """Settings of DP-SGD for the steps of a client's phase.

    Args:
        clip: the greatest norm of a sample's gradient.
        noise: standard deviation of the noise on the sum of gradients, in multiples of `clip`.
        first_step: number of steps that the client has taken in this round before the phase.
        draws: returns the random generator for a purpose and a step of the round; no two steps
            share one.
    """

    clip: float
    noise: float
    first_step: int
    draws: Callable[[str, int], torch.Generator]


def sampled(
    part: Part,
    batch_size: int,
    draws: torch.Generator,
) -> Batch | None:
    """Draw a batch of `part` by Poisson sampling, of `batch_size` samples on average; None: no
    sample was drawn."""
    numbers = torch.rand(len(part), generator=draws, dtype=torch.float64)
    index = (numbers < sampling_rate(len(part), batch_size)).nonzero()[:, 0]
    if not len(index):
        return None
    augment = draws if part.augmented else None
    return next(iter(part.subset(index).batches(len(index), augment=augment)))


def clipped_sum(
    module: Module,
    batch: Batch,
    clip: float,
) -> tuple[list[Tensor], Tensor]:
    """Return, for each parameter that trains now, the sum of all samples' gradients, each scaled
    down to norm `clip`; and the samples' mean loss, shape (). A gradient that is not finite counts
    as 0."""
    blocks = [b for b in module.layout.blocks if b.kind == "parameter"]
    named = zip(blocks, module.binding.parameters, strict=True)
    trained = {b.name: p.detach() for b, p in named if p.requires_grad}

    def loss(
        parameters: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
    ) -> Tensor:
        scores = functional_call(module.model, parameters, (x[None],))
        return module.metric.loss(scores, y[None])

    per_sample = vmap(grad_and_value(loss), in_dims=(None, 0, 0), randomness="different")
    gradients, losses = per_sample(trained, *batch)
    parts = list(gradients.values())
    norms = torch.stack([g.flatten(1).square().sum(1) for g in parts]).sum(0).sqrt()
    scale = (clip / norms).clamp_max(1)  # 0 / 0 if a whole gradient is 0
    scale = torch.where(norms.isfinite() & (norms > 0), scale, 0)
    finite = [g if bool(norms.isfinite().all()) else g.nan_to_num(0, 0, 0) for g in parts]
    return [(scale @ g.flatten(1)).view(g.shape[1:]) for g in finite], losses.mean()


def noised(
    sums: list[Tensor],
    size: float,
    draws: torch.Generator,
) -> list[Tensor]:
    """Return the sums with Gaussian noise of standard deviation `size` on each number."""
    return [
        s + (size * torch.randn(s.shape, generator=draws, dtype=torch.float32)).to(s) for s in sums
    ]
