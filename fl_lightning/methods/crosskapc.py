"""KAPC that groups clients where held-out losses say so, in one layer or the fewest that gain, and
judges shrunk steps (ours)."""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from fl_lightning.callbacks.crossfitted import TRIAL, CrossFittedCube
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
from fl_lightning.methods.common.halves import (
    held_out,
    noise_of,
    shrunk,
    step_of,
    train_halves,
)


@dataclass(frozen=True)
class CrossKAPC(Method):
    """FedAvg, until clients turn out to conflict: then one layer, the last or the first, is mixed
    within groups, or in deeper networks several.

    Server: groups are read off the cosines of clients' steps in rounds 1 to 3. If they are
    distinct, rounds 4 to 6 try them: each client begins once from FedAvg's model, once from that
    with the mean of its group in the last layer, and once with it in the first, each mean without
    its own model. It reports losses on samples that its training has not seen, and the best start
    stays. If that is FedAvg's, three rounds more try the last and the first 2 layers, then 4 and so
    on, up to half of them. Scored: the step from what was received, made smaller by the share of
    noise in it, which two halves of the samples give in round 1.

    Args:
        guard: groups are tried only if their separation d' exceeds this (one normal sample has
            2.7); where it is too great to be exceeded, the method is FedAvg judged by shrunk steps.
            4: our choice, on validation data (docs/decisions/0031).
        exponent: a step counts (1 - share of noise)^exponent times. 1 is James and Stein's; 0:
            judged as trained. 0.5: our choice, likewise.
    """

    traits = Traits(
        family="mixing",
        judge="after",
        statistics=True,
        several=False,
        client_memory=True,
        newcomers=Rule("FedAvg's model, but of a grouped layer its own; local training"),
        receives_beside="the share of noise in its step by layer",
        sample_use="measures its noise and held-out losses on two halves of the samples",
    )

    guard: NonNegativeFloat = 4.0
    exponent: NonNegativeFloat = 0.5

    def slots(self) -> dict[str, Slot]:
        """`start`: what the client received last."""
        return {"start": Slot()}

    def init_client(self, run: RunContext) -> Tensors:
        """`share` (L,): of noise in the client's step; 0 until the server has told it."""
        return {"share": torch.zeros(len(run.layer_names))}

    def relation(self) -> CrossFittedCube:
        """FedAvg's rows, or those of groups in one layer."""
        return CrossFittedCube(self.guard)

    def broadcast(self, server: Server) -> Payloads:
        """FedAvg's model, or the client's own mix; once its share of noise, and whether it is to
        report losses."""
        return cast(CrossFittedCube, server.run.relation).sent(server)

    def aggregate(self, server: Server) -> None:
        """The relation learns; FedAvg's model, which groups do not change, is the mean by
        samples."""
        server.run.relation.learn(server)
        who = server.answered
        server["model"] = server.only.mean(server.shares(who), who, like=server["model"])

    def receive(self, client: Client, payload: Payload) -> None:
        """Begin from what was received, and keep that as `start`; keep the `share` of noise once
        the server tells it."""
        super().receive(client, payload)
        client["start"].copy_(client["model"])
        client.memory["share"] = payload.statistics.get("share", client.memory["share"]).cpu()

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Local training; in the first round and where losses are asked for of two halves, whose
        mean is kept."""
        trial = TRIAL in payload.statistics
        if client.rounds and not trial:
            yield Phase()
        elif halves := (yield from train_halves(client)):
            if trial:
                client.scratch["losses"] = held_out(client, halves)
            if not client.rounds:
                client.scratch["noise"] = noise_of(client, halves)
                client.scratch["step"] = step_of(client, client["start"])

    def beside(self) -> dict[str, Beside]:
        """Declares what `upload` adds to the model."""
        step = "squared norms of the client's first step by layer"
        noise = "variance of the client's step by layer"
        return {
            "step": Beside("step_norms", step, "nonnegative", once=True),
            "noise": Beside("noise_norms", noise, "nonnegative", once=True),
            "losses": Beside("losses", "the client's losses in a trial of groups", None, once=True),
        }

    def upload(self, client: Client, payload: Payload) -> Payload:
        """The model, and beside it the measures that `phases` left."""
        return replace(super().upload(client, payload), statistics=dict(client.scratch))

    def personal(self, client: Client) -> Tensor:
        """The received model, and the part of the step from it that is not noise."""
        factors = (1 - client.memory["share"]) ** self.exponent
        return shrunk(client, client["start"], client["model"], factors)

    def summary(self, run: RunContext) -> dict[str, Any]:
        """`grouped_layers`, and `client_groups` where there are any."""
        return cast(CrossFittedCube, run.relation).chosen(run)
