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
    """A proximal term pulls each client towards a model propagated over a graph of clients with
    similar data; the more that model gains on the client's validation data, the stronger the pull.

    Client k minimises f_k(w) + lambda_k ||w - w^_k||^2, with the received model w^_k and lambda_k =
    max(epsilon, L_val(w_k) - L_val(w^_k)), where w_k is the client's own model.

    Args:
        alpha: weight of propagation; kappa = alpha / (1 + alpha). 1: paper (the authors' code has
            4). Beyond 1e15 kappa is rounded to 1, and the client's own model no longer counts.
        directions: number p of singular vectors that represent a client's data. 1: paper.
        steps: iterations of the propagation; null: its fixed point, in closed form (paper).
        sharpness: null: similarities are used as they are (paper). Otherwise exp(sharpness
            similarity) replaces them, for the most similar clients only. 10: the authors' code.
        neighbours: with `sharpness`: number of other clients that count. 2: the authors' code.
        selection: how lambda_k is chosen. `paper`: as above. `code`, as in the authors' code: 0 if
            the received model has the greater validation loss, otherwise exp((L_own - L_received) /
            2) / 2 (the code's gradient of the term is half the paper's). `constant`: `lam` for all
            clients (Table 5). `always`: 1 for all clients.
        lam: with selection `constant`: lambda_k. 1: the best of Table 5's 0.01, 0.1, 1 and 10.
        similarity: similarity of two clients. `subspace`: by the angles between their data's
            subspaces (paper). `random`: drawn at random, as the edges of FedU's graph (Table 4's
            first row); a client's similarity to itself is that of `subspace`. Table 4's parameter
            and gradient similarities are left out: their formulas were not available.
        epsilon: with selection `paper`: least lambda_k. 1e-8: paper.
        sources: clients whose models are propagated. `all` (paper, where all take part); the model
            of a client that has not uploaded yet is the initial one. `uploaded`: those that have
            uploaded so far, and the receiver.
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
                says="only method.selection constant uses it; leave it at 1",
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
        """Return the propagation over the graph of clients with similar data."""
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
        """Yield one phase with a proximal term of weight `coefficient`."""
        yield Phase(objective=client.proximal(payload, self.coefficient(client, payload)))

    def coefficient(self, client: Client, payload: Payload) -> float:
        """Return lambda_k, from the losses of the client's own model and of the received one on its
        validation data."""
        if self.selection in ("always", "constant"):
            return self.lam
        part = client.data.validation
        gain = client.loss(part) - client.loss(part, client.composed(payload))
        if self.selection == "paper":
            return max(self.epsilon, gain)
        return 0.0 if gain < 0 else 0.5 * math.exp(min(gain / 2, 50.0))

    def beside(self) -> dict[str, Beside]:
        meaning = "a basis of the client's samples, from which the server computes the relation"
        basis = {"basis": Beside("basis", meaning, None, once=True)}
        return basis if self.similarity == "subspace" else {}

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Upload the model and, in the client's first round, the singular vectors of its data, from
        which the server computes similarities."""
        upload = super().upload(client, payload)
        if client.rounds == 0 and self.similarity == "subspace":
            upload.extra["basis"] = uploaded_basis(client)
        return upload
