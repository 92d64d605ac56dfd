"""The metrics that judge a run: names in columns and keys, which way is better, and how they and
the loss are computed.

Nothing here imports torch before it computes: run folders are read without it.
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
"""Kinds of model that are scored, in words: declared here alone."""


@dataclass(frozen=True)
class Metric:
    """A score of a client's model: a mean over samples."""

    name: str
    words: str
    rises: bool
    """Whether greater is better. Metrics that rise are shares, and `shown` in percent."""

    @property
    def mean_words(self) -> str:
        """The mean over clients, in words: `mean accuracy`."""
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
        """Return `value`, or its negative where lower is better."""
        return value if self.rises else -value

    def gain(self, score: float, alone: float) -> float:
        """Return the relative improvement of `score` on `alone`, positive where it is better
        (FEDORA's R-Acc and R-MAE)."""
        return self.merit(score - alone) / alone

    def shown(self, value: float) -> str:
        """Return `value` for readers: accuracies in percent, errors in the target's unit."""
        return f"{100 * value:.2f} %" if self.rises else f"{value:.4g}"

    def total(self, output: Tensor, y: Tensor, num_classes: int) -> Tensor:
        """Return the sum over the samples of a batch, shape (); divided by their number it is the
        metric.

        Args:
            output: of the model, (b, num_classes), or (b, 1) for regression.
            y: class numbers int64 (b,), or targets float32 (b,). Of texts: `Accuracy`.
            num_classes: of the task; 1 for regression.
        """
        raise NotImplementedError

    def totals(
        self, outputs: Sequence[Tensor], ys: Sequence[Tensor], num_classes: int
    ) -> list[Tensor]:
        """`total` of each of several batches."""
        return [self.total(output, y, num_classes) for output, y in zip(outputs, ys, strict=True)]

    def loss(self, output: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """Return the local loss, `reduction` as in torch; other arguments as in `total`."""
        raise NotImplementedError


NO_TARGET = -100
"""The target of a position that has none: torch's."""


class Accuracy(Metric):
    """Share of right answers; local loss cross-entropy.

    Where every position of a sample has a target, (b, T), and scores are (b, T, classes), a
    sample's loss and its share of right answers are means over its positions that have one.
    """

    def total(self, output: Tensor, y: Tensor, num_classes: int) -> Tensor:
        """Number of right answers, or the sum of samples' shares."""
        if output.ndim > 2:
            has_target = y != NO_TARGET
            right = (output.argmax(-1) == y) & has_target
            return (right.sum(1) / has_target.sum(1).clamp(min=1)).sum()
        return (output.argmax(1) == y).sum()

    def totals(
        self, outputs: Sequence[Tensor], ys: Sequence[Tensor], num_classes: int
    ) -> list[Tensor]:
        """`total` of each of several batches: right answers are whole numbers, counted all at
        once."""
        if outputs[0].ndim > 2:
            return super().totals(outputs, ys, num_classes)
        import torch

        right = torch.cat(list(outputs)).argmax(1) == torch.cat(list(ys))
        return [part.sum() for part in right.split([len(y) for y in ys])]

    def loss(self, output: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy."""
        from torch.nn.functional import cross_entropy

        if output.ndim > 2:
            losses = cross_entropy(output.flatten(0, 1), y.flatten(), reduction="none").view_as(y)
            losses = losses.sum(1) / (y != NO_TARGET).sum(1).clamp(min=1)
            if reduction == "none":
                return losses
            return losses.sum() if reduction == "sum" else losses.mean()
        return cross_entropy(output, y, reduction=reduction)


class AbsoluteError(Metric):
    """Mean absolute error in the target's own unit; local loss mean squared error (FEDORA's
    regression)."""

    def total(self, output: Tensor, y: Tensor, num_classes: int) -> Tensor:
        """Sum of absolute errors."""
        from torchmetrics.functional.regression import mean_absolute_error

        return mean_absolute_error(output[:, 0].to(y.dtype), y) * len(y)

    def loss(self, output: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """Squared error."""
        from torch.nn.functional import mse_loss

        return mse_loss(output[:, 0], y.to(output.dtype), reduction=reduction)


class Further(Metric):
    """A metric of a client's class scores on all of its test data at once, beside accuracy.

    A subclass is all that a further metric takes: `evaluation.metrics` may name it, and tables and
    pages have it. `total` and `loss` do not apply.
    """

    one_class = False
    """Whether the metric is defined where all samples are of one class: a model that always
    predicts that class would be perfect."""

    def value(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return the metric, shape (), in 0..1; NaN where it is not defined.

        Args:
            scores: (n, classes), whose softmax is the model's probabilities.
            y: class numbers int64 (n,).
        """
        if not self.one_class and bool((y == y[0]).all()):
            return scores.new_full((), float("nan"))
        return self.of_samples(scores, y)

    def of_samples(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return the metric where it is defined; arguments as in `value`."""
        raise NotImplementedError


PREDICTED = Metric("predicted_classes", "the predicted class of each sample", True)
"""The predicted classes, kept beside accuracy, which does not show whether a model gives every
sample the same answer."""
ONE_CLASS = "largest_class_share"
"""The column of `final.csv` for clients whose model predicts one class of the several in their test
part."""


MOST_NAMED = 10
"""Clients that a line names, at most."""
SHOWS_ONE_CLASS = ("balanced_accuracy", "auroc")
"""Further metrics by which a model that predicts one class is no better than guessing."""


def one_class_words(
    shares: Mapping[str, float],
    clients: int,
    metrics: Iterable[str] = (),
) -> str:
    """Name the clients whose final model predicts one class, and the metric to take.

    Args:
        shares: of the largest class in the test samples of each such client, by client name.
        clients: their number in the run.
        metrics: further metrics of the run.
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
    """Return the share of right answers among the samples of each class, float64 (classes,); NaN
    for a class without samples."""
    from torchmetrics.functional.classification import multiclass_stat_scores

    counts = multiclass_stat_scores(scores, y, scores.shape[1], average="none", validate_args=False)
    return counts[:, 0].double() / counts[:, 4]  # true positives, support


def by_shares(recall: Tensor, counts: Tensor) -> Tensor:
    """Return the accuracy, shape (), on data with `counts` (classes,) samples of each class; NaN
    where such a class has no recall."""
    counted = counts > 0
    return (recall[counted] * counts[counted]).sum() / counts[counted].sum()


@dataclass(frozen=True)
class BalancedAccuracy(Further):
    """Mean recall of the classes that there are, as scikit-learn's (torchmetrics' own takes in
    predicted ones)."""

    name: str = "balanced_accuracy"
    words: str = "balanced accuracy"
    rises: bool = True

    def of_samples(self, scores: Tensor, y: Tensor) -> Tensor:
        """Mean of `recalls`."""
        return recalls(scores, y).nanmean()


@dataclass(frozen=True)
class MacroF1(Further):
    """Mean over the classes that are there or predicted."""

    name: str = "f1"
    words: str = "macro F1"
    rises: bool = True

    def of_samples(self, scores: Tensor, y: Tensor) -> Tensor:
        """By torchmetrics."""
        from torchmetrics.functional.classification import multiclass_f1_score

        return multiclass_f1_score(scores, y, scores.shape[1], average="macro", validate_args=False)


@dataclass(frozen=True)
class Auroc(Further):
    """One against the rest, mean over the classes that some samples have and some have not."""

    name: str = "auroc"
    words: str = "AUROC, one against the rest"
    rises: bool = True

    def of_samples(self, scores: Tensor, y: Tensor) -> Tensor:
        """By torchmetrics, as of several labels."""
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
        """By torchmetrics."""
        from torchmetrics.functional.classification import multiclass_calibration_error

        return multiclass_calibration_error(
            scores.softmax(1), y, scores.shape[1], n_bins=15, validate_args=False
        )


@dataclass(frozen=True)
class ClassShareAccuracy(Further):
    """Accuracy by the client's class shares (`by_shares`), on the test set of all clients."""

    name: str = "class_share_accuracy"
    words: str = "accuracy by the client's class shares"
    rises: bool = True


_further: list[Further] = [kind() for kind in Further.__subclasses__()]  # type: ignore[call-arg]
FURTHER = {metric.name: metric for metric in _further}
"""Metrics that `evaluation.metrics` may name, beside accuracy."""
CLASS_SHARE = FURTHER[ClassShareAccuracy.name]

ACCURACY = Accuracy("accuracy", "accuracy", True)
MAE = AbsoluteError("mae", "mean absolute error", False)
BY_TASK: dict[Task, Metric] = {"classification": ACCURACY, "regression": MAE}


def of_rows(rows: Iterable[Mapping[str, object]]) -> Metric:
    """Return the metric that judges the run with these rows of `metrics.csv`."""
    names = {name for row in rows for name in row}
    for metric in FURTHER.values():
        if metric.of("worst") in names:  # only the chosen one has it
            return metric
    return MAE if MAE.of("mean") in names else ACCURACY


JudgeMetric = Literal["accuracy", "balanced_accuracy", "f1", "auroc"]
"""Metrics that may judge a classification."""

if TYPE_CHECKING:
    FurtherName = str
    ModelKind = str
    JudgeKind = str
else:
    FurtherName = Literal[*FURTHER]
    ModelKind = Literal[*MODELS]
    JudgeKind = Literal["auto", *(kind for kind in MODELS if kind != "distilled")]
    """A judge scores what clients are left with, which no distillation before training is."""
