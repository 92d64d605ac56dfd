"""Turn scores into answers: each silo's gain over the best it can train alone, the chosen method,
and the consortium of all silos."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fl_lightning.lab.statistics import LEVEL, holm
from fl_lightning.lab.worth import ALONE, statistics, words
from fl_lightning.lab.worth.silos import Answer, Measured, Silo
from fl_lightning.lab.worth.statistics import Array, Estimate, Name, ScoredSamples, Scores, Verdict

FEWEST = 3
"""Silos with enough samples below which no mean gain is given for the consortium."""
PRECISIONS = (0.01, 0.02, 0.03, 0.05)
"""Half-widths for which `worth.json` gives the number of samples that a silo would need."""


def measure(
    silos: Sequence[Silo],
    metric: Name,
    margin: float | None,
    cycles: int,
) -> Measured:
    """Compute each silo's gain and verdict, the chosen method, and the consortium's results.

    Args:
        silos: silos with the scores of all rows.
        metric: metric in which gains are measured.
        margin: size of a gain that does not matter; None: `words.default_margin`.
        cycles: number of complete cycles; 0: only some folds of the first cycle are complete.
    """
    methods = [name for name in silos[0].rows if name not in ALONE]
    tables, sizes = _by_fold(silos, metric, methods)
    voters = [not words.why_no_verdict(silo, metric) for silo in silos]
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
    counts = {name: int((picks == m).sum()) for m, name in enumerate(methods)}
    measured = Measured(
        answers,
        metric,
        mean,
        methods[best],
        counts,
        cycles,
    )
    for answer in answers:
        answer.sentence = words.silo_sentence(answer, measured)
    measured.consortium = _consortium(measured)
    return measured


def best_alone(silos: Sequence[Silo], metric: Name) -> list[tuple[Scores, str]]:
    """Choose the best row of `ALONE` for each silo by cross-validation.

    Each fold is scored by the row that is best on the other folds of its cycle. The best row has
    the largest sum of the silo's own score and the mean score over silos. By its own score only,
    the choice in a silo of 60 samples would be mostly chance; by the mean only, large and small
    silos would get the same row.

    Returns:
        For each silo, the scores composed fold by fold, and the name of the row that is best over
        all folds.
    """
    names = [name for name in silos[0].rows if name in ALONE]
    tables, sizes = _by_fold(silos, metric, names)
    defined = (~np.isnan(tables)).sum(1, keepdims=True)
    mean_over_silos = np.nansum(tables, 1, keepdims=True) / np.maximum(defined, 1)
    answers = []
    for c, silo in enumerate(silos):
        own_and_mean = tables[:, [c]] + mean_over_silos
        picks, best = statistics.choose_by_other_folds(own_and_mean, sizes[[c]])
        answers.append((_composed(silo, names, picks), names[best]))
    return answers


def _by_fold(silos: Sequence[Silo], metric: Name, names: Sequence[str]) -> tuple[Array, Array]:
    """Compute the metric of each row by fold, (rows, silos, C, folds), and the number of tested
    samples, (silos, C, folds)."""
    cycles = len(silos[0].samples.folds)
    folds = 1 + max(int(silo.samples.folds.max(initial=0)) for silo in silos)
    tables = np.full((len(names), len(silos), cycles, folds), np.nan)
    sizes = np.zeros((len(silos), cycles, folds))
    for c, silo in enumerate(silos):
        samples = silo.samples
        for fold in range(folds):
            sizes[c, :, fold] = (samples.folds == fold).sum(1)
        for m, name in enumerate(names):
            if len(samples):
                table = statistics.by_fold(metric, silo.rows[name], samples)
                tables[m, c, :, : table.shape[1]] = table
    return tables, sizes


def _composed(silo: Silo, names: Sequence[str], picks: Array) -> Scores:
    """Compose scores fold by fold; `picks` (C, folds): index in `names` of each fold's row."""
    chosen = np.take_along_axis(picks, silo.samples.folds, 1)
    rows = [silo.rows[name] for name in names]
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
    samples, reason = silo.samples, words.why_no_verdict(silo, metric)
    estimate, figures = _gain(
        metric,
        alone,
        federated,
        samples,
    )
    score = statistics.value(metric, alone, samples) if len(samples) else math.nan
    figures_by_row = {
        name: _gain(
            metric,
            alone,
            row,
            samples,
        )[1]
        for name, row in silo.rows.items()
    }
    if margin is None:
        margin = words.default_margin(score, metric)
    verdict: Verdict = "cannot tell yet"
    if estimate is not None and not reason:
        if metric == "mae" and statistics.one_unit_dominates(alone.right, federated.right, samples):
            reason = words.HEAVY_TAIL
        else:
            verdict = statistics.verdict(figures["low"], figures["high"], margin)
    if verdict == "gains" and (name := _equal_alone(metric, figures_by_row, figures["score"])):
        reason, verdict = words.alone_is_as_good(name), "cannot tell yet"
    return Answer(
        silo,
        score,
        figures["score"],
        estimate,
        figures["low"],
        figures["high"],
        verdict,
        reason,
        margin,
        kind,
        methods=figures_by_row,
    )


