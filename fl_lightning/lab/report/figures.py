"""The charts on runs: of the page, and as files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pandas import DataFrame, Series, concat

from fl_lightning.foundation.metric import MODELS, Metric
from fl_lightning.lab.report import clients, newcomers
from fl_lightning.lab.report.tables import FLOPS, flop_unit, flops
from fl_lightning.lab.report.vector import (
    COLOURS,
    bars,
    curve,
    finish,
    heat,
    legend_label,
    name_places,
    panels,
)
from fl_lightning.results.result import AXES, MIB, RunResult
from fl_lightning.results.runs import CommonScore, Runs, group_of_each, seed_groups

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Figures = dict[str, "Figure"]
BINS = 5
"""Points of a calibration curve, each of as many samples. Ours: a small client's test part has some
ten samples a point."""
RECEIVERS = 3
"""Clients whose layers are drawn in files, as by the callback `heatmaps`."""


def colours(runs: Runs) -> list[str]:
    """The colour of each run; runs that differ in nothing but their seed share one."""
    return [COLOURS[group % len(COLOURS)] for group in group_of_each(runs)]


def drawn_columns(metric: Metric) -> dict[str, str]:
    """Columns of metrics.csv that may be drawn by round, each with its title."""
    by_judge = {
        metric.of("mean"): "mean, by each run's own judge",
        metric.of("worst"): "worst 10 %, by each run's own judge",
        metric.of("validation"): "on validation data, by each run's own judge",
    }
    return by_judge | {metric.by(kind): words for kind, words in MODELS.items()}


def draw(runs: Runs) -> Figures:
    """The charts of the page by the names of their places and files."""
    drawn: Figures = {}
    for charts in (score_curves, losses, fairness, sizes, kinds, costs, newcomer_curve):
        drawn |= charts(runs)
    for number, split in enumerate(clients.splits(runs)):
        drawn[f"split-{number}"] = _split(split)
    for number, run in enumerate(runs):
        drawn |= certainty(run, number)
        if run.ledger and not words_if_constant(run.ledger.share):
            ways = (("down", "received"), ("up", "sent"))
            for share, (way, verb) in zip(
                run.ledger.share,
                ways,
                strict=True,
            ):
                names = ("round", "layer", f"share of the cohort that {verb} the layer")
                figure = heat(
                    share,
                    run.ledger.layers,
                    run.ledger.rounds,
                    names,
                    weights=False,
                )
                drawn[f"ledger-{way}-{number}"] = figure
    return drawn


def relations(runs: Runs) -> Figures:
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
        drawn[f"relation-{number}"] = heat(
            view.rows.mean(axis=1),
            receivers,
            sources,
            names,
        )
        names = ("source client", "layer", words)
        for receiver, rows in zip(
            view.receivers[:RECEIVERS],
            view.rows,
            strict=False,
        ):
            name = f"relation-{number}-client-{receiver:03d}"
            drawn[name] = heat(rows, view.layers, sources, names)
    return drawn


# ---------------------------------------------------------------- by round


def score_curves(runs: Runs) -> Figures:
    """Scores by round and by what it took to get there, of the column that runs are compared by;
    and by round of the other columns."""
    metric, compared = runs[0].metric, CommonScore.of(runs).column
    words = drawn_columns(metric)
    columns = [name for name in words if any(run.has(name) for run in runs)]
    drawn = {}
    title = f"{metric.words} ({words.get(compared)})"
    for axis in AXES if compared in columns else ():
        figure, [axes] = panels([""], 3.9)
        if _curves(axes, runs, {compared: ("-", "")}, axis):
            finish(axes, _axis_words(runs, axis), title, metric.rises)
            drawn["accuracy" if axis == "round" else f"accuracy-{axis}"] = figure
    others = [name for name in columns if name != compared]
    if others:
        figure, every = panels([words[name] for name in others])
        for axes, name in zip(every, others, strict=True):
            _curves(axes, runs, {name: ("-", "")})
            finish(axes, "round", metric.words, metric.rises)
        drawn["accuracy-kinds"] = figure
    return drawn


def unmeasured(runs: Runs) -> list[str]:
    """Names the axes that some runs have not measured in every round."""
    lines = []
    for axis, words in AXES.items():
        without = [run.name for run in runs if run.rows("metrics") and run.axis(axis) is None]
        if 0 < len(without) < len(runs):
            lines.append(f"Not measured in every round of {', '.join(without)}: {words}")
    return lines


def losses(runs: Runs) -> Figures:
    """Losses of local training by round, the proximal term alone where there is one."""
    columns = {"train_loss": ("-", " · loss"), "coaching_loss": (":", " · proximal term alone")}
    return _from_zero("losses", runs, columns, "mean over the clients", least=0.0)


def sizes(runs: Runs) -> Figures:
    """Bytes by round."""
    columns = {"upload_bytes": ("-", " · up"), "download_bytes": (":", " · down")}
    name, size = unit([value for run in runs for column in columns for value in run.column(column)])
    return _from_zero(
        "ledger-bytes",
        runs,
        columns,
        f"{name} in the round",
        size=size,
    )


def _from_zero(
    name: str, runs: Runs, columns: Mapping[str, tuple[str, str]], title: str, **keys: Any
) -> Figures:
    """A chart by round whose axis begins at 0; none without values. `keys`: of `_curves`."""
    figure, [axes] = panels([""])
    if not _curves(axes, runs, columns, **keys):
        return {}
    finish(axes, "round", title)
    axes.set_ylim(0, 1.05 * axes.dataLim.y1 or 1)
    return {name: figure}


def _curves(
    axes: Any,
    runs: Runs,
    columns: Mapping[str, tuple[str, str]],
    axis: str = "round",
    size: int = 1,
    least: float = -math.inf,
) -> bool:
    """Draws lines of columns of metrics.csv over an axis; by round runs that differ in their seed
    alone are one line with a band, over those that have got so far. Returns whether there is any.

    Args:
        columns: the dashes of each, and how the names of its lines end.
        size: what values are divided by.
        least: columns without a value above it are left out.
    """
    bands = seed_groups(runs) if axis == "round" else []
    single = set(range(len(runs))).difference(*bands)
    colour = colours(runs)
    scale = MIB / _unit_of(runs)[1] if axis == "mib" else 1
    for members in sorted([*bands, *([number] for number in single)]):
        label = runs[members[0]].name
        if others := len(members) - 1:
            label += f" and {others} more seed{'s' * (others > 1)}"
        places: list[float] = max((runs[number].axis(axis) or [] for number in members), key=len)
        for column, (dashes, ending) in columns.items():
            rows = [Series(runs[number].column(column), dtype=float) for number in members]
            table = concat(rows, axis=1).T / size
            if places and (table > least).any(axis=None):
                look = {"color": colour[members[0]], "linestyle": dashes}
                curve(
                    axes,
                    np.array(places) * scale,
                    table,
                    label + ending,
                    look,
                )
    return bool(axes.lines or axes.containers)


def _axis_words(runs: Runs, axis: str) -> str:
    return f"{_unit_of(runs)[0]} sent" if axis == "mib" else AXES[axis]


def _unit_of(runs: Runs) -> tuple[str, int]:
    return unit([MIB * (run.spent("mib") or 0.0) for run in runs])


def unit(sizes: Sequence[float]) -> tuple[str, int]:
    """The unit that suits the greatest of `sizes` (bytes), and its bytes."""
    greatest = max((value for value in sizes if math.isfinite(value)), default=0)
    return ("GiB", 1024 * MIB) if greatest >= 10 * 1024 * MIB else ("MiB", MIB)


# ---------------------------------------------------------------- clients


def fairness(runs: Runs) -> Figures:
    """Every client's score, in order from the worst."""
    by = CommonScore.of(runs)
    metric = by.metric
    figure, [axes] = panels([""])
    for run, colour in zip(runs, colours(runs), strict=True):
        defined = filter(math.isfinite, run.scores(by.kind)[0].values())
        scores = sorted(defined, key=metric.merit)
        if scores:
            places = (np.arange(len(scores)) + 0.5) / len(scores)
            label = legend_label(run.name)
            axes.plot(
                places,
                scores,
                "o-",
                color=colour,
                markersize=4,
                label=label,
            )
    words = metric.words if by.kind is None else f"{metric.words} ({MODELS[by.kind]})"
    axes.set(xlim=(0, 1), xticks=[])
    finish(axes, "clients, from worst to best", words, metric.rises)
    return {"fairness-order": figure} if axes.lines else {}


