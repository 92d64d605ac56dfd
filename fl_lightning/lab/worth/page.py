"""The answer for people who decide: one HTML page without a script or a network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fl_lightning import __version__
from fl_lightning.lab.report.page import template
from fl_lightning.lab.worth import words
from fl_lightning.lab.worth.silos import Answer, Measured
from fl_lightning.lab.worth.statistics import Name

STYLES = {
    "gains": "gains",
    "harmed": "harmed",
    "no difference that matters": "same",
    "cannot tell yet": "unknown",
}
"""Names of the verdicts in the page's style."""
WIDEST = 3.0
"""The axis is at most so many times as long as the median interval: a silo of a few samples has one
without an end."""


@dataclass
class Section:
    """A table with a heading, below the first screen."""

    title: str
    text: str
    head: list[str]
    rows: list[list[str]] = field(default_factory=list)


def render(measured: Measured, sections: list[Section]) -> str:
    """The HTML of the page."""
    end, metric = _end(measured), measured.metric
    head, _, rest = measured.consortium["sentence"].partition(": ")
    if not rest:
        head, rest = "There is no answer for all silos together", measured.consortium["sentence"]
    texts = {step: words.signed(step, metric) if step else "0" for step in _steps(end)}
    # the page says "cut into five parts, once"; in 0 whole cycles only some parts were judged
    times = {0: "and some judged", 1: "once"}
    return template("fl_lightning.lab.worth").render(
        version=__version__,
        head=f"{head}.",
        rest=rest[0].upper() + rest[1:],
        silos=[_silo(answer, end) for answer in measured.answers],
        ticks=[{"left": _place(step, end), "text": text} for step, text in texts.items()],
        unit="fall of the mean error" if metric == "mae" else "points of 100",
        is_cut=max(_lengths(measured.answers), default=0.0) > end,
        zero=_place(0, end),
        band=f"less than {words.amount(measured.margin, metric)}{words.unit_of(metric)}",
        times=times.get(measured.cycles, f"{measured.cycles} times"),
        score=words.METRICS[metric],
        method=measured.method,
        number=len(measured.picks),
        picks=", ".join(f"{label} {count}" for label, count in measured.picks.items() if count),
        alone=words.alone(measured),
        sections=[_alone(measured), _methods(measured), *sections],
    )


def _silo(answer: Answer, end: float) -> dict[str, Any]:
    """The part of the page on one silo, on an axis that ends at `end`."""
    bar = None
    if answer.estimate is not None:
        low, high = (_place(float(np.clip(x, -end, end)), end) for x in (answer.low, answer.high))
        gain = answer.estimate.gain
        bar = {
            "left": low,
            "width": max(high - low, 0.6),
            "dot": _place(gain, end) if abs(gain) <= end else None,
        }
    margin = min(answer.margin, end) if np.isfinite(answer.margin) else 0.0
    return {
        "margin": {"left": _place(-margin, end), "width": 2 * _place(margin, end) - 100},
        "name": answer.silo.name,
        "samples": answer.silo.size,
        "kind": STYLES[answer.verdict],
        "bar": bar,
        "verdict": answer.verdict,
        "sentence": answer.sentence,
    }


def _lengths(answers: Iterable[Answer]) -> list[float]:
    """How far the interval of each silo that has one reaches from 0."""
    return [
        max(abs(answer.low), abs(answer.high)) for answer in answers if answer.estimate is not None
    ]


def _end(measured: Measured) -> float:
    """Where the axis ends on either side."""
    judged = [answer for answer in measured.answers if not answer.reason]
    lengths = _lengths(judged) or _lengths(measured.answers) or [measured.margin]
    longest = min(max(lengths), WIDEST * float(np.median(lengths)))
    return max(longest, 1.5 * measured.margin) * 1.05


def _steps(end: float) -> list[float]:
    """Round values along the axis, three to five."""
    least = end / 2.5
    unit = 10 ** np.floor(np.log10(least))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= least * (1 - 1e-9))
    most = int(end / step)
    return [float(k * step) for k in range(-most, most + 1)]


def _place(x: float, end: float) -> float:
    """Percent from the left."""
    return round(50 + 50 * x / end, 2)


def _alone(measured: Measured) -> Section:
    """A table of what each silo reaches alone."""
    metric = measured.metric
    kinds = [kind for kind in words.ALONE_IN_WORDS if kind in measured.answers[0].methods]
    text = (
        "Score of everything that was tried alone. For each part the best on the silo's other "
        "parts counts; the last columns are what came of that, and the best over all parts. "
        f"{words.alone(measured)}"
    )
    head = ["silo", *(words.ALONE_IN_WORDS[kind] for kind in kinds), "counts", "best"]
    section = Section("What each silo can do alone", text, head)
    for answer in measured.answers:
        scores = [words.score(answer.methods[kind]["score"], metric) for kind in kinds]
        best = [words.score(answer.alone, metric), words.ALONE_IN_WORDS[answer.alone_kind]]
        section.rows.append([answer.silo.name, *scores, *best])
    return section


def _methods(measured: Measured) -> Section:
    """A table of the gain of every row beside training alone."""
    metric, labels = measured.metric, list(measured.picks)
    text = (
        "Gain of each method over the best alone, with its 95 % interval (x3: trained 3 times as "
        "long). These are not corrected for choosing among them: the largest of a row is too "
        "large. Last, the standard deviation of one training's gain."
    )
    section = Section("Every method", text, ["silo", *labels, "between trainings"])
    for answer in measured.answers:
        cells = [_gain(answer.methods[label], metric) for label in labels]
        between = words.amount(answer.estimate.between, metric) if answer.estimate else "-"
        section.rows.append([answer.silo.name, *cells, between])
    return section


def _gain(row: Mapping[str, float], metric: Name) -> str:
    if not np.isfinite(row["gain"]):
        return "-"
    gain, low, high = (words.signed(row[key], metric) for key in ("gain", "low", "high"))
    return f"{gain}\n[{low}, {high}]"
