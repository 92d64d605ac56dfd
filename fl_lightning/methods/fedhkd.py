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
    """FedAvg whose clients also exchange, for each class, a noisy mean feature and a mean soft
    prediction.

    The local loss adds lam (1/C) sum_j ||softmax(G(H_j)/T) - Q_j|| over the known classes and gamma
    (1/B) sum_k ||R(x_k) - H_y(k)||, with features R, classifier G, and global means H and Q.
    FedHKD* is gamma = 0. Class means are weighted by samples of the class, N_i^j / N^j over the
    clients that uploaded the class; models are weighted by all samples.

    Args:
        lam: weight of the classifier's term. 0.05: paper.
        gamma: weight of the features' term. 0.05: paper; 0 is FedHKD*.
        temperature: T of soft predictions. 0.5: paper.
        nu: least share of a client's samples that a class must have for its means to be uploaded.
            0.25: paper, whose results on CIFAR-100 cannot come from this value
            (docs/results/class-knowledge.md).
        sigma: standard deviation of the noise on a class's mean feature, in units of its
            sensitivity 2 zeta / N, with N samples of the class. 7: paper. 0: no noise.
        zeta: bound on a sample's features, as `bound` says. 3: paper.
        clip: whether features are clipped to zeta before they are averaged. Our addition: without
            it nothing guarantees the bound.
        bound: quantity that zeta bounds: the `norm` of a sample's feature vector, or each
            `coordinate` of it (paper, Lemma 1 and section 4.3). norm: our choice, since epsilon
            then holds for the whole vector. With `coordinate` it holds for a single coordinate; for
            all d together the noise is sqrt(d) times smaller in units of the sensitivity
            (docs/decisions/0014).
        delta: the delta at which the privacy report gives epsilon. 1e-5: our choice, below one over
            the number of samples of any client.
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
        """Raise `BadInput` if noise is added and the package for privacy accounting is not
        installed."""
        if self.sigma and self.clip:
            require("dp", "method.sigma", self.sigma, "0 adds no noise and needs no accounting")

    @property
    def uses_means(self) -> bool:
        """Whether `lam` or `gamma` is above 0."""
        return self.lam > 0 or self.gamma > 0

    def loss(
        self,
        means: Tensors,
        module: Module,
        batch: Batch,
    ) -> Tensor:
        """Return the task loss plus both terms (Eq. 11), shape ()."""
        task = module.task_loss(batch)
        terms = []
        if self.lam:
            terms.append(self._classifier_gap(module, means))
        if self.gamma:
            distance = distance_to_means(module.features, batch[1], means, "norm")
            terms.append(self.gamma * distance)
        return task + sum(terms)

    def _classifier_gap(self, module: Module, means: Tensors) -> Tensor:
        """Return lam (1/C) sum_j ||softmax(G(H_j)/T) - Q_j|| over known classes, shape ()."""
        G = module.head
        H = means["features"].to(module.features.dtype)
        # a call of G would replace the recorded features of the batch
        scores = linear(H, G.weight, G.bias)
        soft = (wide(scores)[:, : module.num_classes] / self.temperature).softmax(1)
        gaps = norms(soft - means["predictions"]) * means["known"]
        return self.lam * gaps.sum() / module.num_classes

    def means(self, client: Client) -> Tensors:
        """Return the client's class means, with noise on features; classes with less than the share
        `nu` of its data have counts 0."""
        means = class_means(client, self.temperature, self.within_zeta)
        features = means["features"]
        counts = means["counts"]
        if self.sigma:
            draws = client.generator("hyper-knowledge noise")
            features = noisy(features, counts, self.sigma, self.zeta, draws)
        is_frequent = counts >= self.nu * counts.sum()
        return means | {"features": features, "counts": counts * is_frequent}

    def within_zeta(self, features: Tensor) -> Tensor:
        """Clip features of single samples (batch, d) to the bound zeta, on which the sensitivity 2
        zeta / N relies."""
        if not (self.sigma and self.clip):
            return features
        if self.bound == "coordinate":
            return features.clamp(-self.zeta, self.zeta)
        norm: Tensor = features.norm(dim=1, keepdim=True)
        return features * (self.zeta / norm.clamp_min(1e-12)).clamp_max(1.0)

    def summary(self, run: RunContext) -> dict[str, Any]:
        """Return the privacy report: epsilon at `privacy_delta`, for one round (`..._round`) and
        for the run.

        `privacy_epsilon` covers a class's whole mean feature. With `bound: coordinate`,
        `privacy_epsilon_coordinate` covers one of its coordinates and ignores the others (the
        paper's count). `privacy_covers` states this in words, and names the uploads without
        protection. Without noise or clipping, epsilon is infinite. The report is empty if a
        callback, such as `localprivacy`, gives an epsilon for all that clients upload.
        """
        if any(getattr(callback, "accounts", False) for callback in run.callbacks):
            return {}
        width = run.feature_width
        is_bounded = self.sigma > 0 and self.clip
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
                epsilon = gaussian_epsilon(noise, rounds, self.delta) if is_bounded else math.inf
                report[f"privacy_epsilon{part}{name}"] = epsilon
        report["privacy_covers"] = covers if is_bounded else "nothing: no noise, or no bound"
        return report


def noisy(
    features: Tensor,
    counts: Tensor,
    sigma: float,
    zeta: float,
    draws: torch.Generator,
) -> Tensor:
    """Add Gaussian noise to class means; its standard deviation is sigma times the class's
    sensitivity 2 zeta / N.

    Args:
        features: class means (C, d).
        counts: N of each class, (C,).
        sigma: see `FedHKD`.
        zeta: see `FedHKD`.
        draws: random generator of the noise.
    """
    scale = 2 * zeta * sigma / counts.clamp_min(1)
    noise = torch.randn(features.shape, generator=draws, dtype=features.dtype)
    return features + scale[:, None] * noise


def noise_multiplier(sigma: float, width: int, bound: Literal["norm", "coordinate"]) -> float:
    """Return the noise multiplier of a class's mean feature: the noise's standard deviation divided
    by the L2 sensitivity, the greatest change of the mean if one of the class's N samples is
    replaced.

    The standard deviation is sigma 2 zeta / N on each of the `width` coordinates. The sensitivity
    is 2 zeta / N if zeta bounds norms, and 2 zeta sqrt(width) / N if it bounds coordinates. A
    sample belongs to one class only, so classes do not add up.
    """
    return sigma if bound == "norm" else sigma / math.sqrt(width)


def gaussian_epsilon(sigma: float, rounds: int, delta: float) -> float:
    """Return epsilon at `delta` of the Gaussian mechanism with noise multiplier `sigma`, composed
    `rounds` times.

    The composition is the Gaussian mechanism with sigma / sqrt(rounds), whose epsilon has a closed
    form.
    """
    from dp_accounting import get_epsilon_gaussian

    return float(get_epsilon_gaussian(sigma / math.sqrt(rounds), delta))
