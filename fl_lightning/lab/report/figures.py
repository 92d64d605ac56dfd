"""The charts on runs: of the page, and as files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.foundation.metric import MODELS, Metric
from fl_lightning.lab.report import clients, newcomers
from fl_lightning.lab.report.tables import FLOPS, flop_unit, flops
from fl_lightning.lab.report.vector import (
    COLOURS,
    bars,
    curve,
    finish,
    heat,
    name_places,
    named,
    panels,
)
from fl_lightning.results.result import AXES, MIB, RunResult
from fl_lightning.results.runs import Comparison, same_but_seed, seeds_apart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Figures = dict[str, "Figure"]
BINS = 5
"""Points of a calibration curve, each of as many samples. Ours: a small client's test part has some
ten samples a point."""
RECEIVERS = 3
"""Clients whose layers are drawn in files, as by the callback `heatmaps`."""


def colours(runs: list[RunResult]) -> list[str]:
    """The colour of each run; runs that differ in nothing but their seed share one."""
    return [COLOURS[group % len(COLOURS)] for group in same_but_seed(runs)]


def kinds(metric: Metric) -> dict[str, str]:
    """Columns of metrics.csv that may be drawn by round, in words."""
    own = {
        metric.of("mean"): "mean, by each run's own judge",
        metric.of("worst"): "worst 10 %, by each run's own judge",
        metric.of("validation"): "on validation data, by each run's own judge",
    }
    return own | {metric.by(kind): words for kind, words in MODELS.items()}


def draw(runs: list[RunResult]) -> Figures:
    """The charts of the page by the names of their places and files."""
    drawn = accuracy(runs) | losses(runs) | fairness(runs) | ledger(runs) | costs(runs)
    drawn |= newcomer_curve(runs)
    for number, run in enumerate(runs):
        drawn |= certainty(run, number)
    for number, split in enumerate(clients.splits(runs)):
        drawn[f"split-{number}"] = _split(split)
    for number, run in enumerate(runs):
        if run.ledger and not constant(run.ledger.share):
            for way, verb in enumerate(("received", "sent")):
                names = ("round", "layer", f"share of the cohort that {verb} the layer")
                values, layers = run.ledger.share[way], run.ledger.layers
                figure = heat(values, layers, run.ledger.rounds, names, weights=False)
                drawn[f"ledger-{('down', 'up')[way]}-{number}"] = figure
    return drawn


def relations(runs: list[RunResult]) -> Figures:
    """For files: of each run's last kept round who receives from whom, and what the first
    receivers get of each layer."""
    drawn = {}
    for number, run in enumerate(runs):
        rounds = run.relation_rounds
        view = run.files.intact_relation(rounds[-1]) if rounds else None
        if view is None:
            continue
        words = f"weight in round {rounds[-1]}"
        receivers = [run.called(client) for client in view.receivers]
        sources = [run.called(client) for client in view.sources]
        names = ("source client", "receiving client", f"{words}, mean over the layers")
        drawn[f"relation-{number}"] = heat(view.rows.mean(axis=1), receivers, sources, names)
        for receiver, rows in list(zip(view.receivers, view.rows, strict=True))[:RECEIVERS]:
            figure = heat(rows, view.layers, sources, ("source client", "layer", words))
            drawn[f"relation-{number}-client-{receiver:03d}"] = figure
    return drawn


# ---------------------------------------------------------------- by round


def together(runs: list[RunResult], columns: Sequence[str]) -> list[list[int]]:
    """Numbers of runs that differ in their seed alone, by group, each of two or more that a band is
    made of.

    A run that has a value in one of `columns` of metrics.csv in no more than half as many rounds as
    the furthest, or none at all, is in no group: it would cut the others' band.
    """
    groups = []
    for members in seeds_apart(runs):
        done = {
            k: sum(any(name in row for name in columns) for row in runs[k].rows("metrics"))
            for k in members
        }
        groups.append([k for k in members if 2 * done[k] > max(done.values())])
    return [members for members in groups if len(members) > 1]


def cut_bands(runs: list[RunResult]) -> list[tuple[RunResult, RunResult]]:
    """Of each band that ends before its furthest run: the first run, and the one that ends it."""
    cut = []
    for members in together(runs, tuple(kinds(runs[0].metric))):
        done = [len(runs[k].rows("metrics")) for k in members]
        if min(done) < max(done):
            cut.append((runs[members[0]], runs[members[done.index(min(done))]]))
    return cut


def accuracy(runs: list[RunResult]) -> Figures:
    """Scores by round and by what it took to get there, of the column that runs are compared by;
    and by round of the other columns."""
    metric, first = runs[0].metric, Comparison.of(runs).column
    known = kinds(metric)
    having = [name for name in known if any(run.has(name) for run in runs)]
    drawn = {}
    for axis in AXES if first in having else ():
        figure, [axes] = panels([""], 3.9)
        _curves(axes, runs, {first: ("-", "")}, axis)
        if axes.lines or axes.containers:
            words = f"{metric.words} ({known.get(first, first)})"
            finish(axes, _axis_words(runs, axis), words, metric.rises)
            drawn["accuracy" if axis == "round" else f"accuracy-{axis}"] = figure
    others = [name for name in having if name != first]
    if others:
        figure, every = panels([known[name] for name in others])
        for axes, name in zip(every, others, strict=True):
            _curves(axes, runs, {name: ("-", "")})
            finish(axes, "round", metric.words, metric.rises)
        drawn["accuracy-kinds"] = figure
    return drawn


def unmeasured(runs: list[RunResult]) -> list[str]:
    """Names the axes that some runs have not measured in every round."""
    lines = []
    for axis, words in AXES.items():
        without = [run.name for run in runs if run.rows("metrics") and run.axis(axis) is None]
        if 0 < len(without) < len(runs):
            lines.append(f"Not measured in every round of {', '.join(without)}: {words}")
    return lines


def losses(runs: list[RunResult]) -> Figures:
    """Losses of local training by round, the proximal term alone where there is one."""
    columns = {"train_loss": ("-", " · loss"), "coaching_loss": (":", " · proximal term alone")}
    figure, [axes] = panels([""])
    _curves(axes, runs, columns, least=0.0)
    finish(axes, "round", "mean over the clients")
    axes.set_ylim(bottom=0)
    return {"losses": figure} if axes.lines or axes.containers else {}


def _curves(
    axes: Any,
    runs: list[RunResult],
    columns: dict[str, tuple[str, str]],
    axis: str = "round",
    least: float = -math.inf,
) -> None:
    """Lines of columns of metrics.csv over an axis; by round runs that differ in their seed alone
    are one line with a band.

    Args:
        columns: the dashes of each, and how the names of its lines end.
        least: columns without a value above it are left out.
    """
    bands = together(runs, tuple(columns)) if axis == "round" else []
    banded = {k for members in bands for k in members}
    groups = bands + [[k] for k in range(len(runs)) if k not in banded]
    colour = colours(runs)
    for members in sorted(groups):
        run, places = runs[members[0]], runs[members[0]].axis(axis)
        more = f" and {len(members) - 1} more seed{'s' * (len(members) > 2)}"
        label = run.name + more * (len(members) > 1)
        for column, (dashes, ending) in columns.items():
            values = [runs[k].column(column) for k in members]
            done = min(map(len, values))
            table = np.array([of_run[:done] for of_run in values])
            if places and (table > least).any():
                look = {"color": colour[members[0]], "linestyle": dashes}
                x = np.array(places[:done]) * (MIB / _unit_of(runs)[1] if axis == "mib" else 1)
                curve(axes, x, table, label + ending, look)


def _axis_words(runs: list[RunResult], axis: str) -> str:
    return f"{_unit_of(runs)[0]} sent" if axis == "mib" else AXES[axis]


def _unit_of(runs: list[RunResult]) -> tuple[str, int]:
    return unit([MIB * (run.spent("mib") or 0.0) for run in runs])


def unit(sizes: Sequence[float]) -> tuple[str, int]:
    """The unit that suits the greatest of `sizes` (bytes), and its bytes."""
    greatest = max((value for value in sizes if math.isfinite(value)), default=0)
    return ("GiB", 1024 * MIB) if greatest >= 10 * 1024 * MIB else ("MiB", MIB)


# ---------------------------------------------------------------- clients


def fairness(runs: list[RunResult]) -> Figures:
    """Every client's score, in order from the worst."""
    by = Comparison.of(runs)
    figure, [axes] = panels([""])
    for run, colour in zip(runs, colours(runs), strict=True):
        known = filter(math.isfinite, run.scores(by.kind)[0].values())
        scores = sorted(known, key=by.metric.merit)
        places = (np.arange(len(scores)) + 0.5) / max(1, len(scores))
        if scores:
            axes.plot(places, scores, "o-", color=colour, markersize=4, label=named(run.name))
    words = by.metric.words if by.kind is None else f"{by.metric.words} ({MODELS[by.kind]})"
    axes.set(xlim=(0, 1), xticks=[])
    finish(axes, "clients, from worst to best", words, by.metric.rises)
    return {"fairness-order": figure} if axes.lines else {}


