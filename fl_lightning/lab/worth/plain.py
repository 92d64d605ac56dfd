"""Models that every statistician would try on a silo's own rows: penalised linear ones, and
boosting."""

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
"""Numbers of a sample, above which no plain model is fitted: ours, for the sake of time."""
ALPHAS = np.logspace(-2, 4, 13)
"""Penalties that ridge chooses from."""
STRENGTHS = np.logspace(-3, 1, 6)
"""Inverse penalties that logistic regression chooses from."""
INNER = 5
"""Parts of the training samples that tell the penalty."""


def linear(x: Array, y: Array, units: Array) -> Any:
    """A ridge or logistic regression whose penalty is chosen inside these samples.

    Args:
        x: (n, features).
        y: (n,) class numbers, or float targets.
        units: (n,) what each sample is of: none is in two of the inner parts.
    """
    groups = len(np.unique(units))
    is_regression = y.dtype.kind == "f"
    if not is_regression and len(np.unique(y)) == 1:
        return DummyClassifier().fit(x, y)
    parts = GroupKFold(min(INNER, groups)).split(x, y, units) if groups > 1 else []
    splits = [part for part in parts if len(np.unique(y[part[0]])) > 1]
    if is_regression:
        # without units by leave-one-out, which costs one fit
        inner = splits if 1 < groups < len(y) else None
        return make_pipeline(StandardScaler(), RidgeCV(ALPHAS, cv=inner)).fit(x, y)
    losses = np.zeros(len(STRENGTHS))
    for train, test in splits:
        # each penalty begins with the model of the one before
        model = _logistic(warm_start=True)
        for place, strength in enumerate(STRENGTHS):
            model.set_params(logisticregression__C=strength).fit(x[train], y[train])
            chances = _chances(model, x[test], int(y.max()) + 1)
            losses[place] -= np.log(chances[range(len(test)), y[test]]).sum()
    best = STRENGTHS[losses.argmin()] if splits else 1.0
    return _logistic(C=best).fit(x, y)


def _logistic(**arguments: Any) -> Any:
    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=300, **arguments))


def boosting(x: Array, y: Array, units: Array) -> Any:
    """Gradient boosting with small trees."""
    leaf = max(2, min(20, len(y) // 10))
    size: Any = {"max_iter": 60, "max_leaf_nodes": 8, "min_samples_leaf": leaf, "random_state": 0}
    if y.dtype.kind == "f":
        return HistGradientBoostingRegressor(**size).fit(x, y)
    if len(np.unique(y)) == 1:
        return DummyClassifier().fit(x, y)
    return HistGradientBoostingClassifier(**size).fit(x, y)


FITTERS = {LINEAR: linear, BOOSTING: boosting}


def _chances(model: Any, x: Array, classes: int) -> Array:
    """Probabilities (n, classes); of a class without training samples hardly any."""
    chances = np.zeros((len(x), classes))
    chances[:, model.classes_] = model.predict_proba(x)
    return chances.clip(np.finfo(float).eps)


def fitted(kind: str, train: tuple[Array, Array], test: Array, units: Array, classes: int) -> Array:
    """Scores of the samples `test` by a model of this kind, fitted to `train`: of classes (n,
    classes), or predicted numbers (n, 1); zeros without training samples."""
    if not len(train[1]):
        return np.zeros((len(test), classes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FITTERS[kind](*train, units)
        if hasattr(model, "predict_proba"):
            return np.log(_chances(model, test, classes))
        numbers: Array = model.predict(test)
        return numbers[:, None]
