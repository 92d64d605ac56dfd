"""What clients are drawn to: directions of models (pFedGraph: Ye et al., ICML 2023), the mean of
all features (DBE)."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.core import Batch, GroupServer, Module
from fl_lightning.core.vectors import distances


def mean_directions(group: GroupServer) -> dict[int, Tensor]:
    """Of each receiver here sum_j r_ij w_j / ||w_j|| (D,), r the weights that its model was just
    mixed with."""
    mixed, is_parameter = group.weighed, group.layout.is_parameter
    assert mixed is not None
    squares = distances(group, mixed.sources, [torch.zeros_like(group.initial)], is_parameter)[:, 0]
    weights = mixed.weights[0] / squares.sqrt().clamp_min(1e-30)
    scale = weights.sum(1)
    mixes = group.mix((weights / scale[:, None])[None], mixed.receivers, mixed.sources, fresh=True)
    return {c: vector * scale[mixed.receivers.index(c)].to(vector) for c, vector in mixes.items()}


def alignment(module: Module, direction: Tensor) -> Tensor:
    """<w, direction> / ||w|| over the parameters w of the bound model, shape ()."""
    parameters = dict(module.model.named_parameters())
    pairs = [(parameters[b.name], b) for b in module.layout.blocks if b.kind == "parameter"]
    inner = torch.stack([(p.flatten() * direction[b.start : b.stop]).sum() for p, b in pairs]).sum()
    square = torch.stack([p.square().sum() for p, _ in pairs]).sum()
    return inner / square.clamp_min(1e-30).sqrt()


class MeanPull:
    """A local loss: the task's + kappa / 2 mean_d (u_i - u)^2, where u_i runs over the features of
    batches (DBE: Zhang et al., NeurIPS 2023).

    Args:
        kappa: weight of the distance.
        momentum: mu of u_i <- (1 - mu) u_i + mu (mean feature of the batch), which begins at 0.
        u: (d,); None: u_i runs, and nothing is added to the loss.
        whole: samples of a complete batch. A smaller one neither moves u_i nor adds to the loss:
            with mu = 1 a round's u_i would be the mean of its remainder, which may be a single
            sample (the authors drop such batches).
    """

    def __init__(self, kappa: float, momentum: float, u: Tensor | None, whole: int) -> None:
        self.kappa, self.momentum, self.u, self.whole = kappa, momentum, u, whole
        self.running = torch.zeros(())
        """u_i."""

    def __call__(self, module: Module, batch: Batch) -> Tensor:
        """Shape (); past batches have no gradient."""
        task: Tensor = module.task_loss(batch)
        if len(batch[1]) < self.whole:
            return task
        now = (1 - self.momentum) * self.running + self.momentum * module.features.mean(0)
        self.running = now.detach()
        return task if self.u is None else task + self.kappa / 2 * (now - self.u).square().mean()
