"""ConFREE: Zheng, Hu, Yang, Zheng, Xu, Wang: ConFREE: Conflict-free Client Update Aggregation for
Personalized Federated Learning. AAAI 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fl_lightning.configuration.ranges import ShareBelow1
from fl_lightning.configuration.search import Range, searched
from fl_lightning.core import Block, Server, Traits
from fl_lightning.methods.base import PlainMean, Scope
from fl_lightning.methods.common.conflicts import conflict_free


@dataclass(frozen=True)
class ConFREE(PlainMean):
    """FedPer whose server keeps conflicting updates from cancelling, and goes further for the
    client worst off.

    Server: w <- w + d + c ||d|| D_v / ||D_v||. d is the mean of the updates D_i, each less its
        projections on the D_j
    with <D_i, D_j> < 0; v minimises <d, D_v> + c ||d|| ||D_v|| on the simplex, D_v = sum_j v_j D_j.
    So of all steps within c ||d|| of d it is the one whose least <step, D_j> is greatest. Running
    statistics: the plain mean.

    Args:
        c: radius about the guidance vector d. 0.5: our choice, the middle of the paper's (0, 1).
        by: one step for all that is exchanged (`model`: the paper's formula), or one for each
            `layer` (the authors' code: each tensor).
        classifier: each client's `own`, as in methods that the paper adds this to, or `shared`.
        rescaled: the step is divided by 1 + c^2 (the authors' code).
    """

    traits = Traits(family="partial sharing", judge="after", several=False)

    c: ShareBelow1 = searched(0.5, Range(0.1, 0.9), "the paper's (0, 1)")
    by: Literal["model", "layer"] = "model"
    classifier: Literal["own", "shared"] = "own"
    rescaled: bool = False

    def scope(self, block: Block) -> Scope:
        """All, or all but the classifier."""
        return "personal" if block.head and self.classifier == "own" else "shared"

    def aggregate(self, server: Server) -> None:
        """The conflict-free step."""
        group, who, old = server.only, server.answered, server["model"]
        if not who:
            return
        sent, layered = group.layout.is_parameter & group.group.down_mask, self.by == "layer"
        plain = torch.full((len(who),), 1 / len(who), dtype=torch.float64)
        mean = group.mean(plain, who, like=old)
        G = group.gram(who, since="sent", by_layer=layered, blocks=sent).full
        steps = torch.stack([conflict_free(each, self.c, rescaled=self.rescaled) for each in G])
        spare = 1 - steps.sum(1)  # of weights that sum to 1: so much of the mean is taken back
        new = group.mean(steps + spare[:, None] * plain, who, by_layer=layered, like=old)
        for s in group.layout.segments(sent, by_layer=layered):
            new[s.start : s.stop] -= float(spare[s.layer]) * (mean - old)[s.start : s.stop]
        for s in group.layout.segments(~group.layout.is_parameter & group.group.down_mask):
            new[s.start : s.stop] = mean[s.start : s.stop]
        server["model"] = new
