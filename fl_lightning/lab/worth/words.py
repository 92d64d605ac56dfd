"""Sentences for people who decide, without technical terms."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from fl_lightning.lab.worth import BOOSTING, LENGTHS, LINEAR, LOCAL
from fl_lightning.lab.worth.silos import Answer, Measured, Silo, SiloFacts
from fl_lightning.lab.worth.statistics import LEAST, LEAST_UNITS, Estimate, Name, why_too_few

VERDICTS = ("gains", "harmed", "no difference that matters", "cannot tell yet")
METRICS: dict[Name, str] = {
    "accuracy": "share of cases judged right",
    "balanced_accuracy": "share of cases judged right, mean over the classes",
    "auroc": "how well cases of a class are ranked above the others (AUROC)",
    "mae": "mean error",
}
MARGIN = 0.02
"""Default margin. A smaller one takes thousands of samples for the verdict "no difference that
matters" (simulated)."""
HEAVY_TAIL = (
    "a few large errors decide its interval, which holds for these samples and says nothing of "
    "rarer ones"
)
ALONE_IN_WORDS = {
    LINEAR: "a simple weighted sum of its columns",
    BOOSTING: "a model of small trees",
} | {
    label: "its network" if length == 1 else f"its network, trained {length} times as long"
    for label, length in zip(LOCAL, LENGTHS, strict=True)
}
"""Names of the rows of `ALONE` for readers."""


def alone_is_as_good(row: str) -> str:
    """Say why a silo gets no verdict although its interval is above 0: a model that it trains alone
    scores as high as the federated one.

    Args:
        row: name of this model, one of `ALONE`.
    """
    return f"{ALONE_IN_WORDS[row]}, made of its own samples, is as good"


def default_margin(alone: float, metric: Name) -> float:
    """Return 2 points, or for mae 2 % of `alone`, the silo's error without the others."""
    return MARGIN * alone if metric == "mae" else MARGIN


def why_no_verdict(silo: Silo, metric: Name) -> str:
    """Say why a silo gets no verdict: all its samples are also in other silos, or they are too few
    (`why_too_few`); empty if it gets a verdict."""
    if not len(silo.samples):
        return "all its samples lie in another silo, too"
    size = min(silo.size, len(silo.samples))
    return why_too_few(
        metric,
        silo.samples.labels,
        size,
        silo.units,
        silo.kind,
    )


def amount(value: float, metric: Name) -> str:
    """Format a difference in points, or for mae in the target's unit."""
    return f"{value:.3g}" if metric == "mae" else f"{100 * value:.1f}"


def signed(value: float, metric: Name) -> str:
    """Format a difference like `amount`, always with its sign."""
    return f"{value:+.3g}" if metric == "mae" else f"{100 * value:+.1f}"