def newcomer_curve(runs: list[RunResult]) -> Figures:
    """Held-out clients' mean score by labelled samples, with the spread over clients."""
    metric = runs[0].metric
    by_run = [newcomers.scores(run) for run in runs]
    counts = sorted({count for scores in by_run for count in scores})
    figure, [axes] = panels([""])
    for run, scores, colour in zip(runs, by_run, colours(runs), strict=True):
        if scores:
            x = [counts.index(count) for count in scores]
            means = [np.mean(values) for values in scores.values()]
            spread = [np.std(values) for values in scores.values()]
            axes.errorbar(
                x, means, spread, color=colour, marker="o", capsize=3, label=named(run.name)
            )
    axes.set_xticks(range(len(counts)), map(str, counts))
    # of a regression: in all
    samples = "labelled samples" + (" of each class" if metric.rises else "")
    finish(axes, samples, f"{metric.words}, mean and spread", metric.rises)
    return {"newcomers-curve": figure} if counts else {}


def certainty(run: RunResult, number: int) -> Figures:
    """Of the run with this number, by client: the ROC curve of two classes, and how often what is
    predicted with a probability comes true."""
    from sklearn.calibration import calibration_curve
    from sklearn.metrics import roc_auc_score, roc_curve

    table = run.predictions
    chances = table.filter(regex="^probability_")
    classes = [name.removeprefix("probability_") for name in chances]
    if not classes:
        return {}
    is_binary = len(classes) == 2
    # of two classes the second's probability; of several the predicted class's
    certain = chances.iloc[:, 1] if is_binary else chances.max(axis=1)
    expected = classes[1] if is_binary else np.array(classes)[chances.to_numpy().argmax(axis=1)]
    table = table.assign(certain=certain, true=table.label == expected)
    whose = f"of {classes[1]}" if is_binary else "of the predicted class"
    titles = ["ROC", "calibration"] if is_binary else ["calibration"]
    figure, every = panels(titles, 3.9)
    for place, (client, rows) in enumerate(table.groupby("client")):
        if place == len(COLOURS):
            break
        look: dict[str, Any] = {"color": COLOURS[place], "linewidth": 1.2}
        called = named(run.called(client))
        if is_binary and rows.true.nunique() == 2:
            false, true, _ = roc_curve(rows.true, rows.certain)
            area = f"{called}, {roc_auc_score(rows.true, rows.certain):.2f}"
            every[0].plot(false, true, label=area, **look)
        share, mean = calibration_curve(rows.true, rows.certain, n_bins=BINS, strategy="quantile")
        every[-1].plot(mean, share, marker=".", label=called, **look)
    for axes in every:
        axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle=":")
    if is_binary:
        finish(every[0], "false alarms", f"cases found ({classes[1]})", True)
    finish(every[-1], f"probability {whose}", "how often it is true", True)
    return {f"certainty-{number}": figure}


