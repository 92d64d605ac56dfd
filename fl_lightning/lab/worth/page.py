"""Write the page for people who decide: one HTML file without scripts that opens offline."""

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
"""CSS class of each verdict."""
WIDEST = 3.0
"""Greatest end of the axis, in multiples of the median distance between 0 and an interval's far
end: the interval of a silo with few samples may reach hundreds of points."""


@dataclass
class Section:
    """A table in the lower part of the page, with its title, text and column names (`head`)."""

    title: str
    text: str
    head: list[str]
    rows: list[list[str]] = field(default_factory=list)


def render(measured: Measured, sections: list[Section]) -> str:
    """Render the page as HTML."""
    end, metric = _end(measured), measured.metric
    head, _, rest = measured.consortium["sentence"].partition(": ")
    if not rest:
        head, rest = "There is no answer for all silos together", measured.consortium["sentence"]
    texts = {step: words.signed(step, metric) if step else "0" for step in _steps(end)}
    # completes "cut into five parts, once"; 0 cycles: only some parts were judged
    times = {0: "and some judged", 1: "once"}
    return template("fl_lightning.lab.worth").render(
        version=__version__,
        head=f"{head}.",
        rest=rest[0].upper() + rest[1:],
        silos=[_silo(answer, end) for answer in measured.answers],
        ticks=[{"left": _place(step, end), "text": text} for step, text in texts.items()],
        unit="fall of the mean error" if metric == "mae" else "points of 100",
        is_cut=max(_reaches(measured.answers), default=0.0) > end,
        zero=_place(0, end),
        band=f"less than {words.amount(measured.margin, metric)}{words.unit_of(metric)}",
        times=times.get(measured.cycles, f"{measured.cycles} times"),
        score=words.METRICS[metric],
        method=measured.method,
        number=len(measured.picks),
        picks=", ".join(f"{label} {count}" for label, count in measured.picks.items() if count),
        alone=words.best_alone(measured),
        sections=[_alone(measured), _methods(measured), *sections],
    )


def _silo(answer: Answer, end: float) -> dict[str, Any]:
    """Values of a silo for the template; places lie on an axis from -`end` to `end`."""
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


def _reaches(answers: Iterable[Answer]) -> list[float]:
    """Distance from 0 to the far end of each silo's interval."""
    return [
        max(abs(answer.low), abs(answer.high)) for answer in answers if answer.estimate is not None
    ]


def _end(measured: Measured) -> float:
    """End of the axis on either side of 0."""
    judged = [answer for answer in measured.answers if not answer.reason]
    reaches = _reaches(judged) or _reaches(measured.answers) or [measured.margin]
    farthest = min(max(reaches), WIDEST * float(np.median(reaches)))
    return max(farthest, 1.5 * measured.margin) * 1.05


def _steps(end: float) -> list[float]:
    """Three to five values with few digits along the axis."""
    least = end / 2.5
    unit = 10 ** np.floor(np.log10(least))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= least * (1 - 1e-9))
    most = int(end / step)
    return [float(k * step) for k in range(-most, most + 1)]


def _place(x: float, end: float) -> float:
    """Place of `x` on the axis, in percent from the left."""
    return round(50 + 50 * x / end, 2)


def _alone(measured: Measured) -> Section:
    """Tabulate the scores of the rows that each silo trains alone."""
    metric = measured.metric
    kinds = [kind for kind in words.ALONE_IN_WORDS if kind in measured.answers[0].methods]
    text = (
        "Score of everything that was tried alone. For each part the best on the silo's other "
        "parts counts; the last columns are what came of that, and the best over all parts. "
        f"{words.best_alone(measured)}"
    )
    head = ["silo", *(words.ALONE_IN_WORDS[kind] for kind in kinds), "counts", "best"]
    section = Section("What each silo can do alone", text, head)
    for answer in measured.answers:
        scores = [words.score(answer.methods[kind]["score"], metric) for kind in kinds]
        best = [words.score(answer.alone, metric), words.ALONE_IN_WORDS[answer.alone_kind]]
        section.rows.append([answer.silo.name, *scores, *best])
    return section


def _methods(measured: Measured) -> Section:
    """Tabulate each silo's gain by method and length."""
    metric, labels = measured.metric, list(measured.picks)
    text = (
        "Gain of each method over the best alone, with its 95 % interval (x3: trained 3 times as "
        "long). These are not corrected for choosing among them: the largest of a row is too "
        "large. Last, the standard deviation of one training's gain."
    )
    section = Section("Every method", text, ["silo", *labels, "between trainings"])
    for answer in measured.answers:
        cells = [_gain(answer.methods[label], metric) for label in labels]
        between = words.amount(answer.estimate.training_std, metric) if answer.estimate else "-"
        section.rows.append([answer.silo.name, *cells, between])
    return section


def _gain(row: Mapping[str, float], metric: Name) -> str:
    if not np.isfinite(row["gain"]):
        return "-"
    gain, low, high = (words.signed(row[key], metric) for key in ("gain", "low", "high"))
    return f"{gain}\n[{low}, {high}]"
