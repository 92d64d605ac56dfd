"""FEDORA: Wu, Bao, Ainsworth, He: Personalized Federated Learning with Parameter Propagation. KDD
2023."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from fl_lightning.callbacks.propagation import Propagation, uploaded_basis
from fl_lightning.methods import (
    Beside,
    Client,
    LogRange,
    Needs,
    NonNegativeFloat,
    NonNegativeInt,
    OwnStatistics,
    Payload,
    Phase,
    Phases,
    PositiveFloat,
    PositiveInt,
    Range,
    Relation,
    Traits,
    searched,
)


@dataclass(frozen=True)
class FEDORA(OwnStatistics):
    """A proximal term towards models propagated over a graph of similar data, weighted by its gain
    on validation data.

    Client k minimises f_k(w) + lambda_k ||w - w^_k||^2 with lambda_k = max(epsilon, L_val(w_k) -
    L_val(w^_k)).

    Args:
        alpha: weight of propagation; kappa = alpha / (1 + alpha). 1: paper (the authors' code has
            4). Beyond 1e15 kappa is rounded to 1, and nothing of one's own model is left.
        directions: singular vectors of a client's data that stand for it, p. 1: paper.
        steps: of the iterative propagation; null: its fixed point, in closed form (paper).
        sharpness: null: similarities as they are (paper); 10: exp(10 similarity) of the closest
            others (authors' code).
        neighbours: how many others count, with `sharpness`. 2: the authors' code.
        selection: lambda_k by the `paper`, by the `code` (0, or exp((L_own - L_received) / 2) where
            the received model is better, with half the paper's gradient), `lam` for everybody
            (`constant`: its Table 5), or 1 for everybody (`always`).
        lam: lambda_k of `constant`. 1: the best of Table 5's 0.01, 0.1, 1 and 10.
        similarity: what makes clients neighbours: the angles of their data's `subspace` (paper), or
            `random`: FedU's random graph, which the paper names so, and as with subspaces to
            oneself (Table 4's first row). Table 4's parameter and gradient similarities are left
            out: their formulas were not available.
        epsilon: the least lambda_k of the paper. 1e-8: paper.
        sources: whose models count: `all` (paper, where everybody takes part; a client that has not
            uploaded yet counts with the initial model), or only those that have `uploaded` so far,
            and one's own.
    """

    traits = Traits(
        family="mixing",
        judge="after",
        starts="own",
        needs=(
            Needs(
                "lam",
                free=1.0,
                other="selection",
                values=("constant",),
                says="it belongs to method.selection constant",
            ),
        ),
        sample_use="measures its relation on samples",
    )

    alpha: Annotated[float, Range(0, 1e15)] = searched(
        1.0, LogRange(0.25, 16), "around the paper's 1 and the code's 4"
    )
    directions: PositiveInt = 1
    steps: NonNegativeInt | None = None
    sharpness: PositiveFloat | None = None
    neighbours: PositiveInt = 2
    selection: Literal["paper", "code", "always", "constant"] = "paper"
    epsilon: NonNegativeFloat = 1e-8
    lam: NonNegativeFloat = 1.0
    similarity: Literal["subspace", "random"] = "subspace"
    sources: Literal["all", "uploaded"] = "all"

    def relation(self) -> Relation:
        """Propagation over like data."""
        return Propagation(
            self.alpha,
            self.directions,
            self.sharpness,
            self.neighbours,
            self.steps,
            validated=self.selection in ("paper", "code"),
            similarity=self.similarity,
            sources=self.sources,
        )

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Every parameter pulled by `coefficient`."""
        yield Phase(objective=client.proximal(payload, self.coefficient(client, payload)))

    def coefficient(self, client: Client, payload: Payload) -> float:
        """lambda_k, from the losses of the own and of the received model on the client's validation
        data."""
        if self.selection in ("always", "constant"):
            return self.lam
        part = client.data.validation
        gain = client.loss(part) - client.loss(part, client.composed(payload))
        if self.selection == "paper":
            return max(self.epsilon, gain)
        return 0.0 if gain < 0 else 0.5 * math.exp(min(gain / 2, 50.0))

    def beside(self) -> dict[str, Beside]:
        """Declares what `upload` adds to the model."""
        words = "a basis of the client's samples, from which the server computes the relation"
        basis = {"basis": Beside("basis", words, None, once=True)}
        return basis if self.similarity == "subspace" else {}

    def upload(self, client: Client, payload: Payload) -> Payload:
        """A client tells the basis of its data once, with its first upload."""
        upload = super().upload(client, payload)
        if client.rounds == 0 and self.similarity == "subspace":
            upload.extra["basis"] = uploaded_basis(client)
        return upload
