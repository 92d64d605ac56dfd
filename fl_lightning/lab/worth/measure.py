"""From scores to answers: what each silo gains over the best of training alone, the method that was
chosen, and the consortium."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fl_lightning.lab.statistics import LEVEL, holm
from fl_lightning.lab.worth import ALONE, LINEAR, words
from fl_lightning.lab.worth import statistics as numbers
from fl_lightning.lab.worth.silos import Answer, Measured, Silo
from fl_lightning.lab.worth.statistics import HEAVY, Estimate, Name, Samples

FEWEST = 3
"""Silos with a verdict below which nothing is said of the consortium."""
PRECISIONS = (0.01, 0.02, 0.03, 0.05)
"""Half-widths that "so many more samples" is judged for."""
Parts = Mapping[str, np.ndarray]
"""Contributions (C, n) by row."""


def measure(silos: Sequence[Silo], metric: Name, margin: float | None, cycles: int) -> Measured:
    """Answer for each of `silos`, and for all.

    Args:
        silos: with the scores of all rows; those of `ALONE` are what a silo does alone.
        metric: that gains are of.
        margin: differences below it do not matter; None: `words.default_margin`.
        cycles: that have ended; 0: a part of one.
    """
    methods = [label for label in silos[0].rows if label not in ALONE]
    tables, sizes = _by_fold(silos, metric, methods)
    voters = [not words.why_not(silo, metric) for silo in silos]
    voters = voters if any(voters) else [True] * len(silos)
    picks, best = numbers.chosen(tables[:, voters], sizes[voters])
    answers = []
    for silo, alone in zip(silos, best_alone(silos, metric), strict=True):
        parts = contributions(silo, metric)
        ours = _composed(parts, methods, picks, silo)
        answers.append(_answer(silo, metric, parts, alone, ours, margin))
    mean = float(np.nanmean([answer.margin for answer in answers]))
    counts = {label: int((picks == m).sum()) for m, label in enumerate(methods)}
    measured = Measured(answers, metric, mean, methods[best], counts, cycles)
    for answer in answers:
        answer.sentence = words.of_silo(answer, measured)
    measured.consortium = _consortium(measured)
    return measured


def contributions(silo: Silo, metric: Name) -> Parts:
    """Of all rows."""
    return {
        label: numbers.contributions(metric, scores, silo.samples)
        for label, scores in silo.rows.items()
    }


def best_alone(silos: Sequence[Silo], metric: Name) -> list[tuple[np.ndarray, str]]:
    """Of each silo the contributions (C, n) of what its other folds choose of `ALONE`, and the best
    over all folds.

    A silo's own scores and the mean over silos count alike: by a silo of 60 samples alone the
    choice owes too much to chance, by all silos alone it would be one for large and small ones.
    """
    own = [label for label in silos[0].rows if label in ALONE]
    tables, sizes = _by_fold(silos, metric, own)
    there = ~np.isnan(tables)
    sums = np.where(there, tables, 0.0).sum(1, keepdims=True)
    common = sums / np.maximum(there.sum(1, keepdims=True), 1)
    answers = []
    for c, silo in enumerate(silos):
        picks, best = numbers.chosen(tables[:, [c]] + common, sizes[[c]])
        composed = _composed(contributions(silo, metric), own, picks, silo)
        answers.append((composed, own[best]))
    return answers


def _by_fold(
    silos: Sequence[Silo], metric: Name, labels: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """The metric (rows, silos, C, folds) of all rows on each fold, and its samples (silos, C,
    folds)."""
    cycles = len(silos[0].samples.folds)
    folds = 1 + max(int(silo.samples.folds.max(initial=0)) for silo in silos)
    tables = np.full((len(labels), len(silos), cycles, folds), np.nan)
    sizes = np.zeros((len(silos), cycles, folds))
    for c, silo in enumerate(silos):
        for fold in range(folds):
            sizes[c, :, fold] = (silo.samples.folds == fold).sum(1)
        for m, label in enumerate(labels):
            if len(silo.samples):
                table = numbers.by_fold(metric, silo.rows[label], silo.samples)
                tables[m, c, :, : table.shape[1]] = table
    return tables, sizes


def _composed(parts: Parts, labels: Sequence[str], picks: np.ndarray, silo: Silo) -> np.ndarray:
    """The contributions (C, n) of the row that was picked for each sample's fold."""
    chosen = np.take_along_axis(picks, silo.samples.folds, 1)
    stacked = np.stack([parts[label] for label in labels])
    composed: np.ndarray = np.take_along_axis(stacked, chosen[None], 0)[0]
    return composed


def _answer(
    silo: Silo,
    metric: Name,
    parts: Parts,
    alone: tuple[np.ndarray, str],
    federated: np.ndarray,
    margin: float | None,
) -> Answer:
    samples, reason, (own, kind) = silo.samples, words.why_not(silo, metric), alone
    estimate = numbers.estimate(metric, own, federated, samples) if len(samples) else None
    low, high = _ends(estimate, metric)
    score = numbers.value(metric, own) if len(samples) else math.nan
    margin = words.default_margin(score, metric) if margin is None else margin
    if estimate and not reason and metric == "mae" and _has_heavy_tail(own, federated, samples):
        reason = words.HEAVY_TAIL
    verdict = numbers.verdict(low, high, margin) if estimate and not reason else "cannot tell yet"
    if verdict == "gains":
        reason = _as_good(metric, parts, federated)
        verdict = "cannot tell yet" if reason else verdict
    value = numbers.value(metric, federated) if len(samples) else math.nan
    rows = {label: _row(metric, own, each, silo) for label, each in parts.items()}
    answer = Answer(
        silo, score, value, estimate, low, high, verdict, reason, margin, kind, methods=rows
    )
    return answer


