"""Sentences for people who decide: no word of the field is needed to read them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fl_lightning.foundation.metric import MOST_NAMED
from fl_lightning.lab.worth.silos import Answer, Measured, Silo
from fl_lightning.lab.worth.statistics import LEAST, LEAST_RECORDINGS, Name, too_few

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


def default_margin(silos: Sequence[Silo], metric: Name) -> float:
    """2 points; of mae as much of the mean error of training alone: it has the target's own
    unit."""
    if metric != "mae":
        return MARGIN
    errors = [silo.rows["local"].right.mean() for silo in silos if len(silo.samples)]
    return MARGIN * float(np.mean(errors))


def why_not(silo: Silo, metric: Name) -> str:
    """Why a silo gets no verdict; empty where it does."""
    if not len(silo.samples):
        return "all its samples lie in another silo, too"
    return too_few(metric, silo.samples.labels, min(silo.size, len(silo.samples)), silo.recordings)


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
        return f"Joining pays: {what} (between {low} and {high})."
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
    target = narrower(one.half, 1.0 if metric != "mae" else measured.margin / MARGIN)
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
    if silo.recordings and not answer.reason:
        notes.append(
            f"Its samples are windows of {silo.recordings} recordings, which are what counts."
        )
    if silo.repeated and not silo.shared:
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
    elif facts["high"] < measured.margin and not counts["gains"]:
        begin = "No, on average joining does not pay"
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


def of_training(measured: Measured) -> list[str]:
    """How many steps the silos took, and a warning where more of them alone would have helped."""
    training = measured.training
    if training is None:
        return []
    federated = [steps for steps in training.federated.values() if steps is not None]
    ours = (
        f"{_range(federated)} with {measured.method}"
        if federated
        else f"unknown with {measured.method}"
    )
    lines = [
        f"Steps of local training of a silo: {_range([*training.alone.values()])} alone, {ours}."
    ]
    if training.falling:
        names = ", ".join(training.falling[:MOST_NAMED]) + (
            ", ..." if len(training.falling) > MOST_NAMED else ""
        )
        lines.append(
            f"Warning: the loss of training alone still falls when it ends ({names}): a gain there "
            f"may come from more "
            "training, which a silo can do alone. Repeat with more rounds (--federation.rounds, "
            "another --out)."
        )
    return lines


def _range(counts: Sequence[int]) -> str:
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def beforehand(
    names: Sequence[str],
    sizes: Sequence[int],
    cycles: int,
    recordings: Sequence[int] = (),
    metric: Name = "accuracy",
) -> list[str]:
    """What can be seen at all with so many samples, before the work begins: gains that four of five
    such measurements find, by the widths that were simulated for accuracy (docs/decisions/0027).
    `recordings` of each silo, where samples are windows: how alike those of one are cannot be known
    before, so that it is said what can be seen at best."""
    lines = []
    kinds = list(zip(sizes, recordings or [0] * len(sizes), strict=True))
    for size, count in sorted(set(kinds)):
        those = [name for name, own in zip(names, kinds, strict=True) if own == (size, count)]
        listed = f"({', '.join(those[:5])}{', ...' if len(those) > 5 else ''})"
        begin = (
            f"{size} windows of {count} recordings {listed}"
            if count
            else f"{size} samples {listed}"
        )
        seen = f"a gain above about {1.4 * _width(size, cycles):.1f} points can be seen"
        if metric != "accuracy":
            seen = (
                f"{seen.replace('gain', 'gain in accuracy')} (of {metric} no such width was "
                f"simulated)"
            )
        if size < LEAST:
            seen = f"too few for a verdict, which takes {LEAST}"
        elif 0 < count < LEAST_RECORDINGS:
            seen = f"too few recordings for a verdict, which takes {LEAST_RECORDINGS}"
        elif metric == "mae":
            continue  # an error has a unit of its own
        elif count:
            seen = (
                f"at best {seen}; the more alike the windows of a recording, the greater it must be"
            )
        lines.append(f"{begin}: {seen}")
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
