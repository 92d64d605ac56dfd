"""Draw charts with matplotlib: colours by method, curves with bands, heatmaps; write them as SVG,
PDF or PNG. Equal numbers give equal bytes."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fl_lightning.configuration.config import check
from fl_lightning.drawing.heatmap import (
    MISSING,
    NEGATIVE,
    WEIGHT_TICKS,
    colour_bar_ends,
    weight_scale,
)
from fl_lightning.foundation.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["svg", "pdf", "png"]
COLOURS = (
    *("#2a78d6", "#e8672c", "#1a9e6d", "#b8860b", "#7a5cd0"),
    *("#d6455d", "#0f9bb3", "#c456a8", "#6b8e23", "#8a7f74"),
)
"""Colours of methods, legible on white and on black; from the eleventh method on they are used
again, with dashes."""
DASHES = ("-", "--", ":")
LISTED = "figures.json"
"""File that lists the pictures that reports have written to its folder."""
WIDTH = 5.5
"""Width of a panel in inches: a column of most papers, or the text of a one-column page."""
DPI = 150
LINE = 0.18
"""Approximate height of a legend's line in inches."""
ABREAST = 45
"""Letters that fit below a picture; with more, names are turned."""
LONGEST = 46
"""Letters of a name at most; longer ones would leave no room for the axes."""
LETTERS = 66
"""Letters of a legend's line; each entry's dash takes six."""


def looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour and line style of each method, by its position in `names`, for all charts of a
    page."""
    looks = {}
    for number, name in enumerate(dict.fromkeys(names)):
        repeat, index = divmod(number, len(COLOURS))
        looks[name] = {
            "color": COLOURS[index],
            "linestyle": DASHES[repeat % len(DASHES)],
        }
    return looks


def panels(
    titles: Sequence[str], height: float = 0.62 * WIDTH, one_scale: bool = False
) -> tuple[Figure, list[Axes]]:
    """Make a figure with a panel for each title, in two columns.

    Args:
        titles: titles of the panels.
        height: height of a panel in inches.
        one_scale: whether all panels share one x axis.
    """
    from matplotlib.figure import Figure

    across = min(2, len(titles))
    down = math.ceil(len(titles) / across)
    size = (WIDTH * across, height * down)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    all_axes = figure.subplots(down, across, squeeze=False, sharex=one_scale).ravel().tolist()
    for axes in all_axes[len(titles) :]:
        axes.remove()
    for axes, title in zip(all_axes, titles, strict=False):
        axes.set_title(literal(title), fontsize=10)
        axes.tick_params(labelbottom=True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, all_axes[: len(titles)]


def curve(axes: Axes, x: Any, values: Any, label: str, look: Any) -> Any:
    """Draw the mean over seeds as a line, in a band of one standard deviation (n - 1) on either
    side; a single point gets an error bar instead.

    Args:
        axes: matplotlib's axes.
        x: (T,) positions.
        values: (seeds, T); NaN are ignored, and positions without any value are left out.
        label: name in the legend.
        look: keywords of `Axes.plot`, with `color`.
    """
    from pandas import DataFrame

    table = DataFrame(values).set_axis(list(x), axis=1).dropna(axis=1, how="all")
    x, mean, spread = (part.to_numpy() for part in (table.columns, table.mean(), table.std()))
    look = {"linewidth": 1.5, "label": legend_label(label), **look}
    if len(x) == 1:
        return axes.errorbar(x, mean, spread, fmt="o", capsize=3, **look)
    if np.isfinite(spread).any():
        colour = look["color"]
        axes.fill_between(
            x,
            mean - spread,
            mean + spread,
            color=colour,
            alpha=0.18,
            linewidth=0,
        )
    return axes.plot(x, mean, **look)


def finish(axes: Axes, x: str, y: str, percent: bool = False) -> None:
    """Complete a chart: name the axes, draw a grid and a legend, which lies above the axes if its
    names are many or long.

    Args:
        axes: the chart.
        x: label of the x axis.
        y: label of the y axis.
        percent: whether numbers on the y axis are shares, to be shown in per cent.
    """
    from matplotlib.ticker import PercentFormatter

    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    # a single round: matplotlib finds no other whole number for a tick
    if x == "round" and axes.dataLim.width == 0:
        axes.set_xticks([axes.dataLim.x0])
    elif x == "round":
        axes.locator_params(axis="x", integer=True)
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _, labels = axes.get_legend_handles_labels()
    look: dict[str, Any] = {"frameon": False, "fontsize": "small"}
    longest = max(map(len, labels), default=0)
    columns = max(1, min(3, LETTERS // (6 + longest)))
    if columns == 1 or len(labels) > 4:
        look |= {
            "loc": "lower left",
            "bbox_to_anchor": (0.0, 1.06),
            "ncols": columns,
        }
        _heighten(axes, LINE * math.ceil(len(labels) / columns))
    if labels:
        axes.legend(**look)


def _heighten(axes: Axes, inches: float) -> None:
    """Make the figure taller for more text; everything else keeps its size."""
    figure: Any = axes.figure
    figure.set_figheight(figure.get_figheight() + inches)


def bars(rows: Sequence[str], parts: Mapping[str, Any], title: str) -> Figure:
    """Draw a stacked bar for each row.

    Args:
        rows: names of the bars.
        parts: by name of a part, its value in each bar.
        title: label of the x axis.
    """
    figure, [axes] = panels([""], 1.2 + 0.3 * len(rows))
    left = np.zeros(len(rows))
    positions = range(len(rows))
    for colour, (name, values) in zip(PARTS, parts.items(), strict=False):
        axes.barh(
            positions,
            values,
            left=left,
            color=colour,
            label=legend_label(name),
        )
        left = left + values
    axes.set_yticks(positions, [*map(literal, rows)])
    axes.invert_yaxis()
    axes.set_xlabel(title)
    axes.grid(alpha=0.3)
    # of the figure: above the axes, long row names leave no room
    figure.legend(
        frameon=False,
        fontsize="small",
        loc="outside upper left",
        ncols=3,
    )
    return figure


PARTS = ("#4e79a7", "#f2a65a", "#76b7b2", "#b07aa1", "#9c9c9c")
"""Colours of the parts of stacked bars."""


def heat(
    values: np.ndarray,
    rows: Sequence[Any],
    columns: Sequence[Any],
    names: tuple[str, str, str],
    weights: bool = True,
) -> Figure:
    """Draw values from 0 to 1 as a heatmap.

    Args:
        values: (rows, columns).
        rows: names of the rows.
        columns: names of the columns.
        names: labels of the x axis, the y axis and the colours.
        weights: whether values are weights of a relation, with that colour scale and its ticks;
            otherwise the scale is linear.
    """
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    figure, [axes] = panels([""])
    colours = colormaps["viridis"].with_extremes(bad=MISSING, under=NEGATIVE)
    norm = weight_scale() if weights else Normalize(0.0, 1.0)
    ticks: dict[str, Any] = {"ticks": WEIGHT_TICKS, "format": "%g"} if weights else {}
    picture = axes.imshow(
        values,
        colours,
        norm,
        aspect="auto",
        interpolation="nearest",
    )
    low, high = np.nanmin(values, initial=0.0), np.nanmax(values, initial=0.0)
    ends: Any = colour_bar_ends(float(low), float(high), 1.0)
    figure.colorbar(picture, ax=axes, label=names[2], extend=ends, **ticks).minorticks_off()
    label_axes(axes, columns, rows, names[0], names[1])
    return figure


def label_axes(
    axes: Axes,
    columns: Sequence[Any],
    rows: Sequence[Any],
    x: str,
    y: str,
) -> None:
    """Label both axes and the ticks on them.

    Of many names about ten are shown; long names of columns are turned.

    Args:
        axes: matplotlib's axes.
        columns: names along the x axis.
        rows: names along the y axis.
        x: label of the x axis.
        y: label of the y axis.
    """
    for axis, names in ((axes.xaxis, columns), (axes.yaxis, rows)):
        shown = range(0, len(names), max(1, len(names) // 10))
        texts = [literal(str(names[k])) for k in shown]
        axis.set_ticks(shown, labels=texts)
        if axis is axes.xaxis and sum(map(len, texts)) > ABREAST:
            axis.set_ticks(shown, labels=texts, rotation=40, ha="right")
            _heighten(axes, 0.06 * max(map(len, texts)))
    axes.set(xlabel=x, ylabel=y)


def legend_label(label: str) -> str:
    """Prefix a label with an invisible letter, since matplotlib leaves out labels that begin with
    an underscore."""
    return f"\u200b{literal(label)}"


def literal(text: str) -> str:
    """Escape a name for matplotlib, so that dollars enclose no formula, and cut out the middle of a
    long one."""
    short = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}…{text[-LONGEST // 2 :]}"
    return short.replace("$", r"\$")


# ---------------------------------------------------------------- files


def image(
    name: str,
    figure: Figure,
    kind: Kind,
    made_by: str | None = None,
) -> bytes:
    """Render a figure; text in it stays text instead of outlines.

    Args:
        name: name from which ids in an SVG are derived, so that two on one page do not collide.
        figure: the figure.
        kind: format.
        made_by: name of the program, stored in a PNG.
    """
    import matplotlib as mpl

    undated: dict[Kind, Any] = {
        "svg": {"Date": None},
        "pdf": {"CreationDate": None},
        "png": {"Software": made_by},
    }
    buffer = io.BytesIO()
    letters: Any = {
        "svg.fonttype": "none",
        "pdf.fonttype": 42,
        "svg.hashsalt": name,
    }
    with mpl.rc_context(letters):
        figure.savefig(buffer, format=kind, metadata=undated[kind])
    return buffer.getvalue()


def svg(name: str, figure: Figure) -> str:
    """Render an SVG element for a page, without the namespaces and metadata that a file needs."""
    text = image(name, figure, "svg").decode()
    left_out = r'<metadata>.*?</metadata>| xmlns(:\w+)?="[^"]*"'
    return re.sub(
        left_out,
        "",
        text[text.index("<svg") :],
        flags=re.DOTALL,
    )


def write(
    pictures: Mapping[str, Figure], folder: Path, kind: Kind, made_by: str = "fl-train report"
) -> None:
    """Render each figure and write it to a file of its own, by `write_and_prune`."""
    contents = {name: image(name, figure, kind, made_by) for name, figure in pictures.items()}
    write_and_prune(folder, kind, contents)


def write_and_prune(folder: Path, kind: Kind, pictures: Mapping[str, bytes]) -> None:
    """Write files, and delete those that an earlier report has written in the same format.

    Args:
        folder: folder of the files.
        kind: format.
        pictures: content of each file, by its name without ending.

    Raises:
        BadInput: a file of one of these names exists that no report has written.
    """
    written: set[str] = set()
    with contextlib.suppress(OSError, ValueError, TypeError):
        written = {
            Path(name).name for name in json.loads((folder / LISTED).read_text(encoding="utf-8"))
        }
    contents = {f"{name}.{kind}": content for name, content in pictures.items()}
    for name in contents:
        check(
            "figures",
            kind,
            name in written or not (folder / name).exists(),
            f"{folder / name} exists and was not written by a report; move it, or give another "
            "--out",
        )
    stale = {name for name in written - contents.keys() if name.endswith(f".{kind}")}
    for name in stale:
        (folder / name).unlink(missing_ok=True)
    # listed before they are written: after a kill the next report may replace them
    write_whole(folder / LISTED, json.dumps(sorted({*written, *contents} - stale)))
    for name, content in contents.items():
        write_whole(folder / name, content)
