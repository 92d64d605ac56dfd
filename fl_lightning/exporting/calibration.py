"""What is fitted to a client's validation data for its exported model: a temperature, and a
threshold between two classes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fl_lightning.foundation.errors import check

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

WIDEST = 4.0
"""Temperatures lie between exp(-WIDEST) and exp(WIDEST). Ours: beyond it all rows are certain, or
all alike."""


@dataclass(frozen=True)
class CalibrationRule:
    """What is asked for."""

    temperature: bool = False
    threshold: Literal["youden", "cost"] | None = None
    cost: float | None = None
    """Of a missed case in false alarms, for the rule `cost`."""
    case: str | None = None
    """The class that is a case, for the rule `cost`; Youden's is the same for both."""

    def __post_init__(self) -> None:
        is_cost = self.threshold == "cost"
        for key, value in (("cost", self.cost), ("case", self.case)):
            requirement = "threshold cost needs cost and case, and no other rule has a use for them"
            check(key, value, is_cost == (value is not None), requirement)

    @property
    def is_wanted(self) -> bool:
        """Whether anything is to be fitted."""
        return self.temperature or self.threshold is not None

    def fitted(
        self, scores: Tensor, labels: Tensor, class_names: list[str], whose: str
    ) -> dict[str, Any]:
        """The temperature and the threshold, as `plain` reads them.

        Args:
            scores: of validation data (n, classes), without temperature.
            labels: class numbers (n,).
            class_names: of the classes.
            whose: the client in words.

        Raises:
            BadInput: there are no such data, of one class alone, or not of two classes.
        """
        key = "temperature" if self.temperature else "threshold"
        value = self.threshold or True
        requirement = f"{whose} has no validation data in this run: train with data.validation 0.2"
        check(key, value, len(labels) > 0, requirement)
        count = len(class_names)
        scores = scores[:, :count].double()
        calibration: dict[str, Any] = {}
        if self.temperature:
            calibration["temperature"] = best_temperature(scores, labels)
            scores = scores / calibration["temperature"]
        if self.threshold is None:
            return calibration
        check("threshold", value, count == 2, f"it needs two classes, not {count}")
        case = class_names[1] if self.case is None else self.case
        requirement = f"the classes are {' and '.join(class_names)}"
        check("case", case, case in class_names, requirement)
        number = class_names.index(case)
        is_case = labels.numpy() == number
        requirement = f"the validation data of {whose} have one class alone"
        check("threshold", value, 0 < is_case.sum() < len(is_case), requirement)
        chances = scores.softmax(1)[:, number].numpy()
        calibration["threshold"] = [case, best_threshold(chances, is_case, self.cost)]
        return calibration


NONE = CalibrationRule()


def best_temperature(scores: Tensor, labels: Tensor) -> float:
    """The temperature that makes the labels most likely (Guo et al., ICML 2017)."""
    from scipy.optimize import minimize_scalar
    from torch.nn.functional import cross_entropy

    def loss(logarithm: float) -> float:
        return cross_entropy(scores / math.exp(logarithm), labels).item()

    best = minimize_scalar(loss, bounds=(-WIDEST, WIDEST), method="bounded")
    return math.exp(best.x)


def best_threshold(chances: np.ndarray, is_case: np.ndarray, cost: float | None) -> float:
    """The probability from which on a row is called a case: by Youden's J, sensitivity +
    specificity - 1, or so that missed cases, each of so many false alarms, cost least."""
    from sklearn.metrics import roc_curve

    false_alarms, hits, thresholds = roc_curve(is_case, chances, drop_intermediate=False)
    weight = 1.0 if cost is None else cost * is_case.sum() / (~is_case).sum()
    best = int((weight * hits - false_alarms).argmax())
    return float(min(thresholds[best], 2.0))  # above 1: nothing is called a case
