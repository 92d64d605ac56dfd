"""Plain models that a silo can fit to its own samples: penalised linear regression and boosting."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from sklearn.dummy import DummyClassifier
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fl_lightning.lab.worth import BOOSTING, LINEAR
from fl_lightning.lab.worth.statistics import Array

MOST_FEATURES = 500
"""Features of a sample above which no plain model is fitted, to save time (ours)."""
ALPHAS = np.logspace(-2, 4, 13)
"""Penalties among which ridge regression chooses."""
STRENGTHS = np.logspace(-3, 1, 6)
"""Inverse penalties among which logistic regression chooses."""
INNER = 5
"""Folds of the inner cross-validation that chooses the penalty."""


def linear(x: Array, y: Array, units: Array) -> Any:
    """Fit a ridge or logistic regression, with its penalty chosen by inner cross-validation; return
    scikit-learn's fitted model.

    Args:
        x: (n, features).
        y: (n,) class numbers, or float targets.
        units: (n,) number of each sample's group (such as a person); a group is in one inner fold.
    """
    groups = len(np.unique(units))
    is_regression = y.dtype.kind == "f"
    if not is_regression and len(np.unique(y)) == 1:
        return DummyClassifier().fit(x, y)
    parts = GroupKFold(min(INNER, groups)).split(x, y, units) if groups > 1 else []
    splits = [part for part in parts if len(np.unique(y[part[0]])) > 1]
    if is_regression:
        # None: leave-one-out at the cost of one fit
        inner = splits if 1 < groups < len(y) else None
        return make_pipeline(StandardScaler(), RidgeCV(ALPHAS, cv=inner)).fit(x, y)
    losses = np.zeros(len(STRENGTHS))
    for train, test in splits:
        # each fit starts from the one before
        model = _logistic(warm_start=True)
        for k, strength in enumerate(STRENGTHS):
            model.set_params(logisticregression__C=strength).fit(x[train], y[train])
            probabilities = _probabilities(model, x[test], int(y.max()) + 1)
            losses[k] -= np.log(probabilities[range(len(test)), y[test]]).sum()
    best = STRENGTHS[losses.argmin()] if splits else 1.0
    return _logistic(C=best).fit(x, y)


def _logistic(**arguments: Any) -> Any:
    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=300, **arguments))


def boosting(x: Array, y: Array, units: Array) -> Any:
    """Fit gradient boosting with small trees; `units` is not used, but every fitter takes it."""
    size: Any = {
        "max_iter": 60,
        "max_leaf_nodes": 8,
        "min_samples_leaf": max(2, min(20, len(y) // 10)),
        "random_state": 0,
    }
    if y.dtype.kind == "f":
        return HistGradientBoostingRegressor(**size).fit(x, y)
    if len(np.unique(y)) == 1:
        return DummyClassifier().fit(x, y)
    return HistGradientBoostingClassifier(**size).fit(x, y)


FITTERS = {LINEAR: linear, BOOSTING: boosting}


def _probabilities(model: Any, x: Array, classes: int) -> Array:
    """Probabilities (n, classes), at least a float's epsilon: a class may lack training samples."""
    probabilities = np.zeros((len(x), classes))
    probabilities[:, model.classes_] = model.predict_proba(x)
    return probabilities.clip(np.finfo(float).eps)


def fit_and_predict(
    kind: str,
    train: tuple[Array, Array],
    test: Array,
    units: Array,
    classes: int,
) -> Array:
    """Fit a plain model, and predict the samples `test`.

    Args:
        kind: name of the model in `FITTERS`.
        train: training samples (n, features) and labels or targets (n,).
        test: samples (m, features).
        units: (n,) number of each training sample's group.
        classes: number of classes; 1 for a regression.

    Returns:
        Log probabilities (m, classes), or predicted targets (m, 1); zeros without training samples.
    """
    if not len(train[1]):
        return np.zeros((len(test), classes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FITTERS[kind](*train, units)
        if hasattr(model, "predict_proba"):
            return np.log(_probabilities(model, test, classes))
        targets: Array = model.predict(test)
        return targets[:, None]
