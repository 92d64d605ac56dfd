"""FedHKD: Chen, Wang, Vikalo: The Best of Both Worlds: Accurate Global and Personalized Models
through Federated Learning with Data-Free Hyper-Knowledge Distillation. ICLR 2023.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from fl_lightning.foundation.extras import require
from fl_lightning.methods import (
    Batch,
    Client,
    LogRange,
    Module,
    NonNegativeFloat,
    PositiveFloat,
    Range,
    RunContext,
    Tensors,
    UnitInterval,
    searched,
)
from fl_lightning.methods.classmeans import ClassMeans, class_means, distance_to_means
from fl_lightning.methods.common.basics import norms, wide


@dataclass(frozen=True)
class FedHKD(ClassMeans):
    """FedAvg whose clients also exchange, class by class, a noisy mean feature and a mean soft
    prediction.

    The local loss gains lam (1/C) sum_j ||softmax(G(H_j)/T) - Q_j|| over the known classes and
    gamma (1/B) sum_k ||R(x_k) - H_y(k)||, where R gives features, G is the classifier, H and Q are
    the global means. FedHKD* is gamma = 0. Class means are weighted by the samples of the class,
    N_i^j / N^j over those who told it, and models by all samples.

    Args:
        lam: weight of the classifier's term. 0.05: paper.
        gamma: weight of the features' term. 0.05: paper; 0 is FedHKD*.
        temperature: T of soft predictions. 0.5: paper.
        nu: a client tells the means of classes that make up at least this share of its data. 0.25:
            paper, where it cannot have been in use on CIFAR-100 (docs/results/class-knowledge.md).
        sigma: noise, in units of the class's sensitivity 2 zeta / N. 7: paper. 0: none.
        zeta: bound on a sample's feature. 3: paper.
        clip: bring features within zeta before the mean. Our addition: without it nothing
            guarantees the bound.
        bound: what zeta bounds: a feature's `norm`, or each `coordinate` (paper, Lemma 1 and
            section 4.3). norm: our choice, since epsilon then covers the whole vector; for a
            coordinate's it covers that coordinate alone, and for all d together the noise counts
            sqrt(d) times less (docs/decisions/0014).
        delta: at which the privacy report gives epsilon. 1e-5: our choice, below one over the
            samples of any client.
    """

    names = ("features", "predictions")
    forget = True

    lam: NonNegativeFloat = searched(0.05, LogRange(0.005, 0.5), "a decade around the paper's")
    gamma: NonNegativeFloat = searched(0.05, LogRange(0.005, 0.5), "a decade around the paper's")
    temperature: PositiveFloat = 0.5
    nu: UnitInterval = 0.25
    sigma: NonNegativeFloat = 7.0
    zeta: PositiveFloat = 3.0
    clip: bool = True
    bound: Literal["norm", "coordinate"] = "norm"
    delta: Annotated[float, Range(0, 1, above=True, below=True)] = 1e-5

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` for a regression, or where the privacy accounting is not installed."""
        if self.sigma and self.clip:
            require("dp", "method.sigma", self.sigma, "0 adds no noise and needs no accounting")

    @property
    def adds(self) -> bool:
        """Whether one of the two terms counts."""
        return self.lam > 0 or self.gamma > 0

    def loss(
        self,
        means: Tensors,
        module: Module,
        batch: Batch,
    ) -> Tensor:
        """The task loss and both terms (Eq. 11), shape ()."""
        task = module.task_loss(batch)
        terms = []
        if self.lam:
            terms.append(classifier_gap(module, means, self.temperature, self.lam))
        if self.gamma:
            distance = distance_to_means(module.features, batch[1], means, "norm")
            terms.append(self.gamma * distance)
        return task + sum(terms)

    def means(self, client: Client) -> Tensors:
        """Means of the classes that make up at least `nu` of the client's data, with noise on
        features."""
        means = class_means(client, self.temperature, self.bounded)
        features = means["features"]
        counts = means["counts"]
        if self.sigma:
            draws = client.generator("hyper-knowledge noise")
            features = noisy(features, counts, self.sigma, self.zeta, draws)
        enough = counts >= self.nu * counts.sum()
        return means | {"features": features, "counts": counts * enough}

    def bounded(self, features: Tensor) -> Tensor:
        """Features of samples (batch, d) brought within zeta: without that the sensitivity is not 2
        zeta / N."""
        if not (self.sigma and self.clip):
            return features
        if self.bound == "coordinate":
            return features.clamp(-self.zeta, self.zeta)
        norm: Tensor = features.norm(dim=1, keepdim=True)
        return features * (self.zeta / norm.clamp_min(1e-12)).clamp_max(1.0)

    def summary(self, run: RunContext) -> dict[str, Any]:
        """The privacy report, at `privacy_delta`, for one round (`..._round`) and for the run.

        `privacy_epsilon` is that of a class's whole mean feature; with `bound: coordinate`
        `privacy_epsilon_coordinate` is that of one of its coordinates, the others left aside (the
        paper's count). `privacy_covers` says so in words, and what the client uploads beside it
        without protection. Without noise or without a bound epsilon is infinite; nothing is
        reported where a callback accounts for the whole upload.
        """
        if any(getattr(callback, "accounts", False) for callback in run.callbacks):
            return {}
        width = run.feature_width
        safe = self.sigma > 0 and self.clip
        noises = {"": noise_multiplier(self.sigma, width, self.bound)}
        covers = f"one sample's part in its class's mean feature, all {width} coordinates"
        if self.bound == "coordinate":
            noises["_coordinate"] = self.sigma
            covers = (
                "one sample's part in its class's mean feature: privacy_epsilon all "
                f"{width} coordinates, privacy_epsilon_coordinate a single one of them"
            )
        beside = "the model, the mean predictions and the class counts that the client uploads"
        covers = f"{covers}; not {beside} beside it"
        report: dict[str, Any] = {"privacy_delta": self.delta}
        for rounds, name in ((1, "_round"), (run.rounds, "")):
            for part, noise in noises.items():
                epsilon = gaussian_epsilon(noise, rounds, self.delta) if safe else math.inf
                report[f"privacy_epsilon{part}{name}"] = epsilon
        report["privacy_covers"] = covers if safe else "nothing: no noise, or no bound"
        return report


