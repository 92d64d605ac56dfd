"""FedNova: Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in
Heterogeneous Federated Optimization. NeurIPS 2020.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.methods import (
    Beside,
    Client,
    Method,
    Payload,
    Relation,
    RelationInputs,
    RunContext,
    SampleCounts,
    Server,
    Traits,
    check_sgd,
    move_on,
)


class Normalised(SampleCounts):
    """Shares of the samples over each client's steps: p_i / a_i, made to sum to 1.

    Within a round it keeps the uploaded a_i, and the factor that follows from them.
    """

    step_factor = 1.0
    """sum_i p_i a_i * sum_i p_i / a_i: the model goes so many times the mean change by these
    weights."""

    def learn(self, server: Server) -> None:
        """Note the a_i of those who answered."""
        self.steps = {c: uploaded["steps"].double() for c, uploaded in server.statistics.items()}

    def weights(self, inputs: RelationInputs) -> Tensor:
        """(1, 1, n)."""
        a = torch.cat([self.steps[client] for client in inputs.sources])
        moved = a[a > 0]
        a = torch.where(a > 0, a, moved.min()) if len(moved) else torch.ones_like(a)
        shares = inputs.samples / inputs.samples.sum()
        # 1 for everybody where all take as many steps: then this is FedAvg's mean
        relative = a.max() / a
        total = (shares * relative).sum()
        self.step_factor = float((shares / relative).sum() * total)
        return (shares * relative / total)[None, None]


@dataclass(frozen=True)
class FedNova(Method):
    """FedAvg that normalises each client's change by its steps: w <- w + (sum p_i a_i) sum p_i (w_i
    - w) / a_i.

    a_i is what the steps of client i come to, in units of its learning rate: their number, and with
    momentum more (||a_i||_1 of the paper). Clients that take more steps then no longer weigh more
    than their samples.
    """

    traits = Traits(family="one global model", statistics=True, several=False)

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` where the learning rate does not tell how far a step moves the model."""
        check_sgd(run, "fednova counts what steps of sgd come to from momentum 0")

    def relation(self) -> Relation:
        """The normalised mean."""
        return Normalised()

    def beside(self) -> dict[str, Beside]:
        """Declares what `upload` adds to the model."""
        return {"steps": Beside("steps", "local steps", "public")}

    def upload(self, client: Client, payload: Payload) -> Payload:
        """With the model a_i, one number."""
        upload = super().upload(client, payload)
        moved = sum(fit.step_sizes for fit in client.fits)
        upload.statistics["steps"] = torch.tensor([moved / (client.lr or 1.0)])
        return upload

    def aggregate(self, server: Server) -> None:
        """The normalised mean change, times the effective number of steps."""
        old = server["model"]
        super().aggregate(server)
        relation = server.run.relation
        assert isinstance(relation, Normalised)
        move_on(server.only, old, relation.step_factor)
