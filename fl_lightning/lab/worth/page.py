"""The answer for people who decide: one HTML page without a script or a network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fl_lightning import __version__
from fl_lightning.lab.report.page import template
from fl_lightning.lab.worth import words
from fl_lightning.lab.worth.silos import Answer, Measured

KINDS = {
    "gains": "gains",
    "harmed": "harmed",
    "no difference that matters": "same",
    "cannot tell yet": "unknown",
}
"""Of each verdict, what the page's style calls it."""
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
    steps = _steps(end)
    return template("fl_lightning.lab.worth").render(
        version=__version__,
        head=f"{head}.",
        rest=rest[0].upper() + rest[1:],
        silos=[_silo(answer, end) for answer in measured.answers],
        ticks=[
            {
                "left": _place(x, end),
                "text": words.signed(x, metric) if x else "0",
            }
            for x in steps
        ],
        unit="points of 100" if metric != "mae" else "fall of the mean error",
        cut=_cut(measured, end),
        zero=_place(0, end),
        band=f"less than {words.amount(measured.margin, metric)}{words.unit_of(metric)}",
        times={0: "and some judged", 1: "once"}.get(
            measured.cycles,
            f"{measured.cycles} times",
        ),
        score=words.METRICS[metric],
        method=measured.method,
        number=len(measured.picks),
        picks=", ".join(f"{label} {count}" for label, count in measured.picks.items() if count),
        alone=words.alone(measured),
        sections=[_alone(measured), _methods(measured), *sections],
    )


def _silo(answer: Answer, end: float) -> dict[str, Any]:
    bar = None
    if answer.estimate is not None:
        low, high = (float(np.clip(x, -end, end)) for x in (answer.low, answer.high))
        gain = answer.estimate.gain
        dot = _place(gain, end) if abs(gain) <= end else None
        bar = {
            "left": _place(low, end),
            "width": max(_place(high, end) - _place(low, end), 0.6),
            "dot": dot,
        }
    margin = min(answer.margin, end) if np.isfinite(answer.margin) else 0.0
    return {
        "margin": {
            "left": _place(-margin, end),
            "width": 2 * _place(margin, end) - 100,
        },
        "name": answer.silo.name,
        "samples": answer.silo.size,
        "kind": KINDS[answer.verdict],
        "bar": bar,
        "verdict": answer.verdict,
        "sentence": answer.sentence,
    }


def _end(measured: Measured) -> float:
    """Where the axis ends on either side."""
    ends = [
        max(abs(a.low), abs(a.high))
        for a in measured.answers
        if a.estimate is not None and not a.reason
    ]
    ends = ends or [
        max(abs(a.low), abs(a.high)) for a in measured.answers if a.estimate is not None
    ]
    most = min(max(ends), WIDEST * float(np.median(ends))) if ends else measured.margin
    return max(most, 1.5 * measured.margin) * 1.05


def _cut(measured: Measured, end: float) -> str:
    """What a reader has to know of bars that are longer than the axis; empty where none is."""
    longest = max(
        (max(abs(a.low), abs(a.high)) for a in measured.answers if a.estimate is not None),
        default=0.0,
    )
    return "A bar that reaches the edge goes on beyond it." if longest > end else ""


def _steps(end: float) -> list[float]:
    """Round values along the axis, three to five."""
    unit = 10 ** np.floor(np.log10(end / 2.5))
    step = unit * min(factor for factor in (1, 2, 5, 10) if factor * unit >= end / 2.5 * (1 - 1e-9))
    most = int(end / step)
    return [float(k * step) for k in range(-most, most + 1)]


def _place(x: float, end: float) -> float:
    """Percent from the left."""
    return round(50 + 50 * x / end, 2)


def _alone(measured: Measured) -> Section:
    """What each silo reaches alone."""
    metric = measured.metric
    kinds = [kind for kind in words.KINDS if kind in measured.answers[0].methods]
    text = (
        "Score of everything that was tried alone. For each part the best on the silo's other "
        "parts counts; the last columns are what came of that, and the best over all parts. "
        f"{words.alone(measured)}"
    )
    head = [
        "silo",
        *(words.KINDS[kind] for kind in kinds),
        "counts",
        "best",
    ]
    section = Section("What each silo can do alone", text, head)
    for answer in measured.answers:
        scores = [words.score(answer.methods[kind]["score"], metric) for kind in kinds]
        best = words.score(answer.alone, metric)
        section.rows.append(
            [
                answer.silo.name,
                *scores,
                best,
                words.KINDS[answer.alone_kind],
            ]
        )
    return section


def _methods(measured: Measured) -> Section:
    """Every row beside training alone."""
    metric, labels = measured.metric, list(measured.picks)
    text = (
        "Gain of each method over the best alone, with its 95 % interval (x3: trained 3 times as "
        "long). These are not corrected for choosing among them: the largest of a row is too "
        "large. Last, the standard deviation of one training's gain."
    )
    section = Section(
        "Every method",
        text,
        ["silo", *labels, "between trainings"],
    )
    for answer in measured.answers:
        cells = []
        for label in labels:
            row = answer.methods.get(label)
            is_defined = row is not None and np.isfinite(row["gain"])
            ends = (
                (words.signed(row[key], metric) for key in ("gain", "low", "high"))
                if is_defined and row
                else ()
            )
            cells.append("{} [{}, {}]".format(*ends) if is_defined else "-")
        between = words.amount(answer.estimate.between, metric) if answer.estimate else "-"
        section.rows.append([answer.silo.name, *cells, between])
    return section
