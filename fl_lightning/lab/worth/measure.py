"""From scores to answers: what each silo gains over the best of training alone, the method that was
chosen, and the consortium."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fl_lightning.lab.statistics import LEVEL, holm
from fl_lightning.lab.worth import ALONE, statistics, words
from fl_lightning.lab.worth.silos import Answer, Measured, Silo
from fl_lightning.lab.worth.statistics import Array, Estimate, Name, ScoredSamples, Scores, Verdict

FEWEST = 3
"""With fewer silos that have enough samples, nothing is said of the consortium."""
PRECISIONS = (0.01, 0.02, 0.03, 0.05)
"""Half-widths that "so many more samples" is judged for."""


def measure(
    silos: Sequence[Silo],
    metric: Name,
    margin: float | None,
    cycles: int,
) -> Measured:
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
    if any(voters):
        tables, sizes = tables[:, voters], sizes[voters]
    picks, best = statistics.choose_by_other_folds(tables, sizes)
    answers = []
    for silo, (alone, kind) in zip(silos, best_alone(silos, metric), strict=True):
        federated = _composed(silo, methods, picks)
        answers.append(
            _answer(
                silo,
                metric,
                alone,
                kind,
                federated,
                margin,
            )
        )
    mean = float(np.nanmean([answer.margin for answer in answers]))
    counts = {label: int((picks == m).sum()) for m, label in enumerate(methods)}
    measured = Measured(
        answers,
        metric,
        mean,
        methods[best],
        counts,
        cycles,
    )
    for answer in answers:
        answer.sentence = words.of_silo(answer, measured)
    measured.consortium = _consortium(measured)
    return measured


def best_alone(silos: Sequence[Silo], metric: Name) -> list[tuple[Scores, str]]:
    """For each silo: the scores of the row of `ALONE` that each sample's *other* folds chose, and
    the label of the row that is best over all folds.

    Rows are chosen by the sum of a silo's own score and the mean over silos. The own score of a
    silo of 60 samples owes too much to chance; the mean would choose one row for large and small
    silos.
    """
    labels = [label for label in silos[0].rows if label in ALONE]
    tables, sizes = _by_fold(silos, metric, labels)
    defined = (~np.isnan(tables)).sum(1, keepdims=True)
    mean_over_silos = np.nansum(tables, 1, keepdims=True) / np.maximum(defined, 1)
    answers = []
    for c, silo in enumerate(silos):
        own_and_mean = tables[:, [c]] + mean_over_silos
        picks, best = statistics.choose_by_other_folds(own_and_mean, sizes[[c]])
        answers.append((_composed(silo, labels, picks), labels[best]))
    return answers


def _by_fold(silos: Sequence[Silo], metric: Name, labels: Sequence[str]) -> tuple[Array, Array]:
    """The metric (rows, silos, C, folds) of all rows on each fold, and its samples (silos, C,
    folds)."""
    cycles = len(silos[0].samples.folds)
    folds = 1 + max(int(silo.samples.folds.max(initial=0)) for silo in silos)
    tables = np.full((len(labels), len(silos), cycles, folds), np.nan)
    sizes = np.zeros((len(silos), cycles, folds))
    for c, silo in enumerate(silos):
        samples = silo.samples
        for fold in range(folds):
            sizes[c, :, fold] = (samples.folds == fold).sum(1)
        for m, label in enumerate(labels):
            if len(samples):
                table = statistics.by_fold(metric, silo.rows[label], samples)
                tables[m, c, :, : table.shape[1]] = table
    return tables, sizes


def _composed(silo: Silo, labels: Sequence[str], picks: Array) -> Scores:
    """The scores of the row that was picked for each sample's fold."""
    chosen = np.take_along_axis(picks, silo.samples.folds, 1)
    rows = [silo.rows[label] for label in labels]
    right = np.stack([row.right for row in rows])
    outputs = None
    if rows[0].outputs is not None:
        outputs = np.stack([row.outputs for row in rows if row.outputs is not None])
        outputs = np.take_along_axis(outputs, chosen[None, ..., None], 0)[0]
    return Scores(np.take_along_axis(right, chosen[None], 0)[0], outputs)


def _answer(
    silo: Silo,
    metric: Name,
    alone: Scores,
    kind: str,
    federated: Scores,
    margin: float | None,
) -> Answer:
    samples, reason = silo.samples, words.why_not(silo, metric)
    estimate, joint = _gain(
        metric,
        alone,
        federated,
        samples,
    )
    score = statistics.value(metric, alone, samples) if len(samples) else math.nan
    rows = {
        label: _gain(
            metric,
            alone,
            row,
            samples,
        )[1]
        for label, row in silo.rows.items()
    }
    if margin is None:
        margin = words.default_margin(score, metric)
    verdict: Verdict = "cannot tell yet"
    if estimate is not None and not reason:
        if metric == "mae" and statistics.heavy(alone.right, federated.right, samples):
            reason = words.HEAVY_TAIL
        else:
            verdict = statistics.verdict(joint["low"], joint["high"], margin)
    if verdict == "gains" and (label := _as_good(metric, rows, joint["score"])):
        reason, verdict = words.as_good(label), "cannot tell yet"
    return Answer(
        silo,
        score,
        joint["score"],
        estimate,
        joint["low"],
        joint["high"],
        verdict,
        reason,
        margin,
        kind,
        methods=rows,
    )


