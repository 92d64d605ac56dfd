"""FedHKD: Chen, Wang, Vikalo: The Best of Both Worlds: Accurate Global and Personalized Models
through Federated Learning with Data-Free Hyper-Knowledge Distillation. ICLR 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch import Tensor

from fl_lightning.configuration.ranges import NonNegativeFloat, PositiveFloat, Range, UnitInterval
from fl_lightning.configuration.search import LogRange, searched
from fl_lightning.core import Batch, Client, Module, RunContext, Tensors
from fl_lightning.foundation.extras import require
from fl_lightning.methods.classmeans import ClassMeans
from fl_lightning.methods.common import class_means


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
        """And the privacy accounting is installed, before the first round."""
        super().check(run)
        if self.sigma and self.clip:
            require("dp", "method.sigma", self.sigma, "0 adds no noise and needs no accounting")

    @property
    def adds(self) -> bool:
        """Either term."""
        return self.lam > 0 or self.gamma > 0

    def loss(self, means: Tensors, module: Module, batch: Batch) -> Tensor:
        """And both terms (its Eq. 11)."""
        task: Tensor = module.task_loss(batch)
        terms = (
            [class_means.classifier_gap(module, means, self.temperature, self.lam)]
            if self.lam
            else []
        )
        if self.gamma:
            terms.append(
                self.gamma * class_means.distance_to_means(module.features, batch[1], means, "norm")
            )
        return task + sum(terms)

    def means(self, client: Client) -> tuple[Tensor, Tensor, Tensor]:
        """Of the classes that make up at least `nu` of the client's data, with noise on
        features."""
        features, predictions, counts = class_means.class_means(
            client, self.temperature, self.bounded
        )
        if self.sigma:
            draws = client.generator("hyper-knowledge noise")
            features = class_means.noisy(features, counts, self.sigma, self.zeta, draws)
        return features, predictions, counts * (counts >= self.nu * counts.sum())

    def bounded(self, features: Tensor) -> Tensor:
        """Features of samples (batch, d) brought within zeta: without that the sensitivity is not 2
        zeta / N."""
        return (
            class_means.within(features, self.zeta, self.bound)
            if self.sigma and self.clip
            else features
        )

    def summary(self, run: RunContext) -> dict[str, Any]:
        """The privacy report."""
        safe = self.sigma > 0 and self.clip
        return class_means.privacy_report(run, self.sigma, self.bound, self.delta, safe=safe)
