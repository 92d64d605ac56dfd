"""FedDF: Lin, Kong, Stich, Jaggi: Ensemble Distillation for Robust Model Fusion in Federated
Learning. NeurIPS 2020."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fl_lightning.callbacks.relations import Relation, SampleCounts, Uniform
from fl_lightning.configuration.ranges import AdamRate, NonNegativeInt, PositiveInt
from fl_lightning.configuration.search import LogRange, searched
from fl_lightning.core import RunContext, Server, Traits
from fl_lightning.foundation.rng import generator
from fl_lightning.methods.base import Method, check_no_scaling
from fl_lightning.methods.common import predictions as public
from fl_lightning.methods.common.fusion import distilled, scores_of


@dataclass(frozen=True)
class FedDF(Method):
    """FedAvg of each architecture, whose mean the server then distils from all received models on
    public data.

    Minimised by Adam: KL(softmax(mean_i z_i(x)) || softmax(z(x))) over public x, with z_i the class
    scores of every client that has answered, whatever its architecture. Scored: the distilled model
    of the client's architecture.

    Args:
        steps: of the distillation; 0 is FedAvg. 1000: our choice (the authors': up to 10,000, until
            the server's validation set, which ours does not have, has seen no gain for 1,000).
        samples: of the public data, drawn anew each round; null: all of them (paper).
        server_lr: of Adam at first; it falls to 0 along a cosine. 0.001: the authors' code.
        batch_size: of a step. 128: the authors' code.
        ensemble: teachers' `scores` are averaged (paper), or their `probabilities`, which has the
            gradient of the mean of each teacher's KL (the default of the authors' code, which their
            commands change).
        weighting: of models in the mean that is distilled: by `samples` (FedAvg's), or `uniform`
            (the authors' code).
    """

    traits = Traits(family="prototypes and distillation", classes=True)

    steps: NonNegativeInt = 1000
    samples: PositiveInt | None = None
    server_lr: AdamRate = searched(1e-3, LogRange(1e-4, 1e-2), "a decade around the authors'")
    batch_size: PositiveInt = 128
    ensemble: Literal["scores", "probabilities"] = "scores"
    weighting: Literal["samples", "uniform"] = "samples"

    def check(self, run: RunContext) -> None:
        """Classes are needed, and public data; distilling scales no loss."""
        check_no_scaling(run)
        super().check(run)
        public.check_public(run, public.drawn(run, self.samples))

    def relation(self) -> Relation:
        """The mean that is distilled."""
        return SampleCounts() if self.weighting == "samples" else Uniform()

    def aggregate(self, server: Server) -> None:
        """The means, then a student of all from each."""
        super().aggregate(server)
        run, steps = server.run, min(self.steps, server.run.most_batches or self.steps)
        if not steps:
            return
        x = public.public_subset(run, server.round, public.drawn(run, self.samples))
        z = torch.stack(
            [scores for group in server.groups for scores in scores_of(group, x).values()]
        )
        teacher = z.mean(0).softmax(1) if self.ensemble == "scores" else z.softmax(2).mean(0)
        for group in [group for group in server.groups if group.answered]:
            draws = generator(run.config.seed, "server batches", server.round, group.group.index)
            group["model"] = distilled(
                group,
                group["model"],
                x,
                teacher.to(x.device),
                steps,
                self.server_lr,
                self.batch_size,
                draws,
            )
