"""FedDF: Lin, Kong, Stich, Jaggi: Ensemble Distillation for Robust Model Fusion in Federated
Learning. NeurIPS 2020."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fl_lightning.foundation.rng import generator
from fl_lightning.methods import (
    AdamRate,
    GroupServer,
    LogRange,
    Method,
    NonNegativeInt,
    PositiveInt,
    Relation,
    RunContext,
    Server,
    Traits,
    check_no_scaling,
    mean_relation,
    searched,
)
from fl_lightning.methods.common.predictions import (
    check_public,
    class_scores,
    distillation_loss,
    predict_scores,
    public_subset,
)


@dataclass(frozen=True)
class FedDF(Method):
    """FedAvg of each architecture; the server then distils each mean from all received models on
    public data.

    Adam minimises KL(softmax(mean_i z_i(x)) || softmax(z(x))) over public x, with z_i the class
    scores of every client that has answered, whatever its architecture. Scored: the distilled model
    of the client's architecture.

    Args:
        steps: steps of the distillation in a round; 0 is FedAvg. 1000: our choice (the authors': up
            to 10,000, until the server's validation set, which ours does not have, has seen no gain
            for 1,000).
        samples: number of public samples, drawn anew each round; null: all of them (paper).
        server_lr: initial learning rate of Adam; it falls to 0 along a cosine. 0.001: the authors'
            code.
        batch_size: samples of a distillation step. 128: the authors' code.
        ensemble: whether the teachers' `scores` are averaged (paper), or their `probabilities`,
            which has the gradient of the mean of each teacher's KL (the default of the authors'
            code, which their commands change).
        weighting: weights of models in the mean that is distilled: by `samples` (FedAvg's), or
            `uniform` (the authors' code).
    """

    traits = Traits(family="prototypes and distillation", classes=True)

    steps: NonNegativeInt = 1000
    samples: PositiveInt | None = None
    server_lr: AdamRate = searched(1e-3, LogRange(1e-4, 1e-2), "a decade around the authors'")
    batch_size: PositiveInt = 128
    ensemble: Literal["scores", "probabilities"] = "scores"
    weighting: Literal["samples", "uniform"] = "samples"

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` without public data, or with the precision 16-mixed, as the distillation
        does not scale its loss."""
        check_no_scaling(run)
        check_public(run, self.samples)

    def relation(self) -> Relation:
        """Return the weights of models in the mean that is distilled."""
        return mean_relation(self.weighting)

    def aggregate(self, server: Server) -> None:
        """Average the models of each architecture, then distil each mean from the ensemble of all
        uploads."""
        super().aggregate(server)
        run = server.run
        steps = min(self.steps, run.most_batches or self.steps)
        if not steps:
            return
        x = public_subset(run, server.round, self.samples)
        z = torch.stack([z for group in server.groups for z in scores_of(group, x).values()])
        teacher = z.mean(0).softmax(1) if self.ensemble == "scores" else z.softmax(2).mean(0)
        teacher = teacher.to(x.device)
        for group in server.groups:
            if group.answered:
                group["model"] = self.distil(group, x, teacher, steps)

    def distil(
        self,
        group: GroupServer,
        x: Tensor,
        teacher: Tensor,
        steps: int,
    ) -> Tensor:
        """Train a copy of the group's global model by Adam on KL(teacher || student); return it, on
        every rank.

        The student is in evaluation mode as its teachers were, so running statistics stay, and a
        student equal to its teachers has gradient 0. The learning rate falls to 0 along a cosine.
        Rank 0 takes the steps for all ranks.

        Args:
            group: handle of the clients of the student's architecture.
            x: public inputs (n, ...).
            teacher: probabilities (n, C).
            steps: number of batches; they run through x in a random order, then in another, and so
                on.
        """
        run = group.server.run
        module = group.group.module
        student = group["model"].clone()
        size = self.batch_size
        if run.is_main:
            module.binding.rebind(student, group.group.first_buffers())
            module.model.eval()
            trained = [p for p in module.binding.parameters if p.requires_grad]
            optimizer = torch.optim.Adam(trained, self.server_lr)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            place = group.server.round, group.group.index
            draws = generator(run.config.seed, "server batches", *place)
            for index in _batches(len(x), size, steps, draws):
                with module.cast():
                    loss = distillation_loss(
                        class_scores(module, x[index]), teacher[index], "kl", 1.0
                    )
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(trained, CLIP)
                optimizer.step()
                schedule.step()
            optimizer.zero_grad()
        samples = steps * min(size, len(x))
        _count(group, forward=samples, backward=samples)
        trained_model = student.cpu() if run.is_main and run.world_size > 1 else None
        gathered = run.processes.gather_objects(trained_model)
        return student if run.is_main else gathered[0].to(run.device)


CLIP = 5.0
"""Greatest norm of a distillation step's gradient: the authors' code."""


def scores_of(group: GroupServer, x: Tensor) -> dict[int, Tensor]:
    """Compute class scores (n, C) on x (n, ...) of all models that the server has received in this
    round, in evaluation mode.

    Each rank scores the models that it stores; all ranks get all scores, by client in ascending
    order.
    """
    run = group.server.run
    module = group.group.module
    scores = {}
    for client in run.at_home(group.answered):
        vector = run.states[client].received["model"].to(run.device)
        module.binding.rebind(vector, group.group.first_buffers())
        with module.cast():
            scores[client] = predict_scores(module, x, run.config.evaluation.batch_size).cpu()
    _count(group, forward=len(x) * len(group.answered))
    return dict(sorted(run.processes.gather_by_client(scores).items()))


def _batches(
    count: int,
    size: int,
    steps: int,
    draws: torch.Generator,
) -> list[Tensor]:
    """Indices of `steps` batches."""
    batches: list[Tensor] = []
    while len(batches) < steps:
        batches += torch.randperm(count, generator=draws).split(size)
    return batches[:steps]


def _count(group: GroupServer, forward: int, backward: int = 0) -> None:
    """Count the passes of `forward` and `backward` samples as operations of the server, if a pass's
    operations are known."""
    cost = group.group.cost
    if cost is not None:
        group.server.flops += round(cost.forward * forward + cost.backward * backward)
