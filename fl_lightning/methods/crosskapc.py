"""KAPC that mixes within groups of clients where held-out losses show a gain, in as few layers as
needed, and scores shrunk steps (ours)."""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fl_lightning.callbacks.crossfitted import COMPARED, TRIAL, CrossFittedCube
from fl_lightning.methods import (
    Beside,
    Client,
    Method,
    NonNegativeFloat,
    Payload,
    Payloads,
    Phase,
    Phases,
    Rule,
    RunContext,
    Server,
    Slot,
    Tensors,
    Traits,
)
from fl_lightning.methods.common.basics import wide
from fl_lightning.methods.common.halves import (
    held_out,
    noise_of,
    shrunk,
    step_of,
    train_halves,
)


@dataclass(frozen=True)
class CrossKAPC(Method):
    """FedAvg, unless the clients conflict; then one layer, the first or the last (in deeper
    networks: several), is mixed within groups of clients.

    Rounds 1 to 3 are FedAvg's, and look for groups. All pairs of clients are divided into similar
    and dissimilar ones by the cosine of their steps. The separation d' is the distance between the
    mean cosines of both kinds of pairs, over the standard deviation within the kinds. In round 3
    clients also upload their mean features of each class. If these conflict, and separate the pairs
    with a greater d', they take the place of the cosines. Clients that are similar form a group.

    If d' is above `guard`, rounds 4 to 6 try the groups. Each client starts one of these rounds
    from FedAvg's model, one from this model with the last layer replaced by the mean of the
    client's group, and one with the first layer replaced; all these means leave out the client's
    own model. In each round it uploads its losses on samples that were not used in training. A
    grouped start is kept if its losses are lower than those of FedAvg's start by more than 2
    standard errors. If neither is, three more rounds try the last 2 and the first 2 layers, then 4
    and so on, up to half of all layers. If the mean features of classes conflict, the better
    grouped start of the last trial is kept in any case.

    Scored: the received model plus the client's step. In each layer the step is shrunk by its share
    of noise, which is measured in round 1 by training on two halves of the samples.

    Args:
        guard: the groups are tried if d' is above this (numbers from one normal distribution have a
            d' of 2.7). With a very large value none are tried: the method is then FedAvg with
            shrunk steps. 4: our choice, on validation data (docs/decisions/0031).
        exponent: in each layer a step is multiplied by (1 - share of noise)^exponent. 1: James and
            Stein's; 0: steps are scored as trained. 0.5: our choice, on validation data
            (docs/decisions/0031).
    """

    traits = Traits(
        family="mixing",
        judge="after",
        statistics=True,
        several=False,
        client_memory=True,
        newcomers=Rule("FedAvg's model, with its group's mean in grouped layers; local training"),
        receives_beside="the share of noise in its step by layer",
        sample_use="uploads class means, and measures of its noise and losses on halves of samples",
    )

    guard: NonNegativeFloat = 4.0
    exponent: NonNegativeFloat = 0.5

    def slots(self) -> dict[str, Slot]:
        """The vector `start`: the model that the client received last."""
        return {"start": Slot()}

    def init_client(self, run: RunContext) -> Tensors:
        """`share` (L,): the share of noise in each layer of the client's step; 0 until the server
        sends it."""
        return {"share": torch.zeros(len(run.layer_names))}

    def relation(self) -> CrossFittedCube:
        """Return the relation that finds and tries the groups: FedAvg's rows, or rows within groups
        in some layers."""
        return CrossFittedCube(self.guard)

    def broadcast(self, server: Server) -> Payloads:
        """Send each client FedAvg's model or the client's own mix. Also send, once, the share of
        noise in the client's step by layer, and in rounds that try groups a flag that asks the
        client for its losses."""
        return cast(CrossFittedCube, server.run.relation).sent(server)

    def aggregate(self, server: Server) -> None:
        """Let the relation learn; then update FedAvg's model, the mean by samples, which groups do
        not change."""
        server.run.relation.learn(server)
        answered = server.answered
        server["model"] = server.only.mean(server.shares(answered), answered, like=server["model"])

    def receive(self, client: Client, payload: Payload) -> None:
        """Start from the received model, keep it as `start`, and keep the share of noise if the
        server has sent it."""
        super().receive(client, payload)
        client["start"].copy_(client["model"])
        client.memory["share"] = payload.statistics.get("share", client.memory["share"]).cpu()

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Train locally; on two halves of the samples in the first round, and in rounds for which
        the server asks for losses."""
        trial = TRIAL in payload.statistics
        if client.round == COMPARED and has_classes(client.run):
            client.scratch["classes"] = class_table(client)
        if client.rounds and not trial:
            yield Phase()
        elif halves := (yield from train_halves(client)):
            if trial:
                client.scratch["losses"] = held_out(client, halves)
            if not client.rounds:
                client.scratch["noise"] = noise_of(client, halves)
                client.scratch["step"] = step_of(client, client["start"])

    def beside(self) -> dict[str, Beside]:
        step = "squared norms of the client's first step by layer"
        noise = "variance of the client's step by layer"
        return {
            "step": Beside("step_norms", step, "nonnegative", once=True),
            "noise": Beside("noise_norms", noise, "nonnegative", once=True),
            "classes": Beside("class_table", "mean features of each class", None, once=True),
            "losses": Beside("losses", "the client's losses in a trial of groups", None, once=True),
        }

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Upload the model and the measurements of `phases`."""
        return replace(super().upload(client, payload), statistics=dict(client.scratch))

    def personal(self, client: Client) -> Tensor:
        """Return the received model plus the client's step, shrunk by its share of noise."""
        factors = (1 - client.memory["share"]) ** self.exponent
        return shrunk(client, client["start"], client["model"], factors)

    def summary(self, run: RunContext) -> dict[str, Any]:
        """Return `grouped_layers`, and `client_groups` if there are groups."""
        return cast(CrossFittedCube, run.relation).chosen(run)


def has_classes(run: RunContext) -> bool:
    """Whether each sample has one class label: not in regression, nor in texts with a label at each
    position."""
    text = run.data.text
    per_position = text is not None and text.per_position
    return run.config.data.task == "classification" and not per_position


@torch.no_grad()
def class_table(client: Client) -> Tensor:
    """Return, for each class, the client's number of samples, the sum of their squared distances
    from their mean, and that mean: float32 (C, 2 + d).

    Samples are represented by the inputs of the classifier of the client's model.
    """
    inputs: list[Tensor] = []
    labels: list[Tensor] = []
    model = client.bind().model.eval()
    head = model.get_submodule(client.layout.head)
    hook = head.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    for x, y in client.data.train.batches(client.run.config.evaluation.batch_size):
        model(x)
        labels.append(y)
    hook.remove()
    features = wide(torch.cat(inputs).flatten(1))
    of_class = one_hot(torch.cat(labels), client.run.data.num_classes).to(features.dtype)
    counts = of_class.sum(0)[:, None]
    means = of_class.T @ features / counts.clamp_min(1)
    squares = of_class.T @ (features - of_class @ means).square().sum(1, keepdim=True)
    return torch.cat([counts, squares, means], 1).float().cpu()