def score(value: float, metric: Name) -> str:
    """Format a score in percent, or for mae in the target's unit."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.4g}" if metric == "mae" else f"{100 * value:.1f}"


def unit_of(metric: Name) -> str:
    """Return the word after an `amount`: " points", or for mae nothing."""
    return "" if metric == "mae" else " points"


def silo_sentence(answer: Answer, measured: Measured) -> str:
    """Write the sentences for one silo: verdict, and notes on its samples."""
    return " ".join([_main(answer, measured), *_notes(answer, measured)])


def _main(answer: Answer, measured: Measured) -> str:
    metric = measured.metric
    if answer.estimate is None:
        reason = answer.reason or f"{METRICS[metric]} is not defined on its samples"
        return f"No answer for {answer.silo.name}: {reason}."
    low, high, unit = amount(answer.low, metric), amount(answer.high, metric), unit_of(metric)
    if answer.reason:
        return f"No verdict: {answer.reason}. The gain lies between {low} and {high}{unit}."
    gain = amount(abs(answer.estimate.gain), metric)
    if answer.verdict == "gains":
        change = f"its error falls by {gain}" if metric == "mae" else f"it gains {gain} points"
        best = ALONE_IN_WORDS[answer.alone_kind]
        return f"Joining pays: {change} (between {low} and {high}) over {best}, its best alone."
    if answer.verdict == "harmed":
        change = f"its error rises by {gain}" if metric == "mae" else f"it loses {gain} points"
        least, most = amount(-answer.high, metric), amount(-answer.low, metric)
        return f"Joining harms: {change} (between {least} and {most})."
    if answer.verdict == "no difference that matters":
        widest = amount(max(abs(answer.low), abs(answer.high)), metric)
        return f"It makes no difference that matters: any difference is below {widest}{unit}."
    sentence = f"Cannot tell yet: the gain lies between {low} and {high}{unit}."
    return f"{sentence} {_narrowed_by(answer, answer.estimate, metric)}"


def _narrowed_by(answer: Answer, estimate: Estimate, metric: Name) -> str:
    """Say how far more repetitions or more own samples would narrow the interval."""
    half_later, unit = estimate.half_after(2 * estimate.cycles), unit_of(metric)
    target = next_half_width(estimate.half, answer.margin / MARGIN if metric == "mae" else 1.0)
    count, kind = answer.silo.independent
    needed = estimate.samples_for(count, target)
    half_width = f"±{amount(target, metric)}{unit}"
    by_samples = f"with about {needed} own {kind} we would know it to within {half_width}."
    if needed is None:
        by_samples = (
            f"more own {kind} alone would hardly narrow it, since it owes too much to the luck of "
            "single trainings."
        )
    if half_later >= 0.9 * estimate.half:
        return by_samples.capitalize()
    half_width = f"±{amount(half_later, metric)}{unit}"
    return f"Twice as many repetitions would bring it to about {half_width}; {by_samples}"


def next_half_width(half: float, unit: float = 1.0) -> float:
    """Choose a smaller half-width to aim at: 10, 5, 3, 2 or 1 points, else half of the present one.

    Args:
        half: the present half-width.
        unit: error that counts as 100 points, for mae; otherwise 1.
    """
    widths = [width * unit for width in (0.01, 0.02, 0.03, 0.05, 0.1)]
    return max((width for width in widths if width < half / 1.2), default=half / 2)


def _notes(answer: Answer, measured: Measured) -> list[str]:
    """Write sentences on copies and groups among a silo's samples."""
    silo, notes = answer.silo, []
    for number, count in silo.shared.items():
        holder = next(a.silo for a in measured.answers if a.silo.number == number)
        if count == silo.size == holder.size:
            notes.append(f"It is a copy of {holder.name}: all {count} samples are the same.")
        else:
            note = f"{count} of its {silo.size} samples lie in {holder.name}, too"
            notes.append(f"{note}; they are not counted.")
    if silo.units and not answer.reason:
        notes.append(f"Its samples are of {silo.units} {silo.kind}, which are what counts.")
    if silo.repeated and not silo.shared and not silo.units:
        notes.append(
            f"{silo.repeated} of its samples are there more than once; each counts as one."
        )
    return notes


def overall_sentence(facts: Mapping[str, Any], measured: Measured) -> str:
    """Write the headline of the page; `facts`: `Measured.consortium` without its sentence."""
    counts, number = facts["counts"], facts["silos"]
    if "gain" not in facts:
        few = f"only {facts['silos_with_verdict']} have enough samples"
        return f"There is no answer for all {number} silos together: {few}."
    clauses = [
        text.format(counts[word], s="s" * (counts[word] == 1))
        for word, text in COUNTED.items()
        if counts[word]
    ]
    all_clauses = " and ".join(filter(None, [", ".join(clauses[:-1]), clauses[-1]]))
    metric, unit = measured.metric, unit_of(measured.metric)
    gain, low, high = (signed(facts[key], metric) for key in ("gain", "low", "high"))
    text = f"of {number} silos {all_clauses}; the mean gain is {gain}{unit} ({low} to {high})."
    if sure := len(facts["surely_gain"]):
        text += f" {sure} of them surely gain{'s' * (sure == 1)}, all silos considered together."
    return f"{_on_the_whole(facts, measured)}: {text}"


COUNTED = {
    "gains": "{} gain{s}",
    "harmed": "{} lose{s}",
    "no difference that matters": "for {} it makes no difference that matters",
    "cannot tell yet": "for {} the data cannot tell yet",
}
"""Clause of the headline on the number of silos with each verdict."""


