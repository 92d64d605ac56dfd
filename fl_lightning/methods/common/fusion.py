"""The server distils many clients' models into one on public data (FedDF: Lin et al., NeurIPS
2020)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fl_lightning.core import GroupServer
from fl_lightning.methods.common.predictions import class_scores, gap

CLIP = 5.0
"""Greatest norm of a step's gradient: the authors' code."""


@torch.no_grad()
def scores_of(group: GroupServer, x: Tensor) -> dict[int, Tensor]:
    """Class scores (n, C) on x (n, ...), in evaluation mode, of the models that the server has
    received in this round.

    By client, ascending, and on every rank: each rank sends x through the models that lie there.
    """
    run, module, mine = group.server.run, group.group.module, {}
    for client in run.at_home(group.answered):
        module.binding.rebind(
            run.states[client].received["model"].to(run.device), group.group.first_buffers()
        )
        module.model.eval()
        with module.cast():
            parts = [
                class_scores(module, part) for part in x.split(run.config.evaluation.batch_size)
            ]
        mine[client] = torch.cat(parts).cpu()
    _count(group, forward=len(x) * len(group.answered))
    return dict(sorted(run.processes.gather_by_client(mine).items()))


def distilled(
    group: GroupServer,
    vector: Tensor,
    x: Tensor,
    teacher: Tensor,
    steps: int,
    lr: float,
    size: int,
    draws: torch.Generator,
) -> Tensor:
    """A model that began as `vector` (D,) after `steps` steps of Adam on KL(teacher || student), on
    every rank.

    The student is in evaluation mode as its teachers were: running statistics stay, and where it
    equals its teachers there is no slope. The learning rate falls from `lr` along a cosine. Rank 0
    takes the steps for all.

    Args:
        group: of the architecture.
        vector: not written to.
        x: public inputs (n, ...).
        teacher: probabilities (n, C).
        steps: batches, each of `size` at most, through orders of x drawn by `draws` one after the
            other.
        lr: of the first step.
        size: of a batch.
        draws: of the orders.
    """
    run, module = group.server.run, group.group.module
    student = vector.clone()
    if run.is_main and steps:
        module.binding.rebind(student, group.group.first_buffers())
        module.model.eval()
        trained = [p for p in module.binding.parameters if p.requires_grad]
        optimizer = torch.optim.Adam(trained, lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for index in _batches(len(x), size, steps, draws):
            with module.cast():
                loss = gap(class_scores(module, x[index]), teacher[index], "kl", 1.0)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, CLIP)
            optimizer.step()
            schedule.step()
        optimizer.zero_grad()
    _count(group, forward=steps * min(size, len(x)), backward=steps * min(size, len(x)))
    gathered = run.processes.gather_objects(
        student.cpu() if run.is_main and run.world_size > 1 else None
    )
    return student if run.is_main else gathered[0].to(run.device)


def _batches(count: int, size: int, steps: int, draws: torch.Generator) -> list[Tensor]:
    """Indices of `steps` batches."""
    batches: list[Tensor] = []
    while len(batches) < steps:
        batches += torch.randperm(count, generator=draws).split(size)
    return batches[:steps]


def _count(group: GroupServer, forward: int, backward: int = 0) -> None:
    """Count so many samples' passes as operations of the server, where a pass's are known."""
    cost = group.group.cost
    if cost is not None:
        group.server.flops += round(cost.forward * forward + cost.backward * backward)
