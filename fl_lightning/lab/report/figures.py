"""Draw the charts on runs, for the page and for files."""

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
    label_axes,
    legend_label,
    panels,
)
from fl_lightning.results.result import AXES, MIB, RunResult
from fl_lightning.results.runs import CommonScore, Runs, group_of_each, seed_groups

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Figures = dict[str, "Figure"]
BINS = 5
"""Points of a calibration curve, with equally many samples each. Ours: a small client then has some
ten test samples a point."""
RECEIVERS = 3
"""Clients of which heatmaps by layer are written to files, as by the callback `heatmaps`."""


def colours(runs: Runs) -> list[str]:
    """Colour of each run; runs that differ only in their seed share one."""
    return [COLOURS[group % len(COLOURS)] for group in group_of_each(runs)]


def drawn_columns(metric: Metric) -> dict[str, str]:
    """Columns of metrics.csv with scores to draw by round, each with its title."""
    by_judge = {
        metric.of("mean"): "mean, by each run's own judge",
        metric.of("worst"): "worst 10 %, by each run's own judge",
        metric.of("validation"): "on validation data, by each run's own judge",
    }
    return by_judge | {metric.by(kind): words for kind, words in MODELS.items()}


def draw(runs: Runs) -> Figures:
    """Draw the charts of the page; keys are their ids in the page, and names of files."""
    drawn: Figures = {}
    for charts in (
        score_curves,
        losses,
        fairness,
        bytes_by_round,
        bytes_by_kind,
        costs,
        newcomer_curve,
    ):
        drawn |= charts(runs)
    for number, split in enumerate(clients.splits(runs)):
        drawn[f"split-{number}"] = _split(split)
    for number, run in enumerate(runs):
        drawn |= certainty(run, number)
        if run.ledger and not words_if_constant(run.ledger.share):
            directions = (("down", "received"), ("up", "sent"))
            for share, (direction, verb) in zip(
                run.ledger.share,
                directions,
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
                drawn[f"ledger-{direction}-{number}"] = figure
    return drawn


def relation_heatmaps(runs: Runs) -> Figures:
    """Draw each run's last stored relation: the mean over layers, and by layer the rows of the
    first `RECEIVERS` clients."""
    drawn = {}
    for number, run in enumerate(runs):
        rounds = run.relation_rounds
        view = run.files.intact_relation(rounds[-1]) if rounds else None
        if view is None:
            continue
        meaning = f"weight in round {rounds[-1]}"
        receivers = [run.client_label(client) for client in view.receivers]
        sources = [run.client_label(client) for client in view.sources]
        names = ("source client", "receiving client", f"{meaning}, mean over the layers")
        drawn[f"relation-{number}"] = heat(
            view.rows.mean(axis=1),
            receivers,
            sources,
            names,
        )
        names = ("source client", "layer", meaning)
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
    """Draw the score by which runs are compared over round, bytes and time; and all other scores
    over round."""
    metric, compared = runs[0].metric, CommonScore.of(runs).column
    titles = drawn_columns(metric)
    columns = [name for name in titles if any(run.has(name) for run in runs)]
    drawn = {}
    title = f"{metric.words} ({titles.get(compared)})"
    for axis in AXES if compared in columns else ():
        figure, [axes] = panels([""], 3.9)
        if _curves(axes, runs, {compared: ("-", "")}, axis):
            finish(axes, _axis_words(runs, axis), title, metric.rises)
            drawn["accuracy" if axis == "round" else f"accuracy-{axis}"] = figure
    others = [name for name in columns if name != compared]
    if others:
        figure, all_axes = panels([titles[name] for name in others])
        for axes, name in zip(all_axes, others, strict=True):
            _curves(axes, runs, {name: ("-", "")})
            finish(axes, "round", metric.words, metric.rises)
        drawn["accuracy-kinds"] = figure
    return drawn


def unmeasured(runs: Runs) -> list[str]:
    """Return a sentence for each quantity (bytes, a time) that some runs, but not all, lack in one
    or more rounds; it names these runs, whose curves are missing from the chart."""
    lines = []
    for axis, words in AXES.items():
        without = [run.name for run in runs if run.rows("metrics") and run.axis(axis) is None]
        if 0 < len(without) < len(runs):
            lines.append(f"Not measured in every round of {', '.join(without)}: {words}")
    return lines


def losses(runs: Runs) -> Figures:
    """Draw the loss of local training by round, and its proximal term as a line of its own."""
    columns = {"train_loss": ("-", " · loss"), "coaching_loss": (":", " · proximal term alone")}
    return _from_zero("losses", runs, columns, "mean over the clients", least=0.0)


def bytes_by_round(runs: Runs) -> Figures:
    """Draw uploaded and downloaded bytes by round."""
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
    name: str,
    runs: Runs,
    columns: Mapping[str, tuple[str, str]],
    title: str,
    **keys: Any,
) -> Figures:
    """Draw columns over round, from 0 up; returns no chart without values.

    `keys`: further arguments of `_curves`.
    """
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
    """Draw columns of metrics.csv over an axis. Over rounds, runs that differ only in their seed
    are one line with a band, over the runs that have reached each round.

    Args:
        axes: matplotlib's axes.
        runs: the runs.
        columns: by name of the column, the line style and the end of the line's label.
        axis: name of the axis in `AXES`.
        size: unit by which values are divided.
        least: columns without a value above it are left out.

    Returns:
        Whether anything was drawn.
    """
    bands = seed_groups(runs) if axis == "round" else []
    single_runs = set(range(len(runs))).difference(*bands)
    colour = colours(runs)
    scale = MIB / _unit_of(runs)[1] if axis == "mib" else 1
    for members in sorted([*bands, *([number] for number in single_runs)]):
        label = runs[members[0]].name
        if others := len(members) - 1:
            label += f" and {others} more seed{'s' * (others > 1)}"
        positions: list[float] = max((runs[number].axis(axis) or [] for number in members), key=len)
        for column, (dashes, ending) in columns.items():
            rows = [Series(runs[number].column(column), dtype=float) for number in members]
            table = concat(rows, axis=1).T / size
            if positions and (table > least).any(axis=None):
                look = {"color": colour[members[0]], "linestyle": dashes}
                curve(
                    axes,
                    np.array(positions) * scale,
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
    """Choose GiB or MiB for the greatest of `sizes` (bytes); returns its name and its bytes."""
    greatest = max((value for value in sizes if math.isfinite(value)), default=0)
    return ("GiB", 1024 * MIB) if greatest >= 10 * 1024 * MIB else ("MiB", MIB)


# ---------------------------------------------------------------- clients


def fairness(runs: Runs) -> Figures:
    """Draw all clients' scores, sorted from worst to best."""
    common = CommonScore.of(runs)
    metric = common.metric
    figure, [axes] = panels([""])
    for run, colour in zip(runs, colours(runs), strict=True):
        defined = filter(math.isfinite, run.scores(common.kind)[0].values())
        scores = sorted(defined, key=metric.merit)
        if scores:
            positions = (np.arange(len(scores)) + 0.5) / len(scores)
            label = legend_label(run.name)
            axes.plot(
                positions,
                scores,
                "o-",
                color=colour,
                markersize=4,
                label=label,
            )
    label_of_y = metric.words if common.kind is None else f"{metric.words} ({MODELS[common.kind]})"
    axes.set(xlim=(0, 1), xticks=[])
    finish(axes, "clients, from worst to best", label_of_y, metric.rises)
    return {"fairness-order": figure} if axes.lines else {}


def newcomer_curve(runs: Runs) -> Figures:
    """Draw held-out clients' mean score over their number of labelled samples, with the standard
    deviation over clients."""
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
            means = [np.mean(values) for values in scores.values()]
            spread = [np.std(values) for values in scores.values()]
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
    """Draw a run's calibration curves by client and, if there are two classes, its ROC curves.

    Args:
        run: the run.
        number: index of the run in the report, for the chart's name.
    """
    from sklearn.calibration import calibration_curve
    from sklearn.metrics import roc_auc_score, roc_curve

    table = run.predictions
    probabilities = table.filter(regex="^probability_")
    classes = np.array([name.removeprefix("probability_") for name in probabilities])
    if not len(classes):
        return {}
    is_binary = len(classes) == 2
    probability = probabilities.max(axis=1)
    predicted = classes[probabilities.to_numpy().argmax(axis=1)]
    if is_binary:
        probability, predicted = probabilities.iloc[:, 1], classes[1]
    table = table.assign(probability=probability, true=table.label == predicted)
    titles = ["ROC", "calibration"] if is_binary else ["calibration"]
    figure, all_axes = panels(titles, 3.9)
    by_client = itertools.islice(table.groupby("client"), len(COLOURS))
    for colour, (client, rows) in zip(COLOURS, by_client, strict=False):
        style: dict[str, Any] = {"color": colour, "linewidth": 1.2}
        name = legend_label(run.client_label(client))
        if is_binary and rows.true.nunique() == 2:
            false_rate, true_rate, _ = roc_curve(rows.true, rows.probability)
            area = roc_auc_score(rows.true, rows.probability)
            all_axes[0].plot(
                false_rate,
                true_rate,
                label=f"{name}, {area:.2f}",
                **style,
            )
        share, mean = calibration_curve(
            rows.true,
            rows.probability,
            n_bins=BINS,
            strategy="quantile",
        )
        all_axes[-1].plot(mean, share, marker=".", label=name, **style)
    class_name = classes[1] if is_binary else "the predicted class"
    labels = [("false alarms", f"cases found ({class_name})")] if is_binary else []
    labels.append((f"probability of {class_name}", "how often it is true"))
    for axes, names in zip(all_axes, labels, strict=True):
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
    """Draw a dot for each client and class, its area proportional to the training samples."""
    counts = split.counts.to_numpy().T
    rows, columns = np.nonzero(counts)
    figure, [axes] = panels([""])
    area = counts[rows, columns] / counts.max() * 90
    axes.scatter(columns, rows, s=area, color="#440154")
    label_axes(axes, split.counts.index, split.counts.columns, "client", "class")
    return figure


# ---------------------------------------------------------------- bytes and costs


def bytes_by_kind(runs: Runs) -> Figures:
    """Draw bars of each run's bytes by kind of content, up and down."""
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
    """Sentence that replaces the maps of sent and received layers, if all layers were sent alike in
    all rounds; empty if they were not.

    Args:
        share: (2, layers, rounds): share of the cohort that received each layer, and share that
            sent it.
    """
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
    """Draw bars of seconds by phase, modelled seconds of the channel by cause, and operations by
    purpose.

    Runs that did not count all operations are left out of the last: a part would look like the
    whole.
    """
    counted = [run for run in runs if flops(run) is not None]
    charts = (
        ("cost-seconds", PHASES, runs, "wall seconds"),
        ("cost-channel", CHANNEL, runs, "modelled seconds, slowest clients"),
        ("cost-flops", FLOPS, counted, ""),
    )
    drawn = {}
    for name, columns, runs_of_chart, title in charts:
        measured = [run for run in runs_of_chart if run.has(*columns)]
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
