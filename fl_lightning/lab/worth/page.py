"""The answer for people who decide: one HTML page without a script or a network, and a picture of
the same bars."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fl_lightning import __version__
from fl_lightning.lab.report.page import template
from fl_lightning.lab.report.vector import image
from fl_lightning.lab.worth import words
from fl_lightning.lab.worth.silos import Answer, Measured

KINDS = {
    "gains": "gains",
    "harmed": "harmed",
    "no difference that matters": "same",
    "cannot tell yet": "unknown",
}
"""Of each verdict, what the page's style calls it."""
COLOURS = {"gains": "#1f6f8b", "harmed": "#c2571a", "same": "#6b7280", "unknown": "#a8b0bb"}
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
            {"left": _place(x, end), "text": words.signed(x, metric) if x else "0"} for x in steps
        ],
        unit="points of 100" if metric != "mae" else "fall of the mean error",
        cut=_cut(measured, end),
        zero=_place(0, end),
        band=f"less than {words.amount(measured.margin, metric)}{words.unit_of(metric)}",
        times={0: "and some judged", 1: "once"}.get(measured.cycles, f"{measured.cycles} times"),
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
        "margin": {"left": _place(-margin, end), "width": 2 * _place(margin, end) - 100},
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
    head = ["silo", *(words.KINDS[kind] for kind in kinds), "counts", "best"]
    section = Section("What each silo can do alone", text, head)
    for answer in measured.answers:
        scores = [words.score(answer.methods[kind]["score"], metric) for kind in kinds]
        own = words.score(answer.alone, metric)
        section.rows.append([answer.silo.name, *scores, own, words.KINDS[answer.alone_kind]])
    return section


def _methods(measured: Measured) -> Section:
    """Every row beside training alone."""
    metric, labels = measured.metric, list(measured.picks)
    text = (
        "Gain of each method over the best alone, with its 95 % interval (x3: trained 3 times as "
        "long). These are not corrected for choosing among them: the largest of a row is too "
        "large. Last, the standard deviation of one training's gain."
    )
    section = Section("Every method", text, ["silo", *labels, "between trainings"])
    for answer in measured.answers:
        cells = []
        for label in labels:
            row = answer.methods.get(label)
            known = row is not None and np.isfinite(row["gain"])
            ends = (
                (words.signed(row[key], metric) for key in ("gain", "low", "high"))
                if known and row
                else ()
            )
            cells.append("{} [{}, {}]".format(*ends) if known else "-")
        between = words.amount(answer.estimate.between, metric) if answer.estimate else "-"
        section.rows.append([answer.silo.name, *cells, between])
    return section


def picture(measured: Measured) -> bytes:
    """The bars as PNG."""
    from matplotlib.figure import Figure

    end, count = _end(measured), len(measured.answers)
    unit = 1.0 if measured.metric == "mae" else 100.0
    figure = Figure(figsize=(9, 1.9 + 0.42 * count), layout="constrained")
    axes = figure.add_subplot()
    axes.axvspan(-unit * measured.margin, unit * measured.margin, color="#f1f3f6")
    axes.axvline(0, color="#8b95a3", linewidth=1)
    for place, answer in enumerate(measured.answers):
        if answer.estimate is not None:
            low, high = (float(np.clip(x, -end, end)) for x in (answer.low, answer.high))
            colour = COLOURS[KINDS[answer.verdict]]
            axes.plot(
                [unit * low, unit * high],
                [place, place],
                color=colour,
                linewidth=7,
                solid_capstyle="round",
            )
            axes.plot(
                [unit * answer.estimate.gain],
                [place],
                "|",
                color="#1d2430",
                markersize=14,
                markeredgewidth=2.5,
            )
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(count), [answer.verdict for answer in measured.answers])
    axes.set_yticks(range(count), [f"{a.silo.name} ({a.silo.size})" for a in measured.answers])
    for side in (axes, right):
        side.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    right.spines["right"].set_visible(False)
    axes.set_xlim(-unit * end, unit * end)
    axes.set_ylim(count - 0.4, -0.6)
    label = "fall of the mean error" if measured.metric == "mae" else "points of 100"
    axes.set_xlabel(
        f"gain from learning together, {label}, with its 95 % "
        f"interval\n{_cut(measured, end)}".strip()
    )
    lines = textwrap.wrap(measured.consortium["sentence"], 110)
    figure.suptitle("\n".join(lines), fontsize=10, x=0.01, ha="left")
    return image("worth", figure, "png")