def _gain(
    metric: Name, alone: Scores, row: Scores, samples: ScoredSamples
) -> tuple[Estimate | None, dict[str, float]]:
    """Estimate the gain of a row over `alone`, None if undefined; also returns the row's score,
    gain and interval ends by name."""
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
    greatest = math.inf if metric == "mae" else 1.0  # other metrics lie between 0 and 1
    low, high = estimate.ends
    return estimate, figures | {
        "gain": estimate.gain,
        "low": max(low, -greatest),
        "high": min(high, greatest),
    }


def _equal_alone(metric: Name, rows: Mapping[str, Mapping[str, float]], score: float) -> str | None:
    """Find the first row of `ALONE` that scores at least `score` over all folds."""
    sign = -1 if metric == "mae" else 1
    for name, figures in rows.items():
        if name in ALONE and sign * figures["score"] >= sign * score:
            return name
    return None


def _consortium(measured: Measured) -> dict[str, Any]:
    """Build the part of `worth.json` about all silos together."""
    answers = measured.answers
    judged = [
        (answer, answer.estimate)
        for answer in answers
        if answer.estimate is not None and not words.why_no_verdict(answer.silo, measured.metric)
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
        "silos_with_verdict": len(judged),  # "cannot tell yet" included
        "counts": counts,
        "shares": {word: count / len(answers) for word, count in counts.items()},
    }
    if len(judged) >= FEWEST:
        facts |= _of_judged(judged)
    return facts | {"sentence": words.overall_sentence(facts, measured)}


def _of_judged(judged: Sequence[tuple[Answer, Estimate]]) -> dict[str, Any]:
    """Compute the mean gain of the silos with enough samples, and which of them gain
    significantly (Holm)."""
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
    new = statistics.mean_of_new_silos([*gains.values()])
    return facts | ({"new_silo_low": new[0], "new_silo_high": new[1]} if new else {})


def as_json(measured: Measured) -> dict[str, Any]:
    """Build the content of `worth.json`; undefined values are None."""
    content = {
        "silos": [_silo(answer, measured) for answer in measured.answers],
        "consortium": measured.consortium,
        "version": 2,
    }
    # JSON has no NaN and no infinity
    finite: dict[str, Any] = json.loads(json.dumps(content), parse_constant=lambda _: None)
    return finite


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
        "between_trainings": estimate.training_std if estimate else math.nan,
        "not_counted": silo.left_out,
        "units": silo.units,
        "methods": answer.methods,
    }
    if estimate is not None and not words.why_no_verdict(silo, measured.metric):
        scale = answer.margin / words.MARGIN if measured.metric == "mae" else 1.0
        count, kind = silo.independent
        row["half_after_8_cycles"] = estimate.half_after(max(8, estimate.cycles))
        row[f"{kind}_for"] = {
            f"{width * scale:g}": estimate.samples_for(count, width * scale) for width in PRECISIONS
        }
    return row
