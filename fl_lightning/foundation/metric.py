"""The metrics by which a run can be judged: their names in columns and keys, whether greater is
better, and how they and the loss are computed.

Torch is imported only to compute, so run folders can be read without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Task = Literal["classification", "regression"]

MODELS = {
    "before": "before local training",
    "distilled": "after distillation, before local training",
    "after": "after local training",
    "global": "global model",
    "finetuned": "after fine-tuning",
}
"""Kinds of model that are scored, with their description. The only list of them."""


@dataclass(frozen=True)
class Metric:
    """A score of a client's model, which is a mean over samples."""

    name: str
    """Name in columns and keys."""
    words: str
    """Name for readers."""
    rises: bool
    """Whether greater is better. Such metrics are shares, and `shown` in percent."""

    @property
    def mean_words(self) -> str:
        """Name of the mean over clients for readers: `mean accuracy`."""
        return self.words if self.words.startswith("mean ") else f"mean {self.words}"

    def of(self, statistic: str) -> str:
        """Return the column of a statistic over clients: `of("mean")` is `mean_accuracy`."""
        return f"{statistic}_{self.name}"

    def by(self, kind: str) -> str:
        """Return the column of a kind of model or data: `by("before")` is `accuracy_before`."""
        return f"{self.name}_{kind}"

    def on_global_test(self, kind: str) -> str:
        """Return the column of a kind of model on the test set of all clients:
        `global_test_accuracy_global`."""
        return f"global_test_{self.by(kind)}"

    def merit(self, value: float) -> float:
        """Return `value`, negated if lower is better: greater merit is always better."""
        return value if self.rises else -value

    def gain(self, score: float, alone: float) -> float:
        """Return the relative improvement of `score` over `alone`, the score of training alone;
        positive if it is better (FEDORA's R-Acc and R-MAE)."""
        return self.merit(score - alone) / alone

    def shown(self, value: float) -> str:
        """Return `value` as text for readers: shares in percent, errors in the target's unit."""
        return f"{100 * value:.2f} %" if self.rises else f"{value:.4g}"

    def total(self, output: Tensor, y: Tensor, num_classes: int) -> Tensor:
        """Return the sum of the samples' scores in a batch, shape (); divided by the number of
        samples it is the metric.

        Args:
            output: the model's output, (b, num_classes); (b, T, num_classes) for texts with a
                target at each of T positions; (b, 1) for regression.
            y: class numbers int64, (b,) or for such texts (b, T); targets float32 (b,) for
                regression.
            num_classes: number of the task's classes; 1 for regression.
        """
        raise NotImplementedError

    def totals(
        self, outputs: Sequence[Tensor], ys: Sequence[Tensor], num_classes: int
    ) -> list[Tensor]:
        """Return `total` of each of several batches."""
        return [self.total(output, y, num_classes) for output, y in zip(outputs, ys, strict=True)]

    def loss(self, output: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """Return the local training loss. `reduction` is torch's; other arguments as in `total`."""
        raise NotImplementedError


NO_TARGET = -100
"""Target of a position that has none; torch's value."""


class Accuracy(Metric):
    """Share of right predictions; the local loss is cross-entropy.

    In texts with a target at each position, targets are (b, T) and outputs (b, T, classes). A
    sample's loss and its share of right predictions are then means over the positions with a
    target.
    """

    def total(self, output: Tensor, y: Tensor, num_classes: int) -> Tensor:
        """Return the number of right predictions, or the sum of the samples' shares."""
        if output.ndim > 2:
            has_target = y != NO_TARGET
            right = (output.argmax(-1) == y) & has_target
            return (right.sum(1) / has_target.sum(1).clamp(min=1)).sum()
        return (output.argmax(1) == y).sum()

    def totals(
        self, outputs: Sequence[Tensor], ys: Sequence[Tensor], num_classes: int
    ) -> list[Tensor]:
        """Return `total` of each of several batches, computed in one pass: counts are whole
        numbers, so the result is the same."""
        if outputs[0].ndim > 2:
            return super().totals(outputs, ys, num_classes)
        import torch

        right = torch.cat(list(outputs)).argmax(1) == torch.cat(list(ys))
        return [part.sum() for part in right.split([len(y) for y in ys])]

    def loss(self, output: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """Return the cross-entropy."""
        from torch.nn.functional import cross_entropy

        if output.ndim > 2:
            losses = cross_entropy(output.flatten(0, 1), y.flatten(), reduction="none").view_as(y)
            losses = losses.sum(1) / (y != NO_TARGET).sum(1).clamp(min=1)
            if reduction == "none":
                return losses
            return losses.sum() if reduction == "sum" else losses.mean()
        return cross_entropy(output, y, reduction=reduction)


class AbsoluteError(Metric):
    """Mean absolute error in the target's unit; the local loss is the mean squared error (FEDORA's
    regression)."""

    def total(self, output: Tensor, y: Tensor, num_classes: int) -> Tensor:
        """Return the sum of absolute errors."""
        from torchmetrics.functional.regression import mean_absolute_error

        return mean_absolute_error(output[:, 0].to(y.dtype), y) * len(y)

    def loss(self, output: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """Return the squared error."""
        from torch.nn.functional import mse_loss

        return mse_loss(output[:, 0], y.to(output.dtype), reduction=reduction)


class Further(Metric):
    """Base class of the metrics besides accuracy (`evaluation.metrics`). They are no means over
    samples but are computed from all of a client's test data at once, so they have no `total` and
    no `loss`.

    To add a metric, write a subclass in this file: `evaluation.metrics` then accepts it, and tables
    and pages show it.
    """

    one_class = False
    """Whether the metric is defined if all samples have one class; false where a model that always
    predicts this class would be perfect."""

    def value(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return the metric, shape (), from 0 to 1; NaN if it is not defined.

        Args:
            scores: logits (n, classes).
            y: class numbers int64 (n,).
        """
        if not self.one_class and bool((y == y[0]).all()):
            return scores.new_full((), float("nan"))
        return self.of_samples(scores, y)

    def of_samples(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return the metric, shape (), from 0 to 1. Subclasses implement this method; `value` calls
        it only if the metric is defined for the given samples. Arguments as in `value`."""
        raise NotImplementedError


PREDICTED = Metric("predicted_classes", "the predicted class of each sample", True)
"""The predicted classes. They show whether a model predicts the same class for every sample, which
accuracy does not."""
ONE_CLASS = "largest_class_share"
"""Column of `final.csv`, set for clients whose model predicts one class though their test part has
several."""


MOST_NAMED = 10
"""Maximum number of clients that a line names."""
SHOWS_ONE_CLASS = ("balanced_accuracy", "auroc")
"""Metrics by which a model that always predicts one class is no better than guessing."""


def one_class_warning(
    shares: Mapping[str, float],
    clients: int,
    metrics: Iterable[str] = (),
) -> str:
    """Return a warning that names the clients whose final model predicts only one class and, unless
    the run has them, the metrics which show that.

    Args:
        shares: for each such client, by name, the share of the largest class in its test samples.
        clients: number of clients in the run.
        metrics: names of the run's metrics besides accuracy.
    """
    names = [
        f"{name} (largest class {100 * share:.1f} %)"
        for name, share in list(shares.items())[:MOST_NAMED]
    ]
    names += ["..."] if len(shares) > MOST_NAMED else []
    line = (
        f"{len(shares)} of {clients} final models predict one class for all of the client's test "
        f"samples: client {', '.join(names)}"
    )
    if set(SHOWS_ONE_CLASS) & set(metrics):
        return line
    advice = f"--evaluation.metrics [{','.join(SHOWS_ONE_CLASS)}] does"
    return f"{line}; accuracy does not show it, {advice}"


def recalls(scores: Tensor, y: Tensor) -> Tensor:
    """Return the recall of each class, float64 (classes,): the share of right predictions among its
    samples. NaN for a class without samples."""
    from torchmetrics.functional.classification import multiclass_stat_scores

    counts = multiclass_stat_scores(scores, y, scores.shape[1], average="none", validate_args=False)
    return counts[:, 0].double() / counts[:, 4]  # true positives, support


def reweighted_accuracy(recall: Tensor, counts: Tensor) -> Tensor:
    """Return the accuracy, shape (), that a model with these recalls (classes,) has on data with
    `counts` (classes,) samples by class; NaN if a class in `counts` has no recall."""
    counted = counts > 0
    return (recall[counted] * counts[counted]).sum() / counts[counted].sum()


@dataclass(frozen=True)
class BalancedAccuracy(Further):
    """Mean recall of the classes with samples, as in scikit-learn. (torchmetrics' includes classes
    that are only predicted.)"""

    name: str = "balanced_accuracy"
    words: str = "balanced accuracy"
    rises: bool = True

    def of_samples(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return the mean of `recalls`."""
        return recalls(scores, y).nanmean()


@dataclass(frozen=True)
class MacroF1(Further):
    """F1, averaged over the classes that have samples or are predicted."""

    name: str = "f1"
    words: str = "macro F1"
    rises: bool = True

    def of_samples(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return torchmetrics' value."""
        from torchmetrics.functional.classification import multiclass_f1_score

        return multiclass_f1_score(scores, y, scores.shape[1], average="macro", validate_args=False)


@dataclass(frozen=True)
class Auroc(Further):
    """AUROC of each class against the rest, averaged over the classes to which some, but not all
    samples belong."""

    name: str = "auroc"
    words: str = "AUROC, one against the rest"
    rises: bool = True

    def of_samples(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return torchmetrics' multilabel AUROC, with one label for each of these classes."""
        from torch.nn.functional import one_hot
        from torchmetrics.functional.classification import multilabel_auroc

        truth = one_hot(y, scores.shape[1])
        in_some = truth.any(0) & ~truth.all(0)
        probabilities = scores.softmax(1)[:, in_some]
        count = probabilities.shape[1]
        return multilabel_auroc(
            probabilities, truth[:, in_some], count, average="macro", validate_args=False
        )


@dataclass(frozen=True)
class Calibration(Further):
    """Expected calibration error in 15 bins of equal width (Guo et al., ICML 2017)."""

    name: str = "calibration"
    words: str = "expected calibration error"
    rises: bool = False
    one_class = True

    def of_samples(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return torchmetrics' value."""
        from torchmetrics.functional.classification import multiclass_calibration_error

        return multiclass_calibration_error(
            scores.softmax(1), y, scores.shape[1], n_bins=15, validate_args=False
        )


@dataclass(frozen=True)
class ClassShareAccuracy(Further):
    """Accuracy on the global test set, reweighted to the class shares of the client's own samples
    (`reweighted_accuracy`)."""

    name: str = "class_share_accuracy"
    words: str = "accuracy by the client's class shares"
    rises: bool = True


_further: list[Further] = [kind() for kind in Further.__subclasses__()]  # type: ignore[call-arg]
FURTHER = {metric.name: metric for metric in _further}
"""Metrics that `evaluation.metrics` accepts, by name."""
CLASS_SHARE = FURTHER[ClassShareAccuracy.name]

ACCURACY = Accuracy("accuracy", "accuracy", True)
MAE = AbsoluteError("mae", "mean absolute error", False)
BY_TASK: dict[Task, Metric] = {"classification": ACCURACY, "regression": MAE}


def of_rows(rows: Iterable[Mapping[str, object]]) -> Metric:
    """Return the metric by which a finished run was judged. It is recognised by the names of the
    columns. `rows`: the rows of the run's `metrics.csv`, as dicts by column."""
    names = {name for row in rows for name in row}
    for metric in FURTHER.values():
        if metric.of("worst") in names:  # only the judging metric has this column
            return metric
    return MAE if MAE.of("mean") in names else ACCURACY


JudgeMetric = Literal["accuracy", "balanced_accuracy", "f1", "auroc"]
"""Metrics by which a classification can be judged."""

if TYPE_CHECKING:
    FurtherName = str
    ModelKind = str
    JudgeKind = str
else:
    FurtherName = Literal[*FURTHER]
    ModelKind = Literal[*MODELS]
    JudgeKind = Literal["auto", *(kind for kind in MODELS if kind != "distilled")]
    """Kinds of model that can be the judge: those that a client is left with, so not
    `distilled`."""
