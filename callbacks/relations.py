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
    """Whether all clients receive the same: one row, mixed after the round's uploads to the global
    model."""
    several: ClassVar[bool] = False
    """Whether it can be applied within each of several architectures."""
    per_layer: ClassVar[bool] = False
    """Whether each layer has its own weights."""
    sums_to_one: bool = True
    """Whether its rows sum to 1."""
    measures: ClassVar[bool] = False
    """Whether it has an objective of its own, which `measured` reports as metrics of the round."""
    pair_flops = 0
    """Operations of `weights` for each pair of sources, an exponential counted as one."""
    sources: Literal["cohort", "known", "uploaded", "all"] = "cohort"
    """The clients whose last uploads are mixed. `cohort`: the round's clients; `known`: these and
    all that have uploaded so far; `uploaded`: only clients that have uploaded; `all`: all clients.
    The initial model stands for a client that has not uploaded yet; with `uploaded`, only in the
    mix that this client itself receives."""
    fixed: ClassVar[str] = ""
    """Why rows must not be changed, in words; empty: `callbacks.blurrelation` may change them."""
    blur: Callable[[Tensor, Sequence[int], Sequence[int], int], Tensor] | None = None
    """The function by which `callbacks.blurrelation` changes the rows (L, m, n) of receivers by
    sources in a round; None: it is not in use."""

    def init_server(self, run: RunContext) -> Tensors:
        """Return small tensors, with their first values, that the server keeps between rounds,
        equal on every rank."""
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
        """Return the rows by which the server mixes and which it logs: `rows` (L, m, n), changed by
        `callbacks.blurrelation` if the run has it."""
        return rows if self.blur is None else self.blur(rows, receivers, sources, round)

    def learn(self, server: Server) -> None:
        """Update the relation after a round's uploads, on every rank.

        `server.statistics` holds the named tensors that each client has uploaded in addition to its
        model. Each group of `server.groups` has `weighed`, the weights by which its downloads of
        this round were mixed, and `gram(..., since="sent")`, the inner products of the clients'
        steps from their downloads to their uploads.
        """

    def measured(self, clients: list[dict[str, Any]]) -> dict[str, float]:
        """Return further metrics of the round.

        Args:
            clients: the round's rows of clients.csv, the same on every rank. If the class attribute
                `measures` is true, they hold `gradient_norm`: the norm of the change of the
                client's parameters, divided by learning rate times steps. Remove an entry from the
                rows to keep it out of clients.csv.
        """
        return {}

    def newcomer(
        self,
        run: RunContext,
        part: Part,
        labelled: bool,
    ) -> Tensor | None:
        """Return the weights (N,) of all clients' models in the mix that a new client receives.

        If the result is None, the new client becomes one more client of the federation: the mean of
        all models stands for its last upload, and `weights` computes its row.

        Args:
            run: the run of the federation that the new client joins.
            part: the new client's training data.
            labelled: whether the data have labels.
        """
        return None

    def flops(
        self,
        layers: int,
        receivers: int,
        sources: int,
    ) -> int:
        """Return the floating-point operations of `weights`, without those of Gram matrices."""
        return self.pair_flops * sources**2


def check_finite(numbers: Tensor) -> None:
    """Raise `RunFailed` unless all `numbers`, computed from clients' models, are finite."""
    if not numbers.isfinite().all():
        raise RunFailed("a client's model is no longer finite; lower optimizer.lr")


class Alone(Relation):
    """Each client receives its own model alone."""

    several = True
    fixed = "its server mixes by no relation"

    def weights(self, inputs: RelationInputs) -> Tensor:
        """Return rows of the identity, (1, m, n)."""
        return torch.eye(len(inputs.sources), dtype=torch.float64)[inputs.places][None]


class SampleCounts(Relation):
    """All clients receive the mean of the cohort, weighted by training samples (McMahan et al.,
    AISTATS 2017).

    Args:
        sources: `cohort`: the mean of this round's uploads; `known`: the mean of the last uploads
            of all clients that have uploaded so far, which the server then stores.
    """

    is_global = True
    several = True

    def __init__(self, sources: Literal["cohort", "known"] = "cohort") -> None:
        self.sources = sources

    def weights(self, inputs: RelationInputs) -> Tensor:
        """Return n_j / sum n, (1, 1, n)."""
        return (inputs.samples / inputs.samples.sum())[None, None]


class Uniform(SampleCounts):
    """All clients receive the plain mean of the cohort."""

    def weights(self, inputs: RelationInputs) -> Tensor:
        """Return 1/n, (1, 1, n)."""
        return torch.full_like(inputs.samples, 1 / len(inputs.samples))[None, None]


def mean_relation(
    weighting: Literal["samples", "uniform"], sources: Literal["cohort", "known"] = "cohort"
) -> Relation:
    """Return the relation of the mean, weighted by training samples or plain."""
    return SampleCounts(sources) if weighting == "samples" else Uniform(sources)


@dataclass
class Attention(Relation):
    """FedAMP's message passing: similar models attract (Huang et al., AAAI 2021, Eq. 4 with A(x) =
    1 - exp(-x/sigma)).

    For j other than i the weight is (alpha/sigma) exp(-||w_i - w_j||^2 / sigma); the client itself
    has the rest.

    Args:
        alpha: step size of the message passing. If `sigma` is None, the step is alpha times the
            sigma that the round gives, so the factor alpha/sigma is alpha itself.
        sigma: scale of squared distances; None: the mean squared distance between different sources
            in this round.
        sources: the clients whose last uploads are mixed, see `Relation.sources`. `known` is the
            paper's: its server stores every client's model.
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
        """Raise `BadInput` if own weights could turn negative with the greatest number of models
        that can be mixed."""
        n = max(len(g.members) for g in run.groups)
        if self.sources == "cohort":
            n = min(n, run.cohort_size)
        if self._step * (n - 1) > 1:
            most = f"alpha (over sigma, where that is set) must be at most {1 / (n - 1):.4g}"
            requirement = f"with {n} models {most}, or own weights turn negative"
            raise BadInput("method.alpha", self.alpha, requirement)

    def weights(self, inputs: RelationInputs) -> Tensor:
        """Return the receivers' rows, (1, m, n)."""
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