def newcomer_curve(runs: Runs) -> Figures:
    """Held-out clients' mean score by labelled samples, with the spread over clients."""
    metric = runs[0].metric
    by_run = [newcomers.scores(run) for run in runs]
    counts = sorted({count for scores in by_run for count in scores})
    figure, [axes] = panels([""])
    for run, scores, colour in zip(
        runs,
        by_run,
        colours(runs),
        strict=True,
    ):
        if scores:
            x = [counts.index(count) for count in scores]
            means, spread = zip(*((np.mean(v), np.std(v)) for v in scores.values()), strict=True)
            look: dict[str, Any] = {
                "color": colour,
                "marker": "o",
                "capsize": 3,
            }
            axes.errorbar(
                x,
                means,
                spread,
                label=legend_label(run.name),
                **look,
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
    classes = np.array([name.removeprefix("probability_") for name in chances])
    if not len(classes):
        return {}
    is_binary = len(classes) == 2
    certain = chances.max(axis=1)
    predicted = classes[chances.to_numpy().argmax(axis=1)]
    if is_binary:
        certain, predicted = chances.iloc[:, 1], classes[1]
    table = table.assign(certain=certain, true=table.label == predicted)
    titles = ["ROC", "calibration"] if is_binary else ["calibration"]
    figure, every = panels(titles, 3.9)
    by_client = itertools.islice(table.groupby("client"), len(COLOURS))
    for colour, (client, rows) in zip(COLOURS, by_client, strict=False):
        look: dict[str, Any] = {"color": colour, "linewidth": 1.2}
        name = legend_label(run.called(client))
        if is_binary and rows.true.nunique() == 2:
            false_rate, true_rate, _ = roc_curve(rows.true, rows.certain)
            area = roc_auc_score(rows.true, rows.certain)
            every[0].plot(
                false_rate,
                true_rate,
                label=f"{name}, {area:.2f}",
                **look,
            )
        share, mean = calibration_curve(
            rows.true,
            rows.certain,
            n_bins=BINS,
            strategy="quantile",
        )
        every[-1].plot(mean, share, marker=".", label=name, **look)
    whose = classes[1] if is_binary else "the predicted class"
    words = [("false alarms", f"cases found ({whose})")] if is_binary else []
    words.append((f"probability of {whose}", "how often it is true"))
    for axes, names in zip(every, words, strict=True):
        axes.plot(
            [0, 1],
            [0, 1],
            color="grey",
            linewidth=0.8,
            linestyle=":",
        )
        finish(axes, *names, percent=True)
    return {f"certainty-{number}": figure}


def _split(split: clients.Split) -> Figure:
    """A dot for each client and class, its area in proportion to the samples."""
    counts = split.counts.to_numpy().T
    rows, columns = np.nonzero(counts)
    figure, [axes] = panels([""])
    area = counts[rows, columns] / counts.max() * 90
    axes.scatter(columns, rows, s=area, color="#440154")
    name_places(axes, split.counts.index, split.counts.columns, "client", "class")
    return figure


# ---------------------------------------------------------------- bytes and costs


def kinds(runs: Runs) -> Figures:
    """Bars of the bytes of each run by kind."""
    table = DataFrame(
        {
            f"{run.name} {way}": {kind: sizes[k] for kind, sizes in run.ledger.kinds.items()}
            for run in runs
            if run.ledger
            for k, way in ((1, "up"), (0, "down"))
        }
    ).fillna(0)
    sent = table[(table > 0).any(axis=1)]
    if sent.empty:
        return {}
    name, size = unit(sent.to_numpy().ravel())
    parts = {
        kind: values / size
        for kind, values in zip(
            sent.index,
            sent.to_numpy(),
            strict=True,
        )
    }
    return {"ledger-kinds": bars(list(sent), parts, f"{name} in all")}


def words_if_constant(share: np.ndarray) -> str:
    """A sentence if, either way, the shares (2, L, rounds) of all layers in all rounds are equal;
    empty if there is something to see."""
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


def costs(runs: Runs) -> Figures:
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
        measured = [run for run in listed if run.has(*columns)]
        parts = {
            words: np.array([np.nansum(run.column(column)) for run in measured])
            for column, words in columns.items()
            if any(run.has(column) for run in measured)
        }
        if not parts:
            continue
        if columns is FLOPS:
            title, size = flop_unit(float(np.sum([*parts.values()], axis=0).max()))
            parts = {words: values / size for words, values in parts.items()}
        drawn[name] = bars([run.name for run in measured], parts, title)
    return drawn