def _on_the_whole(facts: Mapping[str, Any], measured: Measured) -> str:
    """Write the headline's first clause."""
    counts, low, high = facts["counts"], facts["low"], facts["high"]
    if counts["gains"] and counts["harmed"]:
        return "It depends on the silo"
    if -measured.margin < low and high < measured.margin:
        begin = "On"
        if counts["gains"] or counts["harmed"]:
            begin = f"Some silos {'gain' if counts['gains'] else 'lose'}, but on"
        return f"{begin} average joining makes no difference that matters"
    if low > 0 and not counts["harmed"]:
        return "Yes, on the whole joining pays"
    if high < 0:
        return "No, on average joining harms"
    if high < measured.margin and not counts["gains"]:
        most = f"{amount(high, measured.metric)}{unit_of(measured.metric)}"
        return f"Any mean gain is small, below {most}"
    if low > 0:
        return "On the whole joining pays, but not for everyone"
    return "It is not clear yet"


def best_alone(measured: Measured) -> str:
    """Say for how many silos each row of `ALONE` is best. For silos whose best row is the longest
    training, warn that an even longer one may be better."""
    rows = [answer.alone_kind for answer in measured.answers]
    counts = ", ".join(
        f"{ALONE_IN_WORDS[row]} {rows.count(row)}" for row in ALONE_IN_WORDS if row in rows
    )
    text = f"Best alone, over all parts (silos): {counts}."
    longest = rows.count(LOCAL[-1])
    if not longest:
        return text
    return (
        f"{text} Of {longest} silos that is the longest training, and an even longer one may be "
        "better: repeat with more rounds (--federation.rounds, another --out)."
    )


def visible_gains(facts: SiloFacts, cycles: int, metric: Name = "accuracy") -> list[str]:
    """Write lines to print before training: `facts.notes`, then for each number of samples the
    smallest gain that can be seen, or that it is too small for a verdict.

    A gain can be seen if four of five measurements would find it, by widths that were simulated for
    accuracy and independent samples (docs/decisions/0027). For groups of dependent samples it is a
    lower bound.
    """
    names_by_size: dict[tuple[int, int], list[str]] = defaultdict(list)
    counts = facts.counts or [0] * len(facts.sizes)
    for name, size, count in zip(
        facts.names,
        facts.sizes,
        counts,
        strict=True,
    ):
        names_by_size[size, count].append(name)
    lines = [*facts.notes]
    for (size, count), names in sorted(names_by_size.items()):
        silos = f"({', '.join(names[:5])}{', ...' * (len(names) > 5)})"
        groups = f"of {count} {facts.kind} " if count else ""
        statement = f"a gain above about {1.4 * _width(size, cycles):.1f} points can be seen"
        if metric != "accuracy":
            statement = statement.replace("gain", "gain in accuracy")
            statement += f" (of {metric} no such width was simulated)"
        if size < LEAST:
            statement = f"too few for a verdict, which takes {LEAST}"
        elif 0 < count < LEAST_UNITS:
            statement = f"too few {facts.kind} for a verdict, which takes {LEAST_UNITS}"
        elif metric == "mae":
            continue  # an error has a unit of its own
        elif count:
            statement = (
                f"at best {statement}; the more alike the samples of one, the greater it must be"
            )
        lines.append(f"{size} samples {groups}{silos}: {statement}")
    return lines


WIDTHS = {
    1: (27, 12, 4.9, 2.2),
    2: (25, 10.8, 4.5, 1.9),
    3: (24, 9.6, 3.7, 1.5),
}
"""Half-widths in points with 20, 60, 200 and 1,000 samples, by number of cycles (3: or more).
Simulated; the last is 1.5 times the simulated one, as with networks (docs/decisions/0027)."""


def _width(size: int, cycles: int) -> float:
    """Interpolate `WIDTHS` between logarithms of sizes; beyond the last, extrapolate."""
    sizes, widths = np.log([20, 60, 200, 1000]), np.log(WIDTHS[min(cycles, 3)])
    x = math.log(size)
    if x > sizes[-1]:
        slope = (widths[-1] - widths[-2]) / (sizes[-1] - sizes[-2])
        return math.exp(widths[-1] + slope * (x - sizes[-1]))
    return math.exp(np.interp(x, sizes, widths))
