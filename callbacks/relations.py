"""Relations give the weights by which each client receives the others' models; a method has one.

`Alone`, `SampleCounts`, `Uniform` and `Attention` are computed on demand; the learned cube is in
`cube.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fl_lightning.callbacks.base import Callback
from fl_lightning.core import RelationInputs, RunContext, Server, Tensors
from fl_lightning.data.part import Part
from fl_lightning.foundation.errors import BadInput, RunFailed


class Relation(Callback):
    """Base of all relations. Rows are non-negative and sum to 1."""

    is_global: ClassVar[bool] = False
    """All clients receive the same: one row, mixed when the round's uploads are in: the global
    model."""
    several: ClassVar[bool] = False
    """It can be applied within each of several architectures."""
    per_layer: ClassVar[bool] = False
    """Every layer has weights of its own."""
    sums_to_one: bool = True
    """Whether its rows sum to 1."""
    measures: ClassVar[bool] = False
    """It has an objective of its own, which `measured` reports as metrics of the round."""
    pair_flops = 0
    """Operations of `weights` for each pair of sources, an exponential counted as one."""
    sources: Literal["cohort", "known", "uploaded", "all"] = "cohort"
    """Whose last-received models are mixed: the cohort's, those of all clients that have uploaded
    so far and the cohort's, of those that have uploaded only, or everybody's. Of a client that has
    not uploaded that is the initial model; with `uploaded` it counts for the client itself
    alone."""
    fixed: ClassVar[str] = ""
    """Why the server must mix by the rows as they are, in words; empty: `callbacks.blurrelation`
    may change them."""
    blur: Callable[[Tensor, Sequence[int], Sequence[int], int], Tensor] | None = None
    """A function that changes rows (L, m, n) of receivers by sources in a round, or None."""

    def init_server(self, run: RunContext) -> Tensors:
        """Return small tensors that the server keeps between rounds, equal on every rank, with
        first values."""
        return {}

    def weights(self, inputs: RelationInputs) -> Tensor:
        """Return weights (layers or 1, m, n), float64; m is 1 for a global model.

        Called once a round: a relation that learns may update its tensors in `inputs.memory`.
        """
        raise NotImplementedError

    def as_mixed(
        self,
        rows: Tensor,
        receivers: Sequence[int],
        sources: Sequence[int],
        round: int,
    ) -> Tensor:
        """Return the rows by which the server mixes, and which it logs: `rows` (L, m, n), changed
        by `blur` if it is set."""
        return rows if self.blur is None else self.blur(rows, receivers, sources, round)

    def learn(self, server: Server) -> None:
        """Learn from a round's uploads (every rank). `server.statistics`: what came beside them. Of
        each of `server.groups`, `weighed`: the weights by which clients were mixed;
        `gram(..., since="sent")`: products of their steps."""

    def measured(self, clients: list[dict[str, Any]]) -> dict[str, float]:
        """Return further metrics of the round, from `clients`, the rows of clients.csv (the same on
        every rank).

        With `measures` rows have `gradient_norm`, the norm of the change of the client's parameters
        over lr times steps; an entry that is to be no column is removed from the rows here.
        """
        return {}

    def newcomer(
        self,
        run: RunContext,
        part: Part,
        labelled: bool,
    ) -> Tensor | None:
        """Weights (N,) of all clients' models in what a new client with the training data `part`
        receives.

        None: the federation grows by the client, whose last upload is first the mean of all, and it
            receives by `weights`.
        """
        return None

    def flops(
        self,
        layers: int,
        receivers: int,
        sources: int,
    ) -> int:
        """Floating-point operations of `weights`, Gram matrices left aside."""
        return self.pair_flops * sources**2


def check_finite(numbers: Tensor) -> None:
    """Raise `RunFailed` unless all `numbers`, which come of clients' models, are finite."""
    if not numbers.isfinite().all():
        raise RunFailed("a client's model is no longer finite; lower optimizer.lr")


class Alone(Relation):
    """Each client receives its own model alone."""

    several = True
    fixed = "its server mixes by no relation"

    def weights(self, inputs: RelationInputs) -> Tensor:
        """The identity, (1, m, n)."""
        return torch.eye(len(inputs.sources), dtype=torch.float64)[inputs.places][None]


class SampleCounts(Relation):
    """All receive the mean of the cohort, weighted by training samples (McMahan et al., AISTATS
    2017).

    Args:
        sources: `known`: the method averages what the server last received of all, and keeps it.
    """

    is_global = True
    several = True

    def __init__(self, sources: Literal["cohort", "known"] = "cohort") -> None:
        self.sources = sources

    def weights(self, inputs: RelationInputs) -> Tensor:
        """n_j / sum n, (1, 1, n)."""
        return (inputs.samples / inputs.samples.sum())[None, None]


class Uniform(SampleCounts):
    """All receive the plain mean of the cohort."""

    def weights(self, inputs: RelationInputs) -> Tensor:
        """1/n, (1, 1, n)."""
        return torch.full_like(inputs.samples, 1 / len(inputs.samples))[None, None]


def mean_relation(
    weighting: Literal["samples", "uniform"], sources: Literal["cohort", "known"] = "cohort"
) -> Relation:
    """The mean, weighted by training samples or plain."""
    return SampleCounts(sources) if weighting == "samples" else Uniform(sources)


@dataclass
class Attention(Relation):
    """FedAMP's message passing: similar models attract (Huang et al., AAAI 2021, Eq. 4 with A(x) =
    1 - exp(-x/sigma)).

    For j other than i the weight is (alpha/sigma) exp(-||w_i - w_j||^2 / sigma); the rest is one's
    own.

    Args:
        alpha: step size of the message passing; with `sigma` None in units of sigma.
        sigma: scale of squared distances; None: the mean squared distance between different sources
            in this round.
        sources: `known` as in the paper, where the server keeps everyone's model; or `cohort`, or
            `uploaded`.
    """

    several = True
    pair_flops = 8

    alpha: float
    sigma: float | None
    sources: Literal["cohort", "known", "uploaded"] = "known"

    @property
    def _step(self) -> float:
        return self.alpha if self.sigma is None else self.alpha / self.sigma

    def on_fit_start(self, run: RunContext) -> None:
        """Raise `BadInput` if own weights could turn negative with as many models as may be
        mixed."""
        n = max(len(g.members) for g in run.groups)
        if self.sources == "cohort":
            n = min(n, run.cohort_size)
        if self._step * (n - 1) > 1:
            most = f"alpha (over sigma, where that is set) must be at most {1 / (n - 1):.4g}"
            requirement = f"with {n} models {most}, or own weights turn negative"
            raise BadInput("method.alpha", self.alpha, requirement)

    def weights(self, inputs: RelationInputs) -> Tensor:
        """Attention weights, (1, m, n)."""
        n = len(inputs.sources)
        step = self._step
        distance = inputs.gram().total().distances[0]
        check_finite(distance)
        sigma = self.sigma
        if sigma is None:
            sigma = float(distance.sum() / max(n * (n - 1), 1))
        weight = torch.full_like(distance, step)
        if sigma > 0:
            weight = step * torch.exp(-distance / sigma)
        weight.fill_diagonal_(0.0)
        weight += torch.diag(1 - weight.sum(1))
        return weight[inputs.places][None]
