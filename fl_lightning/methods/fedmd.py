"""FedMD: Li, Wang: FedMD: Heterogenous Federated Learning via Model Distillation. NeurIPS 2019
workshop."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.core.beside import Values
from fl_lightning.data import ResidentPart
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.methods import (
    Alone,
    Batch,
    Beside,
    Client,
    LogRange,
    Module,
    NonNegativeFloat,
    NonNegativeInt,
    Objective,
    Payload,
    Payloads,
    Phase,
    Phases,
    PositiveFloat,
    PositiveInt,
    PureLoss,
    Relation,
    RelationView,
    Rule,
    RunContext,
    Server,
    Tensors,
    Traits,
    WithoutModels,
    searched,
)
from fl_lightning.methods.common.basics import check_batches
from fl_lightning.methods.common.predictions import (
    check_public,
    class_scores,
    distillation_loss,
    predict_scores,
    public_subset,
)

LAYER = "predictions"
"""Name under which teachers' weights are drawn, in place of a layer's."""


class Teachers(Alone):
    """Relation of methods that exchange predictions: every client keeps its own model. Tables and
    heatmaps show, as its rows, the weights of the predictions in each client's teacher
    (`FedMD.weigh`)."""

    fixed = ""


@dataclass(frozen=True)
class FedMD(WithoutModels):
    """Clients of any architecture exchange predictions on public data, and distil from the mean of
    all predictions.

    In each round a client trains for `epochs` on the last round's public subset towards its
    teacher, then on its private data, and predicts on this round's subset. The paper's pre-training
    on labelled public data is left out: ours have no labels.

    Args:
        samples: number of public samples, drawn anew each round. 5000: FedMD's authors' code; 3000:
            KT-pFL's paper.
        epochs: epochs of the distillation in a round. 1: the authors' code.
        batch_size: batch size of the distillation. 256: the authors' code.
        loss: `mae` or `mse` of class scores, or `kl` of softmax(z / T). mae: FedMD's authors' code,
            its paper leaves it open; kl: KT-pFL.
        temperature: T of `kl`. 1: KT-pFL's FedMD.
        lam: weight of the distillation loss; with SGD a factor on the learning rate. 1: the
            authors' code.
    """

    traits = Traits(
        family="prototypes and distillation",
        judge="after",
        starts="own",
        classes=True,
        statistics=True,
        newcomers=Rule(
            "own training, after distilling all predictions on public data",
            gives=False,
            unlabelled=True,
        ),
        receives_beside="a mix of predictions",
        sample_use="uploads class scores",
    )

    samples: PositiveInt = 5000
    epochs: NonNegativeInt = 1
    batch_size: PositiveInt = 256
    loss: Literal["mae", "mse", "kl"] = "mae"
    temperature: PositiveFloat = 1.0
    lam: NonNegativeFloat = searched(1.0, LogRange(0.1, 10), "a decade around the authors'")

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` without enough public data, or if a network with BatchNorm would distil
        on single samples."""
        check_public(run, self.samples)
        check_batches(run, batch_size=self.batch_size, samples=self.samples)

    def relation(self) -> Relation:
        """Return a relation without mixing of models; its rows are the weights of predictions in
        each client's teacher."""
        return Teachers()

    def init_server(self, run: RunContext) -> Tensors:
        """The last round's uploads, none at first. `public.predictions` (m, n, C): predictions of m
        clients on the n samples of the round's public subset. `public.told` (m,): the numbers of
        these clients. `public.rows` (N, m): the weights of their predictions in each client's
        teacher."""
        return {
            "public.predictions": torch.zeros(0, 0, run.data.num_classes),
            "public.told": torch.zeros(0, dtype=torch.int64),
            "public.rows": torch.zeros(run.clients, 0, dtype=torch.float64),
        }

    def broadcast(self, server: Server) -> Payloads:
        """Send each client its teacher, (n, C) for n public samples, once predictions have been
        uploaded."""
        payloads = super().broadcast(server)
        memory = server.memory
        cohort = server.cohort
        P = memory["public.predictions"]
        rows = memory["public.rows"]
        senders = memory["public.told"].tolist()
        # a newcomer's teacher is the mean of all predictions
        mean = rows.new_full((1, rows.shape[1]), 1 / max(rows.shape[1], 1))
        rows = torch.cat([rows, mean])
        for client, payload in payloads.items():
            if senders:
                teacher = rows[client].to(P.dtype) @ P.flatten(1)
                payload.extra["teacher"] = teacher.view(P.shape[1:])
        server.flops += 2 * len(cohort) * P.numel()
        view = rows[cohort].float() if senders else torch.eye(len(cohort))
        server.view = RelationView(view[:, None].numpy(), cohort, [LAYER], senders or cohort)
        return payloads

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Yield the distillation on the last round's public subset, if the client has received a
        teacher; then local training."""
        if "teacher" in payload.extra and self.epochs and self.lam:
            x = public_subset(client.run, client.round - 1, self.samples)
            yield Phase(
                objective=Objective(loss=PureLoss(self.distillation_loss)),
                part=ResidentPart(x, payload.extra["teacher"].to(x.device), None),
                epochs=self.epochs,
                batch_size=self.batch_size,
                purpose="distil",
                scores="distilled",
            )
        yield Phase()

    def distillation_loss(self, _: Tensors, module: Module, batch: Batch) -> Tensor:
        """Return lam times the loss between the model's scores on public inputs and the teacher's
        predictions, shape ()."""
        scores = class_scores(module, batch[0])
        return self.lam * distillation_loss(scores, batch[1], self.loss, self.temperature)

    def beside(self) -> dict[str, Beside]:
        values: Values = "shares" if self.loss == "kl" else "real"
        return {"predictions": Beside("predictions", "class scores of public samples", values)}

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Upload predictions on the round's public subset."""
        upload = super().upload(client, payload)
        run = client.run
        x = public_subset(run, client.round, self.samples)
        z = predict_scores(client.bind(), x, run.config.evaluation.batch_size)
        upload.extra["predictions"] = (z / self.temperature).softmax(1) if self.loss == "kl" else z
        return upload

    def aggregate(self, server: Server) -> None:
        """Store the uploaded predictions (a transform may have dropped some), and the weights of
        each client's teacher, from `weigh`.

        Raises:
            RunFailed: a weight is not finite, or a negative weight gives a teacher with negative
                probabilities.
        """
        uploads = {}
        for client, tensors in server.statistics.items():
            if "predictions" in tensors:
                uploads[client] = tensors["predictions"]
        senders = [*uploads]
        P = torch.zeros(0, 0, server.run.data.num_classes)
        rows = torch.empty(server.clients, 0)
        if senders:
            P = torch.stack([*uploads.values()])
            rows = self.weigh(server, P.double(), senders)
        everyone = range(server.clients)
        rows = server.run.relation.as_mixed(rows[None], everyone, senders, server.round)[0]
        valid = bool(rows.isfinite().all())
        if valid and self.loss == "kl" and (rows < 0).any():
            valid = bool((rows @ P.double().flatten(1) >= 0).all())
        if not valid:
            raise RunFailed(
                "the coefficients have left the simplex too far; use method.projection simplex"
            )
        server.memory |= {
            "public.predictions": P,
            "public.told": torch.tensor(senders, dtype=torch.int64),
            "public.rows": rows,
        }

    def weigh(
        self,
        server: Server,
        P: Tensor,
        uploaders: list[int],
    ) -> Tensor:
        """Return the weights of the uploaded predictions in each client's teacher, (N, m), float64;
        each row sums to 1. Here all weights are equal.

        Args:
            server: the round's server.
            P: predictions (m, n, C) on n public samples, float64.
            uploaders: numbers of the m clients that sent them.
        """
        shape = (server.clients, len(uploaders))
        return torch.full(shape, 1.0 / len(uploaders), dtype=torch.float64)
