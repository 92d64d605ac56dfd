"""A study's pictures: curves by round with bands over seeds, intervals of paired differences, mean
ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pandas import DataFrame

from fl_lightning.foundation.metric import ACCURACY, FURTHER, MODELS
from fl_lightning.lab.report.vector import curve, finish, literal, looks, name_ticks, panels
from fl_lightning.lab.study.compare import Compared, Ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(runs: DataFrame, compared: Compared) -> dict[str, tuple[Figure, str]]:
    """The pictures that there is something for, by the name of their file, each with what it shows
    in words."""
    drawn: dict[str, tuple[Figure, str]] = {}
    table = compared.table
    metric = FURTHER.get(runs.metric.iloc[0], ACCURACY)
    methods = looks(table.method)
    judges = list(table.judge.unique())
    for judge in judges:
        end = f"-{judge}" if len(judges) > 1 else ""
        words = f" ({MODELS[judge]})"
        of_judge = runs[runs.model == judge]
        scored = of_judge[[_scores(row) != {} for row in of_judge.itertuples()]]
        if len(scored):
            band = "mean over seeds; bands are one standard deviation over seeds on either side"
            caption = f"{metric.words} by round{words}: {band}"
            drawn[f"{metric.name}-by-round{end}"] = _curves(scored, methods, metric.words), caption
        rows = table[(table.judge == judge) & table.difference.notna()]
        if len(rows):
            kind = "intervals of 95 % for the mean difference of new seeds; hollow: no interval"
            name = f"differences-to-{_plain(rows.baseline.iloc[0])}{end}"
            drawn[name] = _forest(rows, methods), f"paired differences{words}: {kind}"
    if compared.ranks:
        words = "mean ranks over settings; bars join methods that do not differ"
        drawn["mean-ranks"] = draw_ranks(compared.ranks), words
    return drawn


def _scores(run: Any) -> dict[float, float]:
    """The mean score of a run by round."""
    return {row["round"]: row[run.column] for row in run.run.judged(run.column)}


def _curves(
    runs: DataFrame,
    methods: dict[str, Any],
    words: str,
) -> Figure:
    """A panel for each setting, a line for each method in the rounds that all seeds have judged,
    and a band over its seeds."""
    settings = runs.groupby("setting", sort=False)
    figure, every = panels(list(settings.groups), 3.7)
    for axes, (_, of_setting) in zip(every, settings, strict=True):
        for label, of_method in of_setting.groupby("method", sort=False):
            scores = [_scores(run) for run in of_method.itertuples()]
            rounds = sorted(set.intersection(*map(set, scores)))
            values = np.array([[by_round[t] for t in rounds] for by_round in scores])
            if rounds:
                curve(axes, rounds, values, label, methods[label])
        finish(axes, "round", f"{words}, mean over clients", percent=True)
    return figure


def _forest(rows: DataFrame, methods: dict[str, Any]) -> Figure:
    """A panel for each setting, a line for each method: the mean difference in points and its
    interval, the first at the top."""
    settings = rows.groupby("setting", sort=False)
    height = 1.3 + 0.28 * rows.method.nunique()
    figure, every = panels(list(settings.groups), height, one_scale=True)
    for axes, (_, of_setting) in zip(every, settings, strict=True):
        for place, row in enumerate(of_setting.itertuples()):
            colour = methods[row.method]["color"]
            has_interval = row.low == row.low
            if has_interval:
                axes.plot([100 * row.low, 100 * row.high], [place, place], color=colour)
            face = colour if has_interval else "white"
            axes.plot(100 * row.difference, place, "o", color=colour, markerfacecolor=face)
        axes.axvline(0, color="grey", linewidth=1)
        names = [literal(method) for method in of_setting.method]
        name_ticks(axes.yaxis, range(len(names)), names)
        axes.set_ylim(len(of_setting) - 0.5, -0.5)
        axes.set_xlabel(f"difference to {literal(of_setting.baseline.iloc[0])}, points")
        axes.grid(alpha=0.3, axis="x")
    return figure


def _plain(label: str) -> str:
    """A label within a file's name."""
    return "".join(c if c.isalnum() or c in "=.+-" else "-" for c in label)


def draw_ranks(ranks: Sequence[Ranks]) -> Figure:
    """The critical-difference picture (Demsar, JMLR 2006), a panel for each judge.

    Bars join methods that pairwise Wilcoxon-Holm cannot tell apart.
    """
    from matplotlib.figure import Figure

    lines = [1 + (len(rank.methods) + 1) // 2 + len(rank.cliques) for rank in ranks]
    size = (9.0, 0.6 * len(ranks) + 0.32 * sum(lines))
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    every = figure.subplots(len(ranks), 1, squeeze=False, height_ratios=lines)
    for axes, rank in zip(every[:, 0], ranks, strict=True):
        _scale(axes, rank)
    return figure


def _scale(axes: Axes, rank: Ranks) -> None:
    """The scale on top, rank 1 at its right; bars below it, then the names, the better half at the
    right."""
    number = len(rank.methods)
    half = (number + 1) // 2
    height = half + len(rank.cliques) + 0.5
    axes.set(xlim=(number + 0.05, 0.95), ylim=(height, 0), yticks=[])
    axes.xaxis.tick_top()
    axes.set_xticks(range(1, number + 1))
    axes.spines[["left", "right", "bottom"]].set_visible(False)
    words = f"mean ranks over {rank.settings} settings (Friedman p = {rank.p:.2g})"
    axes.set_title(f"{MODELS[rank.judge]}: {words}", fontsize=10)
    place = dict(zip(rank.methods, rank.ranks, strict=True))
    for line, clique in enumerate(rank.cliques, start=1):
        ends = [place[clique[0]] - 0.03, place[clique[-1]] + 0.03]
        heights = [0.6 * line, 0.6 * line]
        axes.plot(ends, heights, linewidth=4, solid_capstyle="butt", color="black")
    order = sorted(rank.methods, key=lambda method: place[method])
    sides = ((order[:half], 0.95, "left"), (order[half:][::-1], number + 0.05, "right"))
    for methods, end, side in sides:
        edge = end - 0.05 if side == "left" else end + 0.05
        for line, method in enumerate(methods):
            height = 0.6 * len(rank.cliques) + 1 + line
            corners = [place[method], place[method], end], [0, height, height]
            axes.plot(*corners, color="grey", linewidth=1, clip_on=False)
            text = f"{method}  {place[method]:.2f}"
            axes.text(edge, height, text, ha=side, va="center", fontsize=9)