def _has_heavy_tail(own: np.ndarray, federated: np.ndarray, samples: Samples) -> bool:
    """Whether a few errors decide the gain, or the model alone; errors are skewed, and so may be
    twice as far apart."""
    return numbers.heavy(federated - own, samples) or numbers.heavy(own, samples, 2 * HEAVY)


def _as_good(metric: Name, parts: Parts, federated: np.ndarray) -> str:
    """Names what, trained alone, has at least the federated score over all folds; empty where
    nothing has."""
    ours = numbers.by_merit(metric, federated)
    alone = {label: numbers.by_merit(metric, each) for label, each in parts.items()}
    good = [label for label, score in alone.items() if label in ALONE and score >= ours]
    return words.as_good(good[0]) if good else ""


def _row(metric: Name, own: np.ndarray, row: np.ndarray, silo: Silo) -> dict[str, float]:
    estimate = numbers.estimate(metric, own, row, silo.samples) if len(silo.samples) else None
    low, high = _ends(estimate, metric)
    gain = math.nan if estimate is None else estimate.gain
    score = numbers.value(metric, row) if len(silo.samples) else math.nan
    return {"score": score, "gain": gain, "low": low, "high": high}


def _ends(estimate: Estimate | None, metric: Name) -> tuple[float, float]:
    if estimate is None:
        return math.nan, math.nan
    most = math.inf if metric == "mae" else 1.0  # a share cannot rise by more
    return max(estimate.gain - estimate.half, -most), min(estimate.gain + estimate.half, most)


def _consortium(measured: Measured) -> dict[str, Any]:
    """What `worth.json` says of all silos together."""
    answers = measured.answers
    judged = {
        answer.silo.name: (answer, answer.estimate)
        for answer in answers
        if answer.estimate is not None and not words.why_not(answer.silo, measured.metric)
    }
    counts = {word: sum(a.verdict == word for a in answers) for word in words.VERDICTS}
    facts: dict[str, Any] = {
        "method": measured.method,
        "chosen_by_folds": measured.picks,
        "metric": measured.metric,
        "margin": measured.margin,
        "cycles": measured.cycles,
        "silos": len(answers),
        "silos_with_verdict": len(judged),
        "counts": counts,
        "shares": {word: count / len(answers) for word, count in counts.items()},
    }
    if len(judged) >= FEWEST:
        estimates = [estimate for _, estimate in judged.values()]
        gains = {name: estimate.gain for name, (_, estimate) in judged.items()}
        adjusted = holm([one.p_of_no_gain for one in estimates])
        worst = min(gains, key=lambda name: gains[name])
        gain, low, high = numbers.mean_gain(estimates)
        facts |= {
            "gain": gain,
            "low": low,
            "high": high,
            "surely_gain": [
                name
                for (name, (answer, _)), p in zip(judged.items(), adjusted, strict=True)
                if p <= LEVEL and answer.verdict == "gains"
            ],
            "worst": worst,
            "worst_gain": gains[worst],
            "between_silos": float(np.std([*gains.values()], ddof=1)),
        }
        new = numbers.of_new_silos([*gains.values()])
        facts |= {"new_silo_low": new[0], "new_silo_high": new[1]} if new else {}
    return facts | {"sentence": words.of_all(facts, measured)}


def as_json(measured: Measured) -> dict[str, Any]:
    """The content of `worth.json`; what is not defined is null."""
    content = {
        "silos": [_silo(answer, measured) for answer in measured.answers],
        "consortium": measured.consortium,
        "version": 2,
    }
    plain: dict[str, Any] = _plain(content)
    return plain


def _silo(answer: Answer, measured: Measured) -> dict[str, Any]:
    silo, one = answer.silo, answer.estimate
    row: dict[str, Any] = {
        "silo": silo.name,
        "samples": silo.size,
        "method": measured.method,
        "alone": answer.alone,
        "federated": answer.federated,
        "gain": one.gain if one else math.nan,
        "low": answer.low,
        "high": answer.high,
        "verdict": answer.verdict,
        "sentence": answer.sentence,
        "alone_kind": answer.alone_kind,
        "linear": answer.methods.get(LINEAR, {}).get("score", math.nan),
        "margin": answer.margin,
        "conditional": answer.reason == words.HEAVY_TAIL,
        "between_trainings": one.between if one else math.nan,
        "not_counted": silo.left_out,
        "units": silo.units,
        "methods": answer.methods,
    }
    if one is not None and not words.why_not(silo, measured.metric):
        scale = 1.0 if measured.metric != "mae" else answer.margin / words.MARGIN
        count, kind = silo.independent
        row["half_after_8_cycles"] = one.half_after(max(8, one.cycles))
        row[f"{kind}_for"] = {
            f"{width * scale:g}": one.samples_for(count, width * scale) for width in PRECISIONS
        }
    return row


def _plain(value: Any) -> Any:
    """NaN as null, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