def classifier_gap(
    module: Module,
    means: Tensors,
    temperature: float,
    lam: float,
) -> Tensor:
    """lam (1/C) sum_j ||softmax(G(H_j)/T) - Q_j|| over known classes, shape () (FedHKD, Eq. 11).

    G is the classifier.
    """
    G = module.head
    H = means["features"].to(module.features.dtype)
    # a call of G would count as the batch's features
    scores = linear(H, G.weight, G.bias)
    soft = (wide(scores)[:, : module.num_classes] / temperature).softmax(1)
    gaps = norms(soft - means["predictions"]) * means["known"]
    return lam * gaps.sum() / module.num_classes


def noisy(
    features: Tensor,
    counts: Tensor,
    sigma: float,
    zeta: float,
    draws: torch.Generator,
) -> Tensor:
    """Mean `features` (C, d) with Gaussian noise of sigma times the class's sensitivity 2 zeta / N
    on each number."""
    scale = 2 * zeta * sigma / counts.clamp_min(1)
    noise = torch.randn(features.shape, generator=draws, dtype=features.dtype)
    return features + scale[:, None] * noise


def noise_multiplier(sigma: float, width: int, bound: Literal["norm", "coordinate"]) -> float:
    """The noise on a class's mean feature over its L2 sensitivity, when one of the class's N
    samples is replaced.

    Noise has the standard deviation sigma 2 zeta / N on each of the `width` coordinates. The mean
    moves by at most 2 zeta / N where norms are bounded by zeta, by 2 zeta sqrt(width) / N where
    coordinates are. A sample is in one class only, so classes do not add up.
    """
    return sigma if bound == "norm" else sigma / math.sqrt(width)


def gaussian_epsilon(sigma: float, rounds: int, delta: float) -> float:
    """Epsilon at `delta` of the Gaussian mechanism with noise multiplier `sigma`, composed `rounds`
    times.

    The composition is the Gaussian mechanism with sigma / sqrt(rounds), whose epsilon is known in
    closed form.
    """
    from dp_accounting import get_epsilon_gaussian

    return float(get_epsilon_gaussian(sigma / math.sqrt(rounds), delta))
