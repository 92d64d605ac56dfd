"""Sentences for people who decide: no word of the field is needed to read them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fl_lightning.lab.worth import BOOSTING, LENGTHS, LINEAR, LOCAL
from fl_lightning.lab.worth.silos import Answer, Facts, Measured, Silo
from fl_lightning.lab.worth.statistics import LEAST, LEAST_UNITS, Name, too_few

VERDICTS = ("gains", "harmed", "no difference that matters", "cannot tell yet")
METRICS: dict[Name, str] = {
    "accuracy": "share of cases judged right",
    "balanced_accuracy": "share of cases judged right, mean over the classes",
    "auroc": "how well cases of a class are ranked above the others (AUROC)",
    "mae": "mean error",
}
MARGIN = 0.02
"""Default of the margin. Below it some thousands of samples are needed to say that nothing matters
(simulated)."""


HEAVY_TAIL = (
    "a few large errors decide its interval, which holds for these samples and says nothing of "
    "rarer ones"
)
KINDS = {LINEAR: "a simple weighted sum of its columns", BOOSTING: "a model of small trees"} | {
    label: "its network" if length == 1 else f"its network, trained {length} times as long"
    for label, length in zip(LOCAL, LENGTHS, strict=True)
}
"""What a silo does alone, for readers."""


def as_good(kind: str) -> str:
    """Why a silo does not gain although its interval says so."""
    return f"{KINDS[kind]}, made of its own samples, is as good"


def default_margin(alone: float, metric: Name) -> float:
    """2 points; of mae as much of the silo's own error, since it has the target's unit."""
    return MARGIN * alone if metric == "mae" else MARGIN


def why_not(silo: Silo, metric: Name) -> str:
    """Why a silo gets no verdict; empty where it does."""
    if not len(silo.samples):
        return "all its samples lie in another silo, too"
    size = min(silo.size, len(silo.samples))
    return too_few(metric, silo.samples.labels, size, silo.units, silo.kind)


def amount(value: float, metric: Name) -> str:
    """A difference: in points of a hundred, or in the target's unit."""
    return f"{value:.3g}" if metric == "mae" else f"{100 * value:.1f}"


def signed(value: float, metric: Name) -> str:
    """The same with its sign."""
    return f"{value:+.3g}" if metric == "mae" else f"{100 * value:+.1f}"


def score(value: float, metric: Name) -> str:
    """A score: in percent, or in the target's unit."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.4g}" if metric == "mae" else f"{100 * value:.1f}"


def unit_of(metric: Name) -> str:
    """What `amount` counts."""
    return "" if metric == "mae" else " points"


def of_silo(answer: Answer, measured: Measured) -> str:
    """One silo's sentence."""
    notes = _notes(answer, measured)
    return " ".join([_main(answer, measured), *notes])


def _main(answer: Answer, measured: Measured) -> str:
    metric, name = measured.metric, answer.silo.name
    if answer.estimate is None:
        why = answer.reason or f"{METRICS[metric]} is not defined on its samples"
        return f"No answer for {name}: {why}."
    low, high, unit = amount(answer.low, metric), amount(answer.high, metric), unit_of(metric)
    if answer.reason:
        return f"No verdict: {answer.reason}. The gain lies between {low} and {high}{unit}."
    gain = amount(abs(answer.estimate.gain), metric)
    if answer.verdict == "gains":
        what = f"its error falls by {gain}" if metric == "mae" else f"it gains {gain} points"
        best = KINDS[answer.alone_kind]
        return f"Joining pays: {what} (between {low} and {high}) over {best}, its best alone."
    if answer.verdict == "harmed":
        what = f"its error rises by {gain}" if metric == "mae" else f"it loses {gain} points"
        ends = f"between {amount(-answer.high, metric)} and {amount(-answer.low, metric)}"
        return f"Joining harms: {what} ({ends})."
    widest = amount(max(abs(answer.low), abs(answer.high)), metric)
    if answer.verdict == "no difference that matters":
        return f"It makes no difference that matters: any difference is below {widest}{unit}."
    return (
        f"Cannot tell yet: the gain lies between {low} and {high}{unit}. "
        f"{_what_would_tell(answer, measured)}"
    )


def _what_would_tell(answer: Answer, measured: Measured) -> str:
    """How the interval gets narrower: by more repetitions, or by more own samples. Never what the
    verdict would be."""
    one, metric = answer.estimate, measured.metric
    assert one is not None
    later, more = one.half_after(2 * one.cycles), ""
    if later < 0.9 * one.half:
        more = (
            f"Twice as many repetitions would bring it to about "
            f"±{amount(later, metric)}{unit_of(metric)}; "
        )
    target = narrower(one.half, 1.0 if metric != "mae" else answer.margin / MARGIN)
    count, kind = answer.silo.independent
    needed = one.samples_for(count, target)
    if needed is None:
        rest = (
            f"more own {kind} alone would hardly narrow it, since it owes too much to the luck of "
            f"single trainings."
        )
    else:
        known = f"within ±{amount(target, metric)}{unit_of(metric)}"
        rest = f"with about {needed} own {kind} we would know it to {known}."
    return more + (rest if more else rest.capitalize())


def narrower(half: float, unit: float = 1.0) -> float:
    """The half-width that is promised next: the widest round one well below `half`, or half of it.

    Args:
        half: that was reached.
        unit: of mae what counts as 100 points; 1 otherwise.
    """
    return max(
        (w * unit for w in (0.01, 0.02, 0.03, 0.05, 0.1) if w * unit < half / 1.2), default=half / 2
    )


