"""From scores to answers: what each silo gains, the method that was chosen, and the consortium."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fl_lightning.lab.statistics import LEVEL, holm
from fl_lightning.lab.worth import statistics as numbers
from fl_lightning.lab.worth import words
from fl_lightning.lab.worth.silos import Answer, Measured, Silo
from fl_lightning.lab.worth.statistics import Estimate, Name

ALONE = "local"
"""The row that all others are compared with."""
FEWEST = 3
"""Silos with a verdict below which nothing is said of the consortium."""
PRECISIONS = (0.01, 0.02, 0.03, 0.05)
"""Half-widths that "so many more samples" is judged for."""


def measure(silos: Sequence[Silo], metric: Name, margin: float | None) -> Measured:
    """Answer for each of `silos`, and for all.

    Args:
        silos: with the scores of all rows, `ALONE` among them.
        metric: that gains are of.
        margin: differences below it do not matter; None: `words.default_margin`.
    """
    methods = [label for label in silos[0].rows if label != ALONE]
    cycles, folds = (
        len(silos[0].samples.folds),
        1 + max(int(silo.samples.folds.max(initial=0)) for silo in silos),
    )
    tables = np.full((len(methods), len(silos), cycles, folds), np.nan)
    sizes = np.zeros((len(silos), cycles, folds))
    for c, silo in enumerate(silos):
        for fold in range(folds):
            sizes[c, :, fold] = (silo.samples.folds == fold).sum(1)
        for m, label in enumerate(methods):
            if len(silo.samples):
                table = numbers.by_fold(metric, silo.rows[label], silo.samples)
                tables[m, c, :, : table.shape[1]] = table
    voters = [not words.why_not(silo, metric) for silo in silos]
    voters = voters if any(voters) else [True] * len(silos)
    picks, best = numbers.chosen(tables[:, voters], sizes[voters])
    margin = words.default_margin(silos, metric) if margin is None else margin
    answers = [_answer(silo, methods, picks, metric, margin) for silo in silos]
    counts = {label: int((picks == m).sum()) for m, label in enumerate(methods)}
    measured = Measured(answers, metric, margin, methods[best], counts, cycles)
    for answer in answers:
        answer.sentence = words.of_silo(answer, measured)
    measured.consortium = _consortium(measured)
    return measured


def _answer(
    silo: Silo, methods: Sequence[str], picks: np.ndarray, metric: Name, margin: float
) -> Answer:
    samples = silo.samples
    reason = words.why_not(silo, metric)
    if not len(samples):
        return Answer(silo, math.nan, math.nan, None, math.nan, math.nan, "cannot tell yet", reason)
    parts = {
        label: numbers.contributions(metric, scores, samples) for label, scores in silo.rows.items()
    }
    chosen = np.take_along_axis(picks, samples.folds, 1)
    stacked = np.stack([parts[label] for label in methods])
    federated = np.take_along_axis(stacked, chosen[None], 0)[0]
    alone = numbers.value(metric, parts[ALONE])
    estimate = numbers.estimate(metric, parts[ALONE], federated, samples)
    low, high = _ends(estimate, metric)
    verdict = numbers.verdict(low, high, margin) if estimate and not reason else "cannot tell yet"
    rows = {label: _row(metric, parts, label, silo) for label in methods}
    value = numbers.value(metric, federated)
    return Answer(silo, alone, value, estimate, low, high, verdict, reason, methods=rows)


def _row(metric: Name, parts: Mapping[str, np.ndarray], label: str, silo: Silo) -> dict[str, float]:
    estimate = numbers.estimate(metric, parts[ALONE], parts[label], silo.samples)
    low, high = _ends(estimate, metric)
    gain = math.nan if estimate is None else estimate.gain
    return {"score": numbers.value(metric, parts[label]), "gain": gain, "low": low, "high": high}


def _ends(estimate: Estimate | None, metric: Name) -> tuple[float, float]:
    if estimate is None:
        return math.nan, math.nan
    most = math.inf if metric == "mae" else 1.0  # a share cannot rise by more
    return max(estimate.gain - estimate.half, -most), min(estimate.gain + estimate.half, most)


def _consortium(measured: Measured) -> dict[str, Any]:
    """What `worth.json` says of all silos together."""
    judged = [
        answer for answer in measured.answers if not answer.reason and answer.estimate is not None
    ]
    counts = {word: sum(a.verdict == word for a in measured.answers) for word in words.VERDICTS}
    facts: dict[str, Any] = {
        "method": measured.method,
        "chosen_by_folds": measured.picks,
        "metric": measured.metric,
        "margin": measured.margin,
        "cycles": measured.cycles,
        "silos": len(measured.answers),
        "silos_with_verdict": len(judged),
        "counts": counts,
        "shares": {word: count / len(measured.answers) for word, count in counts.items()},
    }
    if len(judged) >= FEWEST:
        estimates = [answer.estimate for answer in judged if answer.estimate is not None]
        sure = [p <= LEVEL for p in holm([one.p_of_no_gain for one in estimates])]
        gain, low, high = numbers.mean_gain(estimates)
        worst = min(
            judged, key=lambda answer: answer.estimate.gain if answer.estimate else math.inf
        )
        facts |= {"gain": gain, "low": low, "high": high}
        certain = [
            a for a, is_sure in zip(judged, sure, strict=True) if is_sure and a.verdict == "gains"
        ]
        facts |= {"surely_gain": [answer.silo.name for answer in certain]}
        facts |= {
            "worst": worst.silo.name,
            "worst_gain": worst.estimate.gain if worst.estimate else None,
        }
        facts |= {"between_silos": float(np.std([one.gain for one in estimates], ddof=1))}
        new = numbers.of_new_silos([one.gain for one in estimates])
        facts |= {"new_silo_low": new[0], "new_silo_high": new[1]} if new else {}
    facts["sentence"] = words.of_all(facts, measured)
    return facts


def as_json(measured: Measured) -> dict[str, Any]:
    """The content of `worth.json`; what is not defined is null."""
    silos = []
    for answer in measured.answers:
        one = answer.estimate
        row: dict[str, Any] = {
            "silo": answer.silo.name,
            "samples": answer.silo.size,
            "method": measured.method,
            "alone": answer.alone,
            "federated": answer.federated,
            "gain": one.gain if one else math.nan,
            "low": answer.low,
            "high": answer.high,
            "verdict": answer.verdict,
            "sentence": answer.sentence,
        }
        row["between_trainings"] = one.between if one else math.nan
        row["not_counted"], row["recordings"] = answer.silo.left_out, answer.silo.recordings
        row["methods"] = answer.methods
        if (training := measured.training) is not None:
            name = answer.silo.name
            row["steps_alone"], row["steps_federated"] = (
                training.alone[name],
                training.federated[name],
            )
            row["still_falling"] = name in training.falling
        if one is not None and not answer.reason:
            row["half_after_8_cycles"] = one.half_after(max(8, one.cycles))
            scale = 1.0 if measured.metric != "mae" else measured.margin / 0.02
            count, kind = answer.silo.independent
            row[f"{kind}_for"] = {
                f"{w * scale:g}": one.samples_for(count, w * scale) for w in PRECISIONS
            }
        silos.append(row)
    plain: dict[str, Any] = _plain(
        {"silos": silos, "consortium": measured.consortium, "version": 1}
    )
    return plain


def _plain(value: Any) -> Any:
    """NaN as null, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
