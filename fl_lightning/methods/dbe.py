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
    """FedAvg whose clients each add a personal vector to the features, and pull the mean of their
    features towards a global mean.

    Loss: CE at head(z + m_i) + kappa / 2 mean_d (u_i - u)^2, with features z and the personal
    vector m_i, which is never sent. The running mean u_i starts each round at 0, and each batch
    sets u_i <- (1 - momentum) u_i + momentum (mean z of the batch). In the first round all clients
    train the initial model on CE alone, and upload only u_i; u is their mean by samples. Training
    begins with the second round. If the last batch of an epoch is incomplete, it trains on CE alone
    and leaves u_i unchanged.

    Args:
        kappa: weight of the distance between the means. 50: the authors' run script for a CNN.
        momentum: weight of a batch's mean in u_i. 1: the authors' run script; at the end of a round
            u_i is then the mean of the last complete batch.
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
        """Return the network with a personal vector m_i added to the features."""
        return NewClassifier(model, Shifted, "dbe")

    def init_server(self, run: RunContext) -> Tensors:
        """`mean` (d,): the global mean u of features, 0 at first."""
        head: Any = run.groups[0].head
        return {"mean": torch.zeros(head.personal.numel())}

    def broadcast(self, server: Server) -> Payloads:
        """Also send u, from the second round on."""
        payloads = super().broadcast(server)
        if server.round > 1:
            for payload in payloads.values():
                payload.extra["mean"] = server.memory["mean"]
        return payloads

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Yield one phase with DBE's loss; in the first round with the task loss alone, and without
        m_i."""
        u = None
        if self.kappa and "mean" in payload.extra:
            u = payload.extra["mean"].to(client["model"])
        complete = min(client.run.config.federation.batch_size, len(client.data.train))
        pull = MeanPull(self.kappa, self.momentum, u, complete)
        trains = None if client.round > 1 else ~client.mask(is_personal)
        yield Phase(objective=Objective(loss=pull), trains=trains)
        client.scratch["mean"] = pull.running.float().cpu()

    def beside(self) -> dict[str, Beside]:
        return {"mean": Beside("mean_feature", "mean feature of the client's data", once=True)}

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Upload the model; in the first round only u_i."""
        upload = super().upload(client, payload)
        if client.round == 1:
            upload.sent[:] = False
            upload.extra["mean"] = client.scratch["mean"]
        return upload

    def aggregate(self, server: Server) -> None:
        """Average the models. After the first round, to which clients uploaded only u_i, compute u;
        the model is still the initial one."""
        super().aggregate(server)
        if server.round == 1:
            means = torch.stack([server.statistics[c]["mean"] for c in server.answered])
            server.memory["mean"] = server.shares(server.answered).float() @ means


class MeanPull:
    """The local loss of a phase: the task loss + kappa / 2 mean_d (u_i - u)^2. Each call also
    updates u_i, the running mean of the batches' features, which is kept in `running` (DBE: Zhang
    et al., NeurIPS 2023).

    Args:
        kappa: weight of the distance.
        momentum: mu of u_i <- (1 - mu) u_i + mu (mean feature of the batch), which starts at 0.
        u: the global mean (d,). None: the loss is the task loss, and u_i is only measured.
        complete: number of samples in a complete batch. A smaller batch neither changes u_i nor
            adds the distance to the loss: with mu = 1, u_i would be the mean of a remainder,
            perhaps of a single sample (the authors drop such batches).
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
        """The running mean u_i."""

    def __call__(self, module: Module, batch: Batch) -> Tensor:
        """Return the loss, shape (). No gradient flows to earlier batches."""
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
    """A classifier of features plus a vector `personal` (d,), which starts at 0 (DBE)."""

    def __init__(self, classifier: nn.Linear) -> None:
        super().__init__()
        self.generic = classifier
        self.personal = nn.Parameter(torch.zeros(classifier.in_features))

    def forward(self, z: Tensor) -> Tensor:
        scores: Tensor = self.generic(z + self.personal)
        return scores
