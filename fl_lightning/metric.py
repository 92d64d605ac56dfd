"""What a run is judged by: its name in every column and key, which way is better, and how it and the loss are computed.

Nothing here imports torch before it computes: run folders are read without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
"""The kinds of model that are judged, in words."""


@dataclass(frozen=True)
class Metric:
    """A mean over samples, of which each client has one."""

    name: str
    words: str
    rises: bool
    """Whether greater is better."""

    @property
    def mean_words(self) -> str:
        """The mean over clients, in words: `mean accuracy`."""
        return self.words if self.words.startswith("mean ") else f"mean {self.words}"

    def of(self, what: str) -> str:
        """A column or key of what became of the clients' scores: `mean_accuracy`."""
        return f"{what}_{self.name}"

    def by(self, kind: str) -> str:
        """A column of one kind of model or data: `accuracy_before`."""
        return f"{self.name}_{kind}"

    def on_global_test(self, kind: str) -> str:
        """A column of one kind of model on the test set of all: `global_test_accuracy_global`."""
        return f"global_test_{self.by(kind)}"

    def merit(self, value: float) -> float:
        """`value`, or its negative where lower is better: greater is better."""
        return value if self.rises else -value

    def gain(self, ours: float, alone: float) -> float:
        """Relative improvement of `ours` on `alone`, positive where ours is better (FEDORA's R-Acc and R-MAE)."""
        return self.merit(ours - alone) / alone

    def shown(self, value: float) -> str:
        """`value` for readers: accuracies in percent, errors in the target's unit."""
        return f"{100 * value:.2f} %" if self.rises else f"{value:.4g}"

    def total(self, output: Tensor, y: Tensor, num_classes: int) -> Tensor:
        """Sum over a batch, shape (): over samples it adds up, and divided by their number it is the metric.

        Args:
            output: of the model, (b, num_classes), or (b, 1) for regression.
            y: class numbers int64 (b,), or targets float32 (b,).
            num_classes: of the task; 1 for regression.
        """
        raise NotImplementedError

    def loss(self, output: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """What a client minimises, `reduction` as in torch; arguments as in `total`."""
        raise NotImplementedError


class Accuracy(Metric):
    """Share of right answers; local loss cross-entropy."""

    def total(self, output: Tensor, y: Tensor, num_classes: int) -> Tensor:
        """Number of right answers."""
        from torchmetrics.functional.classification import multiclass_stat_scores

        counts: Tensor = multiclass_stat_scores(
            output, y, num_classes=num_classes, average="micro", validate_args=False
        )
        return counts[0]  # true positives; a share would be rounded

    def loss(self, output: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(output, y, reduction=reduction)


class AbsoluteError(Metric):
    """Mean absolute error in the target's own unit; local loss mean squared error (FEDORA's regression)."""

    def total(self, output: Tensor, y: Tensor, num_classes: int) -> Tensor:
        """Sum of absolute errors."""
        from torchmetrics.functional.regression import mean_absolute_error

        return mean_absolute_error(output[:, 0].to(y.dtype), y) * len(y)

    def loss(self, output: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """Squared error."""
        from torch.nn.functional import mse_loss

        return mse_loss(output[:, 0], y.to(output.dtype), reduction=reduction)


ACCURACY = Accuracy("accuracy", "accuracy", True)
MAE = AbsoluteError("mae", "mean absolute error", False)
BY_TASK: dict[Task, Metric] = {"classification": ACCURACY, "regression": MAE}


def of_column(name: str) -> Metric:
    """The metric that a column speaks of (accuracy, where it speaks of none)."""
    return MAE if MAE.name in name.split("_") else ACCURACY


def of_rows(rows: Iterable[Mapping[str, object]]) -> Metric:
    """The metric by which the run with these rows of `metrics.csv` is judged."""
    return MAE if any(MAE.of("mean") in row for row in rows) else ACCURACY
