"""KAPC: Zhi, Bi, Xu, Wang, Xiang: Knowledge-Aware Parameter Coaching for Personalized Federated
Learning. AAAI 2024.

The journal extension (KAPC+BLS) is the same method with the callback `layerselection`.
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
    """A proximal term pulls each layer of a client towards its own mix of all models, given by a
    learned relation cube; the paper calls this coaching.

    A client minimises f_i(w) + lam sum_l ||w^l - s_i^l||^2 with s_i^l = sum_j R[i, l, j] w_j^l
    constant (journal version, Eq. 16). The server takes steps on the rows r of R down lam ||r W -
    w_i||^2 + (beta/2) ||r - p||^2 (AAAI, Eq. 10, 12), or solves for them. A step is not multiplied
    by the client's share of the samples m_i / m (as in AAAI, Eq. 11; Eq. 9 has this factor): see
    docs/decisions/0004.

    The relation's arguments, from `lam` to `rho`, are those of `CubeSettings`.

    Args:
        start: a client starts its round from its `own` model (journal version, Eq. 17) or from the
            model that the `server` sends.
        classifier: `coached` (paper): it has a proximal term like all layers; `own`: it is neither
            sent nor coached.
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
                says="the published step has no rho of its own; use null, or method.solver exact",
            ),
        ),
    )

    start: Literal["own", "server"] = "own"
    classifier: Literal["coached", "own"] = "coached"

    def __post_init__(self) -> None:
        super().__post_init__()
        # an argument decides a trait: this object has traits of its own
        object.__setattr__(self, "traits", replace(self.traits, starts=self.start))

    def relation(self) -> Relation:
        """Return the learned cube; this method's fields are its settings."""
        return LearnedCube(self)

    def scope(self, block: Block) -> Scope:
        """Share layers, upload normalisation (as the papers' byte counts imply), and never send
        running statistics."""
        if block.kind == "buffer" or (block.head and self.classifier == "own"):
            return "personal"
        return "uploaded" if block.normalisation else "shared"

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return one phase with a proximal term of weight lam on every received layer."""
        return [Phase(objective=client.proximal(payload, self.lam))]
