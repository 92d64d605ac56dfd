"""A study's pictures: curves by round with bands over seeds, intervals of paired differences, mean
ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.foundation.metric import ACCURACY, FURTHER, MODELS
from fl_lightning.lab.report.figures import COLOURS
from fl_lightning.lab.report.vector import Kind, image, keep
from fl_lightning.lab.study.cells import Cell
from fl_lightning.lab.study.compare import Compared, Ranks, Row
from fl_lightning.lab.study.grid import by_key
from fl_lightning.lab.study.tables import MARK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.5
"""Inches of a panel's width: a column of most papers, or the text of a page with one."""
ACROSS = 2
"""Panels beside each other."""


def draw(cells: Sequence[Cell], compared: Compared) -> dict[str, tuple[Figure, str]]:
    """The pictures that there is something for, by the name of their file, each with what it shows
    in words."""
    made: dict[str, tuple[Figure, str]] = {}
    judges = list(dict.fromkeys(row.judge for row in compared.rows))
    metric = FURTHER.get(cells[0].metric, ACCURACY)
    for judge in judges:
        end, words = f"-{judge}" * (len(judges) > 1), f" ({MODELS[judge]})"
        own = [cell for cell in cells if cell.judge == judge and _curve([cell]) is not None]
        if own:
            settings = by_key(own, lambda cell: cell.setting)
            figure = _panels(settings, 3.4, lambda axes, those: _curves(axes, those, metric.words))
            band = "mean over seeds; bands are one standard deviation over seeds on either side"
            made[f"{metric.name}-by-round{end}"] = figure, f"{metric.words} by round{words}: {band}"
        rows = [row for row in compared.rows if row.judge == judge and row.difference is not None]
        if rows:
            height = 1.0 + 0.28 * len({row.method for row in rows})
            figure = _panels(by_key(rows, lambda row: row.setting), height, _forest, one_scale=True)
            kind = "intervals of 95 % for the mean difference of new seeds; hollow: no interval"
            made[f"differences-to-{_plain(str(rows[0].baseline))}{end}"] = (
                figure,
                f"paired differences{words}: {kind}",
            )
    if compared.ranks:
        words = "mean ranks over settings; bars join methods that do not differ"
        made["mean-ranks"] = draw_ranks(compared.ranks), words
    return made


def write(pictures: dict[str, tuple[Figure, str]], folder: Path, kind: Kind) -> None:
    """Write each picture to a file of its own in `folder`, as `vector.keep`."""
    keep(
        folder,
        kind,
        {name: image(name, figure, kind, MARK) for name, (figure, _) in pictures.items()},
    )


def as_svg(pictures: dict[str, tuple[Figure, str]]) -> list[tuple[str, str]]:
    """SVG elements for a page, each with what it shows; without the addresses that a file of its
    own would need."""
    drawn = (
        (image(name, figure, "svg").decode(), words) for name, (figure, words) in pictures.items()
    )
    addresses = re.compile(r'<metadata>.*?</metadata>| xmlns(:\w+)?="[^"]*"', re.DOTALL)
    return [(addresses.sub("", text[text.index("<svg") :]), words) for text, words in drawn]