def _split(split: dict[str, Any]) -> Figure:
    """A dot for each client and class, its area in proportion to the samples."""
    counts = np.array(split["counts"])
    rows, columns = np.nonzero(counts)
    figure, [axes] = panels([""])
    axes.scatter(columns, rows, s=counts[rows, columns] / counts.max() * 90, color="#440154")
    name_places(axes, split["clients"], split["classes"], "client", "class")
    return figure


# ---------------------------------------------------------------- bytes and costs


def ledger(runs: list[RunResult]) -> Figures:
    """Bytes and layers by round, and what the bytes were."""
    drawn = {}
    columns = {"upload_bytes": ("-", " · up"), "download_bytes": (":", " · down")}
    name, size = unit([value for run in runs for c in columns for value in run.column(c)])
    sent, [axes] = panels([""])
    travelled, [of_layers] = panels([""])
    for run, colour in zip(runs, colours(runs), strict=True):
        for way, (column, (dashes, ending)) in enumerate(columns.items()):
            look = {"color": colour, "linestyle": dashes}
            if run.has(column):
                values = np.array([run.column(column)]) / size
                curve(axes, run.column("round"), values, run.name + ending, look)
            if run.ledger:
                layers = run.ledger.share[1 - way].sum(axis=0)[None]
                curve(of_layers, run.ledger.rounds, layers, run.name + ending, look)
    charts = {"ledger-bytes": (sent, f"{name} in the round")}
    # words say it, where all are constant
    if any(run.ledger and not constant(run.ledger.share) for run in runs):
        charts["ledger-layers"] = (travelled, "layers, mean over the cohort")
    for place, (figure, title) in charts.items():
        [axes] = figure.axes
        if axes.lines or axes.containers:
            finish(axes, "round", title)
            axes.set_ylim(bottom=0)
            drawn[place] = figure
    having = [run for run in runs if run.ledger]
    sizes = [run.ledger.kinds for run in having if run.ledger]
    names = dict.fromkeys(kind for of_run in sizes for kind, ways in of_run.items() if any(ways))
    name, size = unit([value for of_run in sizes for ways in of_run.values() for value in ways])
    parts = {
        kind: [value / size for of_run in sizes for value in reversed(of_run.get(kind, (0, 0)))]
        for kind in names
    }
    rows = [f"{run.name} {way}" for run in having for way in ("up", "down")]
    return drawn | ({"ledger-kinds": bars(rows, parts, f"{name} in all")} if parts else {})


