"""kNN-Per: Marfoq, Neglia, Kameni, Vidal: Personalized Federated Learning through Local
Memorization. ICML 2022."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.methods import (
    Client,
    LogRange,
    Method,
    PositiveFloat,
    PositiveInt,
    Rule,
    RunContext,
    Tensors,
    Traits,
    UnitInterval,
    searched,
)
from fl_lightning.methods.common.basics import wide

Kernel = Literal["gaussian", "exponential"]
"""`gaussian`: exp(-delta^2 / (d s)), `exponential`: exp(-delta / s), for the distance delta of
features of width d."""
GRID = torch.linspace(0, 1, 11)
"""Values among which `lam: null` chooses."""


@dataclass(frozen=True)
class KNNPer(Method):
    """FedAvg whose predictions each client mixes with a vote of its own training samples that are
    nearest in feature space.

    Scored: lam p_kNN(x) + (1 - lam) softmax(h(x)), where the same model gives the features of x and
    of the k samples; as `global`: that model alone, FedAvg's. (The authors' code mixes logits with
    probabilities unless it is told not to, and chooses lam on test data.)

    Args:
        lam: weight of the vote; null: each client's best of 0, 0.1, ..., 1 on its validation data,
            as in the paper (the authors' code: on test data), and 0.5 (FL-bench) for a newcomer
            without any; 0 is FedAvg.
        k: number of samples that vote. 7: the authors' code.
        scale: s of the kernel. 1: the authors' code.
        kernel: `gaussian`, exp(-delta^2 / (d s)) of the distance delta of features of width d (the
            authors' code), or `exponential`, exp(-delta / s).
    """

    traits = Traits(
        family="one global model",
        judge="before",
        features=True,
        adapts=True,
        classes=True,
        newcomers=Rule("global model, and the vote of its own samples", "nothing"),
        sample_use="predicts from stored features of samples",
    )

    lam: UnitInterval | None = None
    k: PositiveInt = 7
    scale: PositiveFloat = searched(1.0, LogRange(0.1, 10), "a decade around the authors'")
    kernel: Kernel = "gaussian"

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` if lam is to be chosen (null) and clients have no validation data."""
        if self.lam is None:
            run.check_validation("chooses lam on validation data unless method.lam is set")

    def prepare(
        self,
        client: Client,
        vector: Tensor,
        kind: str,
    ) -> Tensors:
        """Return features and labels of the client's training samples, and its `lam`; nothing if
        the model is scored without a vote."""
        if kind == "global" or self.lam == 0 or not len(client.data.train):
            return {}
        features, _, labels = zip(*client.passes(client.data.train, vector), strict=True)
        store = {"features": wide(torch.cat(features)), "labels": torch.cat(labels)}
        lam = self._best(client, vector, store) if self.lam is None else torch.tensor(self.lam)
        return store | {"lam": lam}

    def _best(
        self,
        client: Client,
        vector: Tensor,
        store: Tensors,
    ) -> Tensor:
        """Return the value of the grid, shape (), with which most validation samples are right; the
        least of several."""
        correct = torch.zeros(len(GRID))
        # without validation data: 0.5, the middle of the grid
        correct[len(GRID) // 2] = 0.0 if len(client.data.validation) else 1.0
        for z, scores, y in client.passes(client.data.validation, vector):
            for place, lam in enumerate(GRID):
                mixture = self._mixture(z, scores, store | {"lam": lam})
                correct[place] += float((mixture.argmax(1) == y).sum())
        return GRID[correct.argmax()]

    def _mixture(
        self,
        z: Tensor,
        scores: Tensor,
        store: Tensors,
    ) -> Tensor:
        """Return the mixture's probabilities (batch, C) at features z (batch, d)."""
        p = wide(scores).softmax(1)
        classes = p.shape[1]
        stored = store["features"], store["labels"]
        votes = vote(z, *stored, classes, k=self.k, scale=self.scale, kernel=self.kernel)
        return torch.lerp(p, votes.to(p), store["lam"].to(p))

    def outputs(self, client: Client, x: Tensor, kind: str) -> Tensor:
        """Return the model's scores, or with a vote the mixture's log probabilities."""
        scores = super().outputs(client, x, kind)
        if not client.prepared:
            return scores
        mixture = self._mixture(client.module.features, scores, client.prepared)
        return mixture.clamp_min(torch.finfo(mixture.dtype).tiny).log()


def vote(
    z: Tensor, stored: Tensor, labels: Tensor, classes: int, *, k: int, scale: float, kernel: Kernel
) -> Tensor:
    """Return the kernel-weighted shares of classes among the k stored samples nearest to each
    feature.

    Args:
        z: features (m, d).
        stored: features (n, d) of the samples that vote, n at least 1.
        labels: classes of the stored samples, (n,).
        classes: C.
        k: number of samples that vote; at most n do.
        scale: s of the kernel.
        kernel: name of the kernel.

    Returns:
        Shape (m, C), rows summing to 1, also where all weights would underflow.
    """
    # the faster mode has rounding errors at distances near 0
    distances = torch.cdist(wide(z), wide(stored), compute_mode="donot_use_mm_for_euclid_dist")
    nearest = distances.topk(min(k, len(stored)), largest=False)
    energy = nearest.values / scale
    if kernel == "gaussian":
        energy = nearest.values.square() / (z.shape[1] * scale)
    shares = energy.new_zeros(len(z), classes)
    return shares.scatter_add_(1, labels[nearest.indices], (-energy).softmax(1))
