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
    """The relation of FedNova's mean. The weights are p_i / a_i divided by their sum, with the
    clients' shares p_i of the samples and numbers of steps a_i.

    Within a round it holds the uploaded a_i and `step_factor`, by which the server multiplies the
    mean change.
    """

    step_factor = 1.0
    """sum_i p_i a_i * sum_i p_i / a_i: the server multiplies the mean change under these weights by
    it."""

    def learn(self, server: Server) -> None:
        """Store the uploaded a_i."""
        self.steps = {c: uploaded["steps"].double() for c, uploaded in server.statistics.items()}

    def weights(self, inputs: RelationInputs) -> Tensor:
        a = torch.cat([self.steps[client] for client in inputs.sources])
        positive = a[a > 0]
        a = torch.where(a > 0, a, positive.min()) if len(positive) else torch.ones_like(a)
        shares = inputs.samples / inputs.samples.sum()
        # exactly 1 if all take the same number of steps, which gives FedAvg's mean
        relative = a.max() / a
        total = (shares * relative).sum()
        self.step_factor = float((shares / relative).sum() * total)
        return (shares * relative / total)[None, None]


@dataclass(frozen=True)
class FedNova(Method):
    """FedAvg that divides each client's change by its number of steps: w <- w + (sum p_i a_i) sum
    p_i (w_i - w) / a_i.

    a_i is the total of client i's steps in units of its learning rate: their number, and more with
    momentum (||a_i||_1 of the paper). Clients that take more steps then do not weigh more than
    their samples.
    """

    traits = Traits(family="one global model", statistics=True, several=False)

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` unless the optimiser is SGD, for which the learning rate tells how far a
        step moves the model."""
        check_sgd(run, "fednova sums up steps of SGD that start without momentum")

    def relation(self) -> Relation:
        return Normalised()

    def beside(self) -> dict[str, Beside]:
        return {"steps": Beside("steps", "local steps", "public")}

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Also upload a_i, one number."""
        upload = super().upload(client, payload)
        step_total = sum(fit.step_sizes for fit in client.fits)
        upload.statistics["steps"] = torch.tensor([step_total / (client.lr or 1.0)])
        return upload

    def aggregate(self, server: Server) -> None:
        """Move the model by the normalised mean change times the effective number of steps."""
        old = server["model"]
        super().aggregate(server)
        relation = server.run.relation
        assert isinstance(relation, Normalised)
        move_on(server.only, old, relation.step_factor)