def constant(share: np.ndarray) -> str:
    """In words what shares (2, L, rounds) are, where both ways are the same for every layer in
    every round; empty where there is something to see."""
    if not share.any():
        return "no layer was ever sent or received"
    least, most = share.min(axis=(1, 2)), share.max(axis=(1, 2))
    if (least != most).any():
        return ""
    down, up = (f"{value:.0%} of the cohort" for value in least)
    return f"in every round every layer was sent by {up} and received by {down}"


PHASES = {
    "seconds_client": "clients train",
    "seconds_server": "server mixes",
    "seconds_evaluation": "models are judged",
}
CHANNEL = {
    "channel_download_s": "download",
    "channel_compute_s": "local training",
    "channel_upload_s": "upload",
}


def costs(runs: list[RunResult]) -> Figures:
    """Seconds by phase, modelled seconds by what they went into, operations by what they were for.

    Operations are of runs that counted all of theirs alone: a part would look like the whole.
    """
    counted = [run for run in runs if flops(run) is not None]
    charts = (
        ("cost-seconds", PHASES, runs, "wall seconds"),
        ("cost-channel", CHANNEL, runs, "modelled seconds, slowest clients"),
        ("cost-flops", FLOPS, counted, ""),
    )
    drawn = {}
    for name, columns, listed, title in charts:
        having = [run for run in listed if run.has(*columns)]
        parts = {
            words: np.array([_sum(run.column(column)) for run in having])
            for column, words in columns.items()
            if any(run.has(column) for run in having)
        }
        if not parts:
            continue
        if columns is FLOPS:
            title, size = flop_unit(float(np.sum([*parts.values()], axis=0).max()))
            parts = {words: values / size for words, values in parts.items()}
        drawn[name] = bars([run.name for run in having], parts, title)
    return drawn


def _sum(values: list[float]) -> float:
    return sum(value for value in values if math.isfinite(value))
