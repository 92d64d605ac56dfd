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

MOST_FEATURES = 500
"""Numbers of a sample, above which no plain model is fitted: ours, for the sake of time."""
ALPHAS = np.logspace(-2, 4, 13)
"""Penalties that ridge chooses from."""
STRENGTHS = np.logspace(-3, 1, 6)
"""Inverse penalties that logistic regression chooses from."""
INNER = 5
"""Parts of the training samples that tell the penalty."""


def linear(x: np.ndarray, y: np.ndarray, units: np.ndarray) -> Any:
    """A ridge or logistic regression whose penalty is chosen inside these samples.

    Args:
        x: (n, features).
        y: (n,) class numbers, or float targets.
        units: (n,) what each sample is of: none is in two of the inner parts.
    """
    groups = len(np.unique(units))
    parts = GroupKFold(min(INNER, groups)).split(x, y, units) if groups > 1 else []
    splits = [part for part in parts if len(np.unique(y[part[0]])) > 1]
    if y.dtype.kind == "f":
        # without units by leave-one-out, which costs one fit
        inner = splits if 1 < groups < len(y) else None
        return make_pipeline(StandardScaler(), RidgeCV(ALPHAS, cv=inner)).fit(x, y)
    if len(np.unique(y)) == 1:
        return DummyClassifier().fit(x, y)
    losses = np.zeros(len(STRENGTHS))
    for train, test in splits:
        model = make_pipeline(StandardScaler(), LogisticRegression(warm_start=True, max_iter=300))
        for place, strength in enumerate(STRENGTHS):
            model.set_params(logisticregression__C=strength).fit(x[train], y[train])
            losses[place] -= np.log(
                _chances(model, x[test], int(y.max()) + 1)[np.arange(len(test)), y[test]]
            ).sum()
    best = STRENGTHS[losses.argmin()] if splits else 1.0
    return make_pipeline(StandardScaler(), LogisticRegression(C=best, max_iter=300)).fit(x, y)


def boosting(x: np.ndarray, y: np.ndarray, units: np.ndarray) -> Any:
    """Gradient boosting with small trees."""
    if y.dtype.kind != "f" and len(np.unique(y)) == 1:
        return DummyClassifier().fit(x, y)
    kind = HistGradientBoostingRegressor if y.dtype.kind == "f" else HistGradientBoostingClassifier
    leaf = max(2, min(20, len(y) // 10))
    model = kind(max_iter=60, max_leaf_nodes=8, min_samples_leaf=leaf, random_state=0)
    return model.fit(x, y)


KINDS = {LINEAR: linear, BOOSTING: boosting}


def _chances(model: Any, x: np.ndarray, classes: int) -> np.ndarray:
    """Probabilities (n, classes); of a class without training samples hardly any."""
    chances = np.full((len(x), classes), np.finfo(float).eps)
    chances[:, model.classes_] = np.maximum(model.predict_proba(x), np.finfo(float).eps)
    return chances


def outputs(model: Any, x: np.ndarray, classes: int) -> np.ndarray:
    """Class scores (n, classes), or predicted numbers (n, 1), as a network gives them."""
    if not hasattr(model, "predict_proba"):
        return model.predict(x)[:, None]
    return np.log(_chances(model, x, classes))


def fitted(
    kind: str,
    train: tuple[np.ndarray, np.ndarray],
    test: np.ndarray,
    units: np.ndarray,
    classes: int,
) -> np.ndarray:
    """Scores (n, classes) of the samples `test` by a model of this kind, fitted to `train`; of a
    silo without training samples zeros."""
    if not len(train[1]):
        return np.zeros((len(test), classes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outputs(KINDS[kind](*train, units), test, classes)
