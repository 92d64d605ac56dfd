"""Defence against malicious clients: robust means, and a bound on what one client may change.

Yin, Chen, Ramchandran, Bartlett: Byzantine-Robust Distributed Learning: Towards Optimal Statistical
Rates. ICML 2018. Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries:
Byzantine Tolerant Gradient Descent. NeurIPS 2017. All count every client once: numbers of samples
are what clients say of themselves.
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
    """The mean of each column of `W` (n, columns) without its `cut` smallest and `cut` largest
    numbers, (columns,).

    Taken around the smallest number that is left: equal numbers stay equal bit for bit, and the
    order of rows does not matter. `cut` is below n / 2.
    """
    middle = W.sort(0).values[cut : len(W) - cut]
    return middle[0] + (middle - middle[0]).mean(0)


@dataclass
class TrimmedMean(Unweighted):
    """The mean of each number over the clients, without the smallest and the largest (Yin et al.,
    ICML 2018).

    Args:
        share: of the cohort that is cut off at either end, rounded up; at least the attackers'
            share. 0: the unweighted mean.
    """

    share: Annotated[float, Range(0, 0.5, below=True)]

    def combine(
        self,
        W: Tensor,
        p: Tensor,
    ) -> Tensor:
        """The trimmed mean of each column; of few models at least the middle ones are kept."""
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
        """The median of each column."""
        return trimmed_mean(W, (len(W) - 1) // 2)


@dataclass
class Krum(Aggregator):
    """The model nearest to its nearest neighbours, or the mean of several such models (Blanchard et
    al., NeurIPS 2017).

    A model's score is the sum of its squared distances, over all that is sent, to the n - attackers
    - 2 models nearest to it. Equal scores: the lower client number.

    Args:
        attackers: how many clients of a cohort may be malicious, f; the cohort has at least 2 f +
            3.
        keep: models of least score that are averaged; 1 is Krum, more is Multi-Krum.
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
        check(
            f"{key}.attackers",
            attackers,
            attackers <= most,
            f"of {n} clients at most {most}: a larger cohort takes more",
        )
        most = n - attackers
        check(f"{key}.keep", self.keep, self.keep <= most, f"at most {most}")

    def weights(
        self,
        p: Tensor,
        inputs: RelationInputs,
    ) -> Tensor:
        """1 / keep for the chosen models, else 0. Where clients have failed, fewer neighbours are
        looked at."""
        n = p.shape[-1]
        # beyond the range of the type
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
        """The mean of the chosen models; the others do not come in, however large they are."""
        chosen = p > 0
        return mean_of(W[chosen], p[chosen])


@dataclass
class NormBound(Transform):
    """A bound on how far an upload may lie from what the server knows (Sun et al., Can You Really
    Backdoor FL?, 2019).

    That is the L2 norm, over all of the model that is sent (not what travels beside it, such as
    class means), of the difference from what the client has received, where it starts from that,
    and from its last upload otherwise.

    Args:
        bound: the greatest norm; it depends on model, learning rate and epochs.
        action: `clip` brings a larger change down to the bound; `refuse` has the client fail at the
            stage `upload`, and `federation.on_bad_client` says what follows.
    """

    changes_upload = True

    bound: PositiveFloat
    action: Literal["clip", "refuse"] = "clip"

    def on_upload(
        self,
        client: Client,
        payload: Payload,
    ) -> None:
        """Measure, and clip or refuse."""
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
