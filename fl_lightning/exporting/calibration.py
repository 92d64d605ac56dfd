"""Calibration of an exported model on the client's validation data: a temperature, and a threshold
between two classes."""

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
    """Settings of the calibration that `fl-train export` fits.

    Args:
        temperature: whether a temperature is fitted.
        threshold: the rule for the threshold between two classes: Youden's J, or the least `cost`;
            None: no threshold.
        cost: number of false alarms that a missed case is worth, for the rule `cost`.
        case: the class that is a case, for the rule `cost`; Youden's threshold is the same for
            both.
    """

    temperature: bool = False
    threshold: Literal["youden", "cost"] | None = None
    cost: float | None = None
    case: str | None = None

    def __post_init__(self) -> None:
        is_cost = self.threshold == "cost"
        for key, value in (("cost", self.cost), ("case", self.case)):
            requirement = "give cost and case with threshold cost, and only then"
            check(key, value, is_cost == (value is not None), requirement)

    @property
    def is_wanted(self) -> bool:
        """Whether a temperature or a threshold is to be fitted."""
        return self.temperature or self.threshold is not None

    def fitted(
        self, scores: Tensor, labels: Tensor, class_names: list[str], whose: str
    ) -> dict[str, Any]:
        """Return the fitted temperature and threshold, as `plain` reads them.

        Args:
            scores: class scores of validation data, (n, classes), without temperature.
            labels: class numbers (n,).
            class_names: names of the classes.
            whose: the client, as it is named in errors.

        Raises:
            BadInput: there are no validation data, they have only one class, or the model has not
                two classes.
        """
        key = "temperature" if self.temperature else "threshold"
        value = self.threshold or True
        requirement = f"{whose} has no validation data in this run; train with data.validation 0.2"
        check(key, value, len(labels) > 0, requirement)
        count = len(class_names)
        scores = scores[:, :count].double()
        calibration: dict[str, Any] = {}
        if self.temperature:
            calibration["temperature"] = best_temperature(scores, labels)
            scores = scores / calibration["temperature"]
        if self.threshold is None:
            return calibration
        requirement = f"it needs two classes, and the model has {count}; leave it out"
        check("threshold", value, count == 2, requirement)
        case = class_names[1] if self.case is None else self.case
        requirement = f"it must be one of the classes {' and '.join(class_names)}"
        check("case", case, case in class_names, requirement)
        number = class_names.index(case)
        is_case = labels.numpy() == number
        requirement = f"the validation data of {whose} have only one class; leave it out"
        check("threshold", value, 0 < is_case.sum() < len(is_case), requirement)
        chances = scores.softmax(1)[:, number].numpy()
        calibration["threshold"] = [case, best_threshold(chances, is_case, self.cost)]
        return calibration


NONE = CalibrationRule()


def best_temperature(scores: Tensor, labels: Tensor) -> float:
    """Return the temperature that makes the labels most likely (Guo et al., ICML 2017)."""
    from scipy.optimize import minimize_scalar
    from torch.nn.functional import cross_entropy

    def loss(logarithm: float) -> float:
        return cross_entropy(scores / math.exp(logarithm), labels).item()

    best = minimize_scalar(loss, bounds=(-WIDEST, WIDEST), method="bounded")
    return math.exp(best.x)


def best_threshold(chances: np.ndarray, is_case: np.ndarray, cost: float | None) -> float:
    """Return the least probability with which a row is called a case.

    Args:
        chances: predicted probability of a case for each row (n,).
        is_case: whether each row is a case (n,).
        cost: number of false alarms that a missed case is worth, whose total is minimised; None:
            maximise Youden's J, sensitivity + specificity - 1.
    """
    from sklearn.metrics import roc_curve

    false_alarms, hits, thresholds = roc_curve(is_case, chances, drop_intermediate=False)
    weight = 1.0 if cost is None else cost * is_case.sum() / (~is_case).sum()
    best = int((weight * hits - false_alarms).argmax())
    return float(min(thresholds[best], 2.0))  # above 1: no row is called a case