def _gain(
    metric: Name, alone: Scores, row: Scores, samples: ScoredSamples
) -> tuple[Estimate | None, dict[str, float]]:
    """The gain of a row over `alone`, if it is defined; the row's score, and the gain with the ends
    of its interval."""
    figures = dict.fromkeys(("score", "gain", "low", "high"), math.nan)
    if not len(samples):
        return None, figures
    figures["score"] = statistics.value(metric, row, samples)
    estimate = statistics.estimate(
        metric,
        alone,
        row,
        samples,
    )
    if estimate is None:
        return None, figures
    most = math.inf if metric == "mae" else 1.0  # a share cannot rise by more
    low, high = estimate.ends
    return estimate, figures | {
        "gain": estimate.gain,
        "low": max(low, -most),
        "high": min(high, most),
    }


def _as_good(metric: Name, rows: Mapping[str, Mapping[str, float]], score: float) -> str | None:
    """The first model trained alone that scores at least `score` over all folds, if any."""
    sign = -1 if metric == "mae" else 1
    for label, figures in rows.items():
        if label in ALONE and sign * figures["score"] >= sign * score:
            return label
    return None


def _consortium(measured: Measured) -> dict[str, Any]:
    """The part of `worth.json` that speaks of all silos together."""
    answers = measured.answers
    judged = [
        (answer, answer.estimate)
        for answer in answers
        if answer.estimate is not None and not words.why_not(answer.silo, measured.metric)
    ]
    verdicts: list[str] = [answer.verdict for answer in answers]
    counts = {word: verdicts.count(word) for word in words.VERDICTS}
    facts: dict[str, Any] = {
        "method": measured.method,
        "chosen_by_folds": measured.picks,
        "metric": measured.metric,
        "margin": measured.margin,
        "cycles": measured.cycles,
        "silos": len(answers),
        "silos_with_verdict": len(judged),  # it may be "cannot tell yet"
        "counts": counts,
        "shares": {word: count / len(answers) for word, count in counts.items()},
    }
    if len(judged) >= FEWEST:
        facts |= _of_judged(judged)
    return facts | {"sentence": words.of_all(facts, measured)}


def _of_judged(judged: Sequence[tuple[Answer, Estimate]]) -> dict[str, Any]:
    """Mean gain of the silos that have enough samples, and which of them surely gain."""
    estimates = [estimate for _, estimate in judged]
    gain, low, high = statistics.mean_gain(estimates)
    gains = {answer.silo.name: estimate.gain for answer, estimate in judged}
    adjusted = holm([estimate.p_of_no_gain for estimate in estimates])
    surely = [
        answer.silo.name
        for (answer, _), p in zip(judged, adjusted, strict=True)
        if p <= LEVEL and answer.verdict == "gains"
    ]
    worst = min(gains, key=gains.__getitem__)
    spread = float(np.std([*gains.values()], ddof=1))
    facts: dict[str, Any] = {
        "gain": gain,
        "low": low,
        "high": high,
        "surely_gain": surely,
        "worst": worst,
        "worst_gain": gains[worst],
        "between_silos": spread,
    }
    new = statistics.of_new_silos([*gains.values()])
    return facts | ({"new_silo_low": new[0], "new_silo_high": new[1]} if new else {})


def as_json(measured: Measured) -> dict[str, Any]:
    """The content of `worth.json`; what is not defined is null."""
    silos = [_silo(answer, measured) for answer in measured.answers]
    content = {
        "silos": silos,
        "consortium": measured.consortium,
        "version": 2,
    }
    plain: dict[str, Any] = _plain(content)
    return plain


def _silo(answer: Answer, measured: Measured) -> dict[str, Any]:
    silo, estimate = answer.silo, answer.estimate
    row: dict[str, Any] = {
        "silo": silo.name,
        "samples": silo.size,
        "method": measured.method,
        "alone": answer.alone,
        "federated": answer.federated,
        "gain": estimate.gain if estimate else math.nan,
        "low": answer.low,
        "high": answer.high,
        "verdict": answer.verdict,
        "sentence": answer.sentence,
        "alone_kind": answer.alone_kind,
        "linear": answer.linear,
        "margin": answer.margin,
        "conditional": answer.reason == words.HEAVY_TAIL,
        "between_trainings": estimate.between if estimate else math.nan,
        "not_counted": silo.left_out,
        "units": silo.units,
        "methods": answer.methods,
    }
    if estimate is not None and not words.why_not(silo, measured.metric):
        scale = answer.margin / words.MARGIN if measured.metric == "mae" else 1.0
        count, kind = silo.independent
        row["half_after_8_cycles"] = estimate.half_after(max(8, estimate.cycles))
        row[f"{kind}_for"] = {
            f"{width * scale:g}": estimate.samples_for(count, width * scale) for width in PRECISIONS
        }
    return row


def _plain(value: Any) -> Any:
    """NaN as null, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
