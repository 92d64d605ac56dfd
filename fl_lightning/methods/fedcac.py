"""FedCAC: Wu, Liu, Niu, Zhu, Tang: Bold but Cautious: Unlocking the Potential of Personalized
Federated Learning through Cautiously Aggressive Collaboration. ICCV 2023.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.relation import Weights
from fl_lightning.methods import (
    Alone,
    Beside,
    Block,
    Choice,
    Client,
    Layout,
    Method,
    Payload,
    Payloads,
    PositiveInt,
    Range,
    Relation,
    Rule,
    RunContext,
    Scope,
    Server,
    Tensors,
    Traits,
    UnitInterval,
    searched,
)
from fl_lightning.methods.common.basics import packed, unpacked


@dataclass(frozen=True)
class FedCAC(Method):
    """FedAvg, except that each client's critical parameters are averaged only with clients whose
    critical parameters overlap with its own.

    After local training, a client's critical parameters are those whose |(w_i - w) w_i| is among
    the greatest share tau of their tensor; the mask M_i marks them. A client receives FedAvg's
    mean, with its critical parameters replaced by a plain mean over itself and all clients j whose
    overlap O_ij = 1 - |M_i - M_j| / (2 |M_i|) reaches a threshold. The threshold rises with the
    rounds: from the mean of all overlaps in round 1 to the greatest one after beta rounds, when the
    plain mean is nearly the client's own model. Models and masks are the last uploaded ones; a
    client that has never uploaded receives FedAvg's mean. The server combines both means, so one
    model is sent to each client. Scored: after local training.

    Args:
        tau: share of critical parameters. 0.5: the authors' code for CIFAR-10 (0.4 for CIFAR-100);
            0 is FedAvg.
        beta: number of rounds after which the threshold is the greatest overlap. 100: the authors'
            code for CIFAR-10 (for CIFAR-100: 170).
        statistics_of: whose running statistics (of BatchNorm) a client's model has: those of the
            `server`, a mean as in FedAvg, or the `client`'s own, which are never sent (the authors'
            code). The paper does not say.
    """

    traits = Traits(
        family="mixing",
        judge="after",
        statistics=True,
        several=False,
        newcomers=Rule(
            "global model, critical parameters from similar clients; then local training",
            remembers=True,
        ),
        receives="the mean of models, and of similar clients' models",
        sample_use="chooses critical parameters by training on samples",
    )

    tau: UnitInterval = searched(0.5, Range(0.1, 0.9), "around the authors' 0.4 and 0.5")
    beta: PositiveInt = searched(
        100, Choice((20, 50, 100, 170)), "the authors' 100 and 170, and less for shorter runs"
    )
    statistics_of: Literal["server", "client"] = "server"

    def scope(self, block: Block) -> Scope:
        """Share all, or all but running statistics."""
        return "personal" if block.kind == "buffer" and self.statistics_of == "client" else "shared"

    def relation(self) -> Relation:
        """Return the relation without mixing: a relation has one weight for a whole layer, while
        `broadcast` mixes parameter by parameter."""
        return Alone()

    def init_server(self, run: RunContext) -> Tensors:
        """`critical` (N, ceil(D / 8)): the clients' masks, eight bits to a byte. `told`: the
        numbers of the clients that answered in the last round, whose models the next mean averages;
        none at first."""
        size = run.groups[0].layout.size
        masks = torch.zeros(run.clients, -(-size // 8), dtype=torch.uint8)
        return {"critical": masks, "told": torch.zeros(0, dtype=torch.int64)}

    def broadcast(self, server: Server) -> Payloads:
        """Send FedAvg's mean, with each client's critical parameters replaced by the mean of
        clients with a similar mask."""
        group = server.only
        memory = server.memory
        uploaders = sorted(server.run.server.uploaded)
        averaged = memory["told"].tolist()
        receivers = [client for client in server.cohort if client in uploaders]
        mean = group.mean(server.shares(averaged), averaged) if averaged else group.initial
        vectors = dict.fromkeys(group.here, mean)
        if receivers:
            masks = memory["critical"]
            places = [uploaders.index(client) for client in receivers]
            progress = (server.round - 1) / self.beta
            weights = collaboration_rows(overlaps(masks[uploaders]), progress)[None, places]
            group.weighed = Weights(group.group, weights, receivers, uploaders)
            for client, mix in group.mix(weights, receivers, uploaders).items():
                mask = unpacked(masks[client], len(mix)).to(mix.device)
                vectors[client] = mix.copy_(torch.where(mask, mix, mean.to(mix.device)))
        return group.send(vectors)

    def beside(self) -> dict[str, Beside]:
        meaning = "a bit for each parameter: whether it is critical"
        return {"critical": Beside("critical", meaning, None)}

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Also upload the mask of critical parameters, packed into bits."""
        upload = super().upload(client, payload)
        w = client["model"]
        importance = ((w - client.reference) * w).abs()
        upload.extra["critical"] = packed(critical(client.layout, importance, self.tau))
        return upload

    def aggregate(self, server: Server) -> None:
        """Store the masks and the clients that have answered; `broadcast` averages their models in
        the next round."""
        masks = server.memory["critical"].clone()
        for client, upload in server.statistics.items():
            masks[client] = upload["critical"]
        server.memory |= {"critical": masks, "told": torch.tensor(server.answered)}


ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.uint8)
"""Number of bits that are 1, for each byte."""


def critical(layout: Layout, importance: Tensor, share: float) -> Tensor:
    """Return a mask (D,) of the parameters with the greatest `importance` (D,): int(share n) of the
    n in each tensor."""
    mask = torch.zeros(layout.size, dtype=torch.bool, device=importance.device)
    for block in layout.blocks:
        if block.kind == "parameter":
            top = importance[block.columns].topk(int(share * block.size)).indices
            mask[block.start + top] = True
    return mask


def overlaps(masks: Tensor) -> Tensor:
    """Return O_ij = 1 - |M_i - M_j| / (2 |M_i|), float64 (m, m), of packed masks (m, bytes). An
    empty mask has overlap 0 with all."""
    bits = masks.numpy()
    differences = [ONES[row ^ bits].sum(1, dtype=np.int64) for row in bits]
    differing = torch.from_numpy(np.stack(differences))
    sizes = torch.from_numpy(ONES[bits].sum(1, dtype=np.int64))[:, None]
    return torch.where(sizes > 0, 1 - differing / (2 * sizes.clamp_min(1)), 0.0).double()


def collaboration_rows(overlap: Tensor, progress: float) -> Tensor:
    """Return the rows (m, m) of a plain mean over each client itself and all clients j with O_ij >=
    mean + progress (max - mean).

    Mean and maximum are over all pairs of different clients. If all overlaps are equal, each row
    averages all clients.

    Args:
        overlap: O, (m, m).
        progress: share of the `beta` rounds that have passed; above 1 after them.
    """
    others = ~torch.eye(len(overlap), dtype=torch.bool)
    if len(overlap) == 1:
        return torch.ones_like(overlap)
    most = overlap[others].max()
    # rounding may raise the mean of equal numbers above them
    mean = overlap[others].mean().clamp_max(most)
    threshold = mean + progress * (most - mean)
    is_averaged = ((overlap >= threshold) | ~others).double()
    return is_averaged / is_averaged.sum(1, keepdim=True)
