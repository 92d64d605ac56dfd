"""Defences against malicious clients: robust means, and a bound on what one client may change.

Yin, Chen, Ramchandran, Bartlett: Byzantine-Robust Distributed Learning: Towards Optimal Statistical
Rates. ICML 2018. Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries:
Byzantine Tolerant Gradient Descent. NeurIPS 2017. All give every client the same weight: numbers of
samples are the clients' own claims.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from fl_lightning.callbacks.base import Aggregator, Transform, Unweighted
from fl_lightning.configuration.config import check
from fl_lightning.configuration.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Range
from fl_lightning.core import Client, Payload, RelationInputs, RunContext
from fl_lightning.core.mixing import mean_of


def trimmed_mean(W: Tensor, cut: int) -> Tensor:
    """Return the mean of each column of `W` (n, columns) without its `cut` smallest and `cut`
    largest numbers, (columns,).

    It is computed around the smallest number that is left: equal numbers stay equal bit for bit,
    and the order of rows does not matter. `cut` is below n / 2.
    """
    middle = W.sort(0).values[cut : len(W) - cut]
    return middle[0] + (middle - middle[0]).mean(0)


@dataclass
class TrimmedMean(Unweighted):
    """The mean of each number over the clients, without the smallest and the largest (Yin et al.,
    ICML 2018).

    Args:
        share: share of the cohort that is cut off at either end, rounded up; at least the
            attackers' share. 0: the unweighted mean.
    """

    share: Annotated[float, Range(0, 0.5, below=True)]

    def combine(
        self,
        W: Tensor,
        p: Tensor,
    ) -> Tensor:
        """Return the trimmed mean of each column; of few models at least the middle ones are
        kept."""
        n = len(W)
        return trimmed_mean(W, min(math.ceil(self.share * n - 1e-9), (n - 1) // 2))


@dataclass
class Median(Unweighted):
    """The median of each number over the clients (Yin et al., ICML 2018); for an even n, the mean
    of the middle two."""

    def combine(
        self,
        W: Tensor,
        p: Tensor,
    ) -> Tensor:
        """Return the median of each column."""
        return trimmed_mean(W, (len(W) - 1) // 2)


@dataclass
class Krum(Aggregator):
    """The model nearest to its nearest neighbours, or the mean of several such models (Blanchard et
    al., NeurIPS 2017).

    A model's score is the sum of its squared distances to the n - attackers - 2 models nearest to
    it, over all blocks that are sent. Of two equal scores the lower client number comes first.

    Args:
        attackers: greatest number of malicious clients in a cohort, f; the cohort has at least 2 f
            + 3 clients.
        keep: number of models of least score that are averaged; 1 is Krum, more is Multi-Krum.
    """

    attackers: NonNegativeInt
    keep: PositiveInt = 1

    def on_fit_start(self, run: RunContext) -> None:
        """Raise `BadInput` for a cohort that is too small."""
        super().on_fit_start(run)
        # models are aggregated by architecture
        n = min(run.cohort_size, *(len(g.members) for g in run.groups))
        key = self.config_key
        attackers = self.attackers
        most = (n - 3) // 2
        requirement = f"cohorts of {n} clients tolerate at most {most}; raise the participation"
        check(f"{key}.attackers", attackers, attackers <= most, requirement)
        most = n - attackers
        requirement = f"it must be at most {most}, the cohort without its attackers"
        check(f"{key}.keep", self.keep, self.keep <= most, requirement)

    def weights(
        self,
        p: Tensor,
        inputs: RelationInputs,
    ) -> Tensor:
        """Return 1 / keep for the chosen models, else 0. If clients have failed, fewer neighbours
        are compared."""
        n = p.shape[-1]
        # differences of numbers beyond the type's range are not numbers
        distance = inputs.gram().total().distances[0].nan_to_num(nan=math.inf)
        distance.fill_diagonal_(math.inf)  # oneself is no neighbour
        neighbours = max(1, n - self.attackers - 2)
        scores = distance.sort(1).values[:, :neighbours].sum(1)
        chosen = scores.argsort(stable=True)[: self.keep]
        weights = torch.zeros(n, dtype=p.dtype)
        weights[chosen] = 1 / len(chosen)
        return weights.expand(p.shape)

    def combine(
        self,
        W: Tensor,
        p: Tensor,
    ) -> Tensor:
        """Return the mean of the chosen models; the others have no effect, however large they
        are."""
        chosen = p > 0
        return mean_of(W[chosen], p[chosen])


@dataclass
class NormBound(Transform):
    """Bounds the change that a client uploads: the difference of its upload from the received model
    or, if the method starts from the client's own model, from its last upload (Sun et al., Can You
    Really Backdoor FL?, 2019).

    The bound is on the difference's L2 norm over all blocks of the model that are sent. Other
    tensors of the upload, such as class means, are not bounded.

    Args:
        bound: the greatest norm; it depends on model, learning rate and epochs.
        action: `clip` scales a larger change down to the bound; `refuse` makes the client fail at
            the stage `upload`, as `federation.on_bad_client` handles.
    """

    changes_upload = True

    bound: PositiveFloat
    action: Literal["clip", "refuse"] = "clip"

    def on_upload(
        self,
        client: Client,
        payload: Payload,
    ) -> None:
        """Measure the change; if it is larger than the bound, clip or refuse it."""
        reference = client.reference
        segments = payload.layout.segments(payload.sent)
        if not segments:
            return
        change = payload.vector - reference
        norms = [torch.linalg.vector_norm(change[s.columns]) for s in segments]
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        client.flops += 3 * int(payload.layout.sizes[payload.sent].sum())
        if norm <= self.bound:
            return
        if self.action == "refuse":
            bound = f"callbacks.normbound.bound = {self.bound:g}"
            raise ValueError(f"its upload changes by {norm:.4g}, more than {bound}")
        payload.vector = reference + change * (self.bound / norm)
