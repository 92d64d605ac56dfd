"""KAPC: Zhi, Bi, Xu, Wang, Xiang: Knowledge-Aware Parameter Coaching for Personalized Federated
Learning. AAAI 2024.

The journal extension (KAPC+BLS) is the same method with layer selection hung on it.
"""

from dataclasses import dataclass, replace
from typing import Literal

from fl_lightning.callbacks.cube import CubeSettings, LearnedCube
from fl_lightning.methods import (
    Block,
    Client,
    Method,
    Needs,
    Payload,
    Phase,
    Phases,
    Relation,
    Scope,
    Traits,
)


@dataclass(frozen=True)
class KAPC(Method, CubeSettings):
    """A proximal term draws each layer of a client to its own mix of all models, given by a learned
    relation cube.

    Client: minimise f_i(w) + lam sum_l ||w^l - s_i^l||^2 with s_i^l = sum_j R[i, l, j] w_j^l
    constant (journal version, Eq. 16). Server: rows of R descend on lam ||r W - w_i||^2 + (beta/2)
    ||r - p||^2 (AAAI, Eq. 10, 12), or solve it. No factor m_i / m weighs a client's part (AAAI, Eq.
    11; Eq. 9 has one): see docs/decisions/0004.

    The relation's arguments are those of `CubeSettings`.

    Args:
        start: a client starts its round from its `own` model (journal version, Eq. 17) or from what
            the `server` sends.
        classifier: `coached` (paper), or `own`: the classifier is neither sent nor coached.
    """

    traits = Traits(
        family="mixing",
        judge="after",
        needs=(
            Needs(
                "rho",
                free=None,
                other="solver",
                values=("exact",),
                says="the published step has no rho of its own: null, or solver exact",
            ),
        ),
    )

    start: Literal["own", "server"] = "own"
    classifier: Literal["coached", "own"] = "coached"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "traits", replace(self.traits, starts=self.start))

    def relation(self) -> Relation:
        """The learned cube."""
        return LearnedCube(self)

    def scope(self, block: Block) -> Scope:
        """Layers both ways; normalisation up only (the papers' byte counts prove it); running
        statistics never."""
        if block.kind == "buffer" or (block.head and self.classifier == "own"):
            return "personal"
        return "uploaded" if block.normalisation else "shared"

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Coached by lam on every layer that was received."""
        return [Phase(objective=client.proximal(payload, self.lam))]