def _panels(
    contents: dict[str, Any],
    height: float,
    draw_one: Callable[[Axes, Any], None],
    one_scale: bool = False,
) -> Figure:
    """A panel of `height` inches for each setting, which is its title. `one_scale`: all have the
    same x axis."""
    from matplotlib.figure import Figure

    across = min(ACROSS, len(contents))
    down = -(-len(contents) // across)
    figure = Figure(figsize=(WIDTH * across, (height + 0.3) * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False, sharex=one_scale).ravel()
    for axes, (setting, content) in zip(panels, contents.items(), strict=False):
        draw_one(axes, content)
        axes.set_title(_text(setting), fontsize=10)
        axes.tick_params(labelbottom=True)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(contents) :]:
        axes.set_visible(False)
    return figure


def _curve(cells: Sequence[Cell]) -> tuple[np.ndarray, np.ndarray] | None:
    """Rounds, (T,), and of each seed the mean score, (seeds, T), in those rounds that all seeds
    have judged."""
    scores = [
        {int(row["round"]): row[cell.column] for row in cell.run.judged(cell.column)}
        for cell in cells
    ]
    rounds = sorted(set.intersection(*map(set, scores)))
    return (
        (np.array(rounds), np.array([[by[t] for t in rounds] for by in scores])) if rounds else None
    )


def _curves(axes: Axes, cells: Sequence[Cell], words: str) -> None:
    """A line for each method, and a band over its seeds."""
    from matplotlib.ticker import PercentFormatter

    for number, label in enumerate(dict.fromkeys(cell.label for cell in cells)):
        curve = _curve([cell for cell in cells if cell.label == label])
        if curve is None:
            continue
        rounds, scores = curve
        mean, colour = scores.mean(axis=0), COLOURS[number % len(COLOURS)]
        # colours begin anew from the eleventh on
        dashes = ("-", "--", ":")[number // len(COLOURS) % 3]
        spread = scores.std(axis=0, ddof=1) if len(scores) > 1 else None
        look: dict[str, Any] = {"color": colour, "linewidth": 1.5, "label": f"\u200b{_text(label)}"}
        if len(rounds) == 1:  # a line and a band would not be seen
            axes.errorbar(rounds, mean, spread, fmt="o", capsize=3, **look)
            continue
        if spread is not None:
            axes.fill_between(
                rounds, mean - spread, mean + spread, color=colour, alpha=0.18, linewidth=0
            )
        axes.plot(rounds, mean, dashes, **look)
    axes.set(xlabel="round", ylabel=f"{words}, mean over clients")
    if axes.dataLim.width == 0:  # one round
        axes.set_xticks([axes.dataLim.x0])
    else:
        axes.locator_params(axis="x", integer=True)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small", ncols=1 + (len(axes.lines) > 6))


def _forest(axes: Axes, rows: Sequence[Row]) -> None:
    """A line for each method: the mean difference in points and its interval, the first at the
    top."""
    for place, row in enumerate(rows):
        middle = 100 * (row.difference or 0.0)
        known = row.low is not None and row.high is not None
        if row.low is not None and row.high is not None:
            axes.plot([100 * row.low, 100 * row.high], [place, place], color="black", linewidth=1.3)
        axes.plot(
            middle,
            place,
            "o",
            color="black",
            markersize=5,
            markerfacecolor="black" if known else "white",
        )
    axes.axvline(0, color="grey", linewidth=1)
    axes.set_yticks(range(len(rows)), [_text(row.method) for row in rows])
    axes.set(
        ylim=(len(rows) - 0.5, -0.5), xlabel=f"difference to {_text(str(rows[0].baseline))}, points"
    )
    axes.grid(alpha=0.3, axis="x")


def _text(words: str) -> str:
    """As matplotlib takes it: no formula between dollars."""
    return words.replace("$", r"\$")


def _plain(label: str) -> str:
    """A label within a file's name."""
    return "".join(c if c.isalnum() or c in "=.+-" else "-" for c in label)


def draw_ranks(ranks: Sequence[Ranks]) -> Figure:
    """The critical-difference picture (Demsar, JMLR 2006), a panel for each judge.

    Bars join methods that pairwise Wilcoxon-Holm cannot tell apart.
    """
    from matplotlib.figure import Figure

    lines = [1 + (len(rank.methods) + 1) // 2 + len(rank.cliques) for rank in ranks]
    figure = Figure(
        figsize=(9.0, 0.6 * len(ranks) + 0.32 * sum(lines)), dpi=150, layout="constrained"
    )
    panels = figure.subplots(len(ranks), 1, squeeze=False, height_ratios=lines)[:, 0]
    for axes, rank in zip(panels, ranks, strict=True):
        _panel(axes, rank)
    return figure


def _panel(axes: Axes, rank: Ranks) -> None:
    """The scale on top, rank 1 at its right; bars below it, then the names, the better half at the
    right."""
    number = len(rank.methods)
    axes.set(
        xlim=(number + 0.05, 0.95), ylim=((number + 1) // 2 + len(rank.cliques) + 0.5, 0), yticks=[]
    )
    axes.xaxis.tick_top()
    axes.set_xticks(range(1, number + 1))
    axes.spines[["left", "right", "bottom"]].set_visible(False)
    words = f"mean ranks over {rank.settings} settings (Friedman p = {rank.p:.2g})"
    axes.set_title(f"{MODELS[rank.judge]}: {words}", fontsize=10)
    place = dict(zip(rank.methods, rank.ranks, strict=True))
    for line, clique in enumerate(rank.cliques, start=1):
        ends = [place[clique[0]] - 0.03, place[clique[-1]] + 0.03]
        axes.plot(ends, [0.6 * line, 0.6 * line], color="black", linewidth=4, solid_capstyle="butt")
    order = sorted(rank.methods, key=lambda method: place[method])
    better, worse = order[: (number + 1) // 2], order[(number + 1) // 2 :][::-1]
    look: dict[str, Any] = {"color": "grey", "linewidth": 1, "clip_on": False}
    for methods, end, side, edge in (
        (better, 0.95, "left", 0.9),
        (worse, number + 0.05, "right", number + 0.1),
    ):
        for line, method in enumerate(methods):
            height = 0.6 * len(rank.cliques) + 1 + line
            axes.plot([place[method], place[method], end], [0, height, height], **look)
            axes.text(
                edge, height, f"{method}  {place[method]:.2f}", ha=side, va="center", fontsize=9
            )
