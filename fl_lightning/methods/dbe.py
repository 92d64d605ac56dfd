"""DBE: Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan: Eliminating Domain Bias for Federated Learning
in Representation Space. NeurIPS 2023.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.methods import (
    Batch,
    Beside,
    Client,
    LogRange,
    Module,
    NonNegativeFloat,
    Objective,
    Payload,
    Payloads,
    Phase,
    Phases,
    PositiveShare,
    Range,
    RunContext,
    Server,
    Tensors,
    Traits,
    searched,
)
from fl_lightning.methods.common.classifiers import NewClassifier, PersonalPart, is_personal


@dataclass(frozen=True)
class DBE(PersonalPart):
    """FedAvg whose clients each add a personal vector to the features, and draw the features' mean
    to a global mean.

    Loss: CE at head(z + m_i) + kappa / 2 mean_d (u_i - u)^2, where u_i <- (1 - momentum) u_i +
    momentum (mean z of the batch) begins a round at 0; m_i is never sent. u is the clients' mean
    u_i, by samples, of a first round in which all train the initial model on CE alone and upload
    nothing else: training begins with the second round. A batch with fewer samples than the others
    trains on CE alone and leaves u_i as it is.

    Args:
        kappa: weight of the mean's distance. 50: the authors' run script for a CNN.
        momentum: of the running mean, mu. 1: the same (a round's u_i is then the mean of its last
            complete batch).
    """

    traits = Traits(
        family="partial sharing",
        judge="before",
        features=True,
        statistics=True,
        several=False,
        changes_upload=True,
        everyone_first=True,
        receives_beside="mean feature of all",
        sample_use="uploads the mean feature of samples",
    )

    kappa: NonNegativeFloat = searched(
        50.0, LogRange(1, 100), "around the authors' script's 50 (their program: 0)"
    )
    momentum: PositiveShare = searched(
        1.0, Range(0.1, 1.0), "from the authors' program's to their script's"
    )

    def build(self, model: nn.Module, num_classes: int) -> nn.Module:
        """With the vector m_i."""
        return NewClassifier(model, Shifted, "dbe")

    def init_server(self, run: RunContext) -> Tensors:
        """`mean` u, (d,)."""
        head: Any = run.groups[0].head
        return {"mean": torch.zeros(head.personal.numel())}

    def broadcast(self, server: Server) -> Payloads:
        """Also send u, once it is known."""
        payloads = super().broadcast(server)
        if server.round > 1:
            for payload in payloads.values():
                payload.extra["mean"] = server.memory["mean"]
        return payloads

    def phases(self, client: Client, payload: Payload) -> Phases:
        """In the first round without m_i, and without u, which is not known yet."""
        u = None
        if self.kappa and "mean" in payload.extra:
            u = payload.extra["mean"].to(client["model"])
        complete = min(client.run.config.federation.batch_size, len(client.data.train))
        pull = MeanPull(self.kappa, self.momentum, u, complete)
        trains = None if client.round > 1 else ~client.mask(is_personal)
        yield Phase(objective=Objective(loss=pull), trains=trains)
        client.scratch["mean"] = pull.running.float().cpu()

    def beside(self) -> dict[str, Beside]:
        """Declares what `upload` adds to the model."""
        return {"mean": Beside("mean_feature", "mean feature of the client's data", once=True)}

    def upload(self, client: Client, payload: Payload) -> Payload:
        """The model; in the first round u_i in its place."""
        upload = super().upload(client, payload)
        if client.round == 1:
            upload.sent[:] = False
            upload.extra["mean"] = client.scratch["mean"]
        return upload

    def aggregate(self, server: Server) -> None:
        """Also average u, after the first round (in which nobody has uploaded a model: the mean is
        still the initial one)."""
        super().aggregate(server)
        if server.round == 1:
            means = torch.stack([server.statistics[c]["mean"] for c in server.answered])
            server.memory["mean"] = server.shares(server.answered).float() @ means


class MeanPull:
    """A local loss: the task's + kappa / 2 mean_d (u_i - u)^2, where u_i runs over the features of
    batches (DBE: Zhang et al., NeurIPS 2023).

    Args:
        kappa: weight of the distance.
        momentum: mu of u_i <- (1 - mu) u_i + mu (mean feature of the batch), which begins at 0.
        u: (d,); None: u_i runs, and nothing is added to the loss.
        complete: samples of a complete batch. A smaller one neither moves u_i nor adds to the loss:
            with mu = 1 a round's u_i would be the mean of its remainder, which may be a single
            sample (the authors drop such batches).
    """

    def __init__(
        self,
        kappa: float,
        momentum: float,
        u: Tensor | None,
        complete: int,
    ) -> None:
        self.kappa = kappa
        self.momentum = momentum
        self.u = u
        self.complete = complete
        self.running = torch.zeros(())
        """u_i."""

    def __call__(self, module: Module, batch: Batch) -> Tensor:
        """Shape (); past batches have no gradient."""
        task = module.task_loss(batch)
        if len(batch[1]) < self.complete:
            return task
        new = self.momentum * module.features.mean(0)
        mean = (1 - self.momentum) * self.running + new
        self.running = mean.detach()
        if self.u is None:
            return task
        return task + self.kappa / 2 * (mean - self.u).square().mean()


class Shifted(nn.Module):
    """A classifier of features to which a vector `personal` (d,) is added, 0 at first (DBE)."""

    def __init__(self, classifier: nn.Linear) -> None:
        super().__init__()
        self.generic = classifier
        self.personal = nn.Parameter(torch.zeros(classifier.in_features))

    def forward(self, z: Tensor) -> Tensor:
        """Features (batch, d) to scores."""
        scores: Tensor = self.generic(z + self.personal)
        return scores
