"""KAPC: Zhi, Bi, Xu, Wang, Xiang: Knowledge-Aware Parameter Coaching for Personalized Federated Learning. AAAI 2024.

The journal extension (KAPC+BLS) is the same method with layer selection hung on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_lightning.callbacks.cube import LearnedCube
from fl_lightning.callbacks.relations import Relation
from fl_lightning.core import Block, Client, Payload, Phase
from fl_lightning.methods.base import Method, Scope
from fl_lightning.ranges import Needs, NonNegativeFloat, NonNegativeInt
from fl_lightning.search import LogRange, searched


@dataclass(frozen=True)
class KAPC(Method):
    """Every client is coached, layer by layer, towards its own mix of all models by a learned relation cube.

    Client: minimise f_i(w) + lam sum_l ||w^l - s_i^l||^2 with s_i^l = sum_j R[i, l, j] w_j^l constant (Eq. 16).
    Server: rows of R descend on lam ||r W - w_i||^2 + (beta/2) ||r - p||^2 (Eq. 10, 12), or solve it. No factor m_i / m
    weighs a client's part (Eq. 11; Eq. 9 has one): see docs/decisions/0004.

    Args:
        lam: weight of the coaching term. 1: the ablation's middle value (the headline tables do not state it).
        beta: weight of the prior on the relation. 0.01: the ablation's middle value at alpha = 0.1.
        eta_r: step size on the relation. 0.01: paper.
        relation_steps: steps on the relation in a round, E_r. 1: paper.
        projection: how a stepped row is brought back to sum 1; unstable without (docs/decisions/0004).
        solver: `step`, the paper's; `exact` solves each row's problem, where only beta / (2 lam) = rho matters.
        prior: p is 1/N (`uniform`, paper) or each client's share of the training samples (`samples`).
        rho_units: `absolute` (paper), or rho in units of each layer's `spread`, its mean squared distance from the mean
            model (exact solver only).
        start: a client starts its round from its `own` model (Eq. 17) or from what the `server` sends.
        partial: how a partial cohort's rows are written back; `literal` is the journal's Alg. 5 (docs/decisions/0004).
        init: rows begin at 1/N (`uniform`), or each is drawn evenly from the simplex (`random`: the papers). uniform:
            ours, since a step of 0.01 hardly leaves where a row began: random ones stay random (docs/decisions/0004).
        classifier: `coached` (paper), or `own`: the classifier is neither sent nor coached.
        rho: strength of the prior in the exact problem; null: beta / (2 lam). With one of its own lam may be 0: rows
            without a proximal term.
        sources: whose last-known models are mixed: the `cohort`'s (journal, Alg. 5; a client that has not uploaded yet
            counts with the initial model), or those of everyone who has `uploaded` so far, and one's own.
    """

    family = "mixing"
    judge = "after"
    needs = (
        Needs("rho", None, "solver", ("exact",), "the published step has no rho of its own: null, or solver exact"),
    )

    lam: NonNegativeFloat = searched(1.0, LogRange(0.05, 3), "the papers' ablation: 0.05 to 3")
    beta: NonNegativeFloat = searched(0.01, LogRange(0.005, 10), "the papers' ablation: 0.005 to 10")
    eta_r: NonNegativeFloat = searched(0.01, LogRange(0.01, 1), "the papers', to 100 times, where the relation moves")
    relation_steps: NonNegativeInt = 1
    projection: Literal["simplex", "clamp", "divide", "none"] = "simplex"
    solver: Literal["step", "exact"] = "step"
    prior: Literal["uniform", "samples"] = "uniform"
    rho_units: Literal["absolute", "spread"] = "absolute"
    start: Literal["own", "server"] = "own"
    partial: Literal["preserve", "literal"] = "preserve"
    classifier: Literal["coached", "own"] = "coached"
    init: Literal["uniform", "random"] = "uniform"
    sources: Literal["cohort", "uploaded"] = "cohort"
    rho: NonNegativeFloat | None = None

    def relation(self) -> Relation:
        """The learned cube."""
        return LearnedCube(
            self.lam, self.beta, self.eta_r, self.relation_steps, self.projection, self.solver, self.prior,
            self.rho_units, self.partial, self.init, self.sources, self.rho,
        )  # fmt: skip

    def scope(self, block: Block) -> Scope:
        """Layers both ways; normalisation up only (the papers' byte counts prove it); running statistics never."""
        if block.kind == "buffer" or (block.head and self.classifier == "own"):
            return "personal"
        return "uploaded" if block.normalisation else "shared"

    @property
    def starts(self) -> Literal["own", "server"]:  # type: ignore[override]
        """`start`."""
        return self.start

    def phases(self, client: Client, payload: Payload) -> list[Phase]:
        """Coached by lam on every layer that was received."""
        return [Phase(objective=client.proximal(payload, self.lam))]