def _notes(answer: Answer, measured: Measured) -> list[str]:
    """What else is to be known of a silo's samples."""
    silo, notes = answer.silo, []
    for number, count in silo.shared.items():
        other = next(a.silo for a in measured.answers if a.silo.number == number)
        if count == silo.size == other.size:
            notes.append(f"It is a copy of {other.name}: all {count} samples are the same.")
        else:
            notes.append(
                f"{count} of its {silo.size} samples lie in {other.name}, too; they are not "
                f"counted."
            )
    if silo.units and not answer.reason:
        notes.append(f"Its samples are of {silo.units} {silo.kind}, which are what counts.")
    if silo.repeated and not silo.shared and not silo.units:
        notes.append(
            f"{silo.repeated} of its samples are there more than once; each counts as one."
        )
    return notes


def of_all(facts: Mapping[str, Any], measured: Measured) -> str:
    """The answer for all silos: the first sentence of the page."""
    counts, number = facts["counts"], facts["silos"]
    if "gain" not in facts:
        few = facts["silos_with_verdict"]
        return (
            f"There is no answer for all {number} silos together: only {few} have enough samples."
        )
    texts = {
        "gains": "{} gain{s}",
        "harmed": "{} lose{s}",
        "no difference that matters": "for {} it makes no difference that matters",
        "cannot tell yet": "for {} the data cannot tell yet",
    }
    parts = [
        text.format(counts[word], s="s" * (counts[word] == 1))
        for word, text in texts.items()
        if counts[word]
    ]
    listed = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    metric, unit = measured.metric, unit_of(measured.metric)
    if counts["gains"] and counts["harmed"]:
        begin = "It depends on the silo"
    elif -measured.margin < facts["low"] and facts["high"] < measured.margin:
        some = (
            "Some silos gain, but on"
            if counts["gains"]
            else "Some silos lose, but on"
            if counts["harmed"]
            else "On"
        )
        begin = f"{some} average joining makes no difference that matters"
    elif facts["low"] > 0 and not counts["harmed"]:
        begin = "Yes, on the whole joining pays"
    elif facts["high"] < 0:
        begin = "No, on average joining harms"
    elif facts["high"] < measured.margin and not counts["gains"]:
        begin = f"Any mean gain is small, below {amount(facts['high'], metric)}{unit}"
    elif facts["low"] > 0:
        begin = "On the whole joining pays, but not for everyone"
    else:
        begin = "It is not clear yet"
    sure = len(facts["surely_gain"])
    mean = f"the mean gain is {signed(facts['gain'], metric)}{unit}"
    ends = f"({signed(facts['low'], metric)} to {signed(facts['high'], metric)})"
    surely = (
        f" {sure} of them surely gain{'s' if sure == 1 else ''}, all silos considered together."
        if sure
        else ""
    )
    return f"{begin}: of {number} silos {listed}; {mean} {ends}.{surely}"


def alone(measured: Measured) -> str:
    """What the silos do best alone, and a warning where it is the longest training."""
    kinds = [answer.alone_kind for answer in measured.answers]
    counts = ", ".join(f"{KINDS[kind]} {kinds.count(kind)}" for kind in KINDS if kind in kinds)
    longest = [a.silo.name for a in measured.answers if a.alone_kind == LOCAL[-1]]
    text = f"Best alone, over all parts (silos): {counts}."
    if longest:
        text += (
            f" Of {len(longest)} silos that is the longest training, and an even longer one may be "
            f"better: repeat with more rounds (--federation.rounds, another --out)."
        )
    return text


def beforehand(facts: Facts, cycles: int, metric: Name = "accuracy") -> list[str]:
    """What can be seen at all with so many samples, before the work begins: gains that four of five
    such measurements find, by the widths that were simulated for accuracy (docs/decisions/0027).
    How alike samples of one unit are cannot be known before, so that it is said what can be seen at
    best."""
    lines = [*facts.notes]
    kinds = list(zip(facts.sizes, facts.counts or [0] * len(facts.sizes), strict=True))
    for size, count in sorted(set(kinds)):
        those = [n for n, own in zip(facts.names, kinds, strict=True) if own == (size, count)]
        listed = f"({', '.join(those[:5])}{', ...' if len(those) > 5 else ''})"
        of = f"of {count} {facts.kind} " if count else ""
        seen = f"a gain above about {1.4 * _width(size, cycles):.1f} points can be seen"
        if metric != "accuracy":
            seen = seen.replace("gain", "gain in accuracy")
            seen = f"{seen} (of {metric} no such width was simulated)"
        if size < LEAST:
            seen = f"too few for a verdict, which takes {LEAST}"
        elif 0 < count < LEAST_UNITS:
            seen = f"too few {facts.kind} for a verdict, which takes {LEAST_UNITS}"
        elif metric == "mae":
            continue  # an error has a unit of its own
        elif count:
            seen = f"at best {seen}; the more alike the samples of one, the greater it must be"
        lines.append(f"{size} samples {of}{listed}: {seen}")
    return lines


def _width(size: int, cycles: int) -> float:
    """Half-width of an interval over so many samples, in points: simulated; at 1,000 1.5 times
    that, as with networks (docs/decisions/0027)."""
    known = np.log([20, 60, 200, 1000])
    widths = np.log(
        {1: [27, 12, 4.9, 2.2], 2: [25, 10.8, 4.5, 1.9]}.get(cycles, [24, 9.6, 3.7, 1.5])
    )
    x, slope = math.log(size), (widths[-1] - widths[-2]) / (known[-1] - known[-2])
    return math.exp(
        widths[-1] + slope * (x - known[-1]) if x > known[-1] else np.interp(x, known, widths)
    )
