"""Helpers of all charts (vector graphics, and PNG), by matplotlib: colours by method, curves with
bands, heatmaps, and files of them. Equal numbers give equal bytes."""

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
"""Legible on white and on black; from the eleventh method on they begin anew, dashed."""
DASHES = ("-", "--", ":")
LISTED = "figures.json"
"""Names of the pictures that reports have made in a folder."""
WIDTH = 5.5
"""Inches of a panel: a column of most papers, or the text of a page with one."""
DPI = 150
LINE = 0.18
"""Inches of a line of a legend, about."""
ABREAST = 45
"""Letters of all names below a picture, beyond which they would run into each other."""
LONGEST = 46
"""Letters of a name; a longer one would leave its axes no room."""
LETTERS = 66
"""Of a legend's line, with six for each dash."""


def looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour and dashes of each method, by its place: the same in all charts of a page."""
    looks = {}
    for number, name in enumerate(dict.fromkeys(names)):
        repeat, place = divmod(number, len(COLOURS))
        looks[name] = {
            "color": COLOURS[place],
            "linestyle": DASHES[repeat % len(DASHES)],
        }
    return looks


def panels(
    titles: Sequence[str], height: float = 0.62 * WIDTH, one_scale: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure with a panel of `height` inches for each title, two beside each other. `one_scale`:
    all have the same x axis."""
    from matplotlib.figure import Figure

    across = min(2, len(titles))
    down = math.ceil(len(titles) / across)
    size = (WIDTH * across, height * down)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    every = figure.subplots(down, across, squeeze=False, sharex=one_scale).ravel().tolist()
    for axes in every[len(titles) :]:
        axes.remove()
    for axes, title in zip(every, titles, strict=False):
        axes.set_title(literal(title), fontsize=10)
        axes.tick_params(labelbottom=True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, every[: len(titles)]


def curve(axes: Axes, x: Any, values: Any, label: str, look: Any) -> Any:
    """A line of means over `values` (seeds, T) that are there, in a band of one standard deviation
    (n - 1) on either side; places without a value are left out, a single place is a point with a
    bar."""
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
    """Name the axes and draw grid and legend, above the axes where names are many or long."""
    from matplotlib.ticker import PercentFormatter

    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    # one round: matplotlib would find no whole number beside it
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
    """Make room for more text: what else is there keeps its size."""
    figure: Any = axes.figure
    figure.set_figheight(figure.get_figheight() + inches)


def bars(rows: Sequence[str], parts: Mapping[str, Any], title: str) -> Figure:
    """Stacked bars, one for each row, with the `parts` of each."""
    figure, [axes] = panels([""], 1.2 + 0.3 * len(rows))
    left = np.zeros(len(rows))
    places = range(len(rows))
    for colour, (name, values) in zip(PARTS, parts.items(), strict=False):
        axes.barh(
            places,
            values,
            left=left,
            color=colour,
            label=legend_label(name),
        )
        left = left + values
    axes.set_yticks(places, [*map(literal, rows)])
    axes.invert_yaxis()
    axes.set_xlabel(title)
    axes.grid(alpha=0.3)
    # beside long names there is no room for it above the axes
    figure.legend(
        frameon=False,
        fontsize="small",
        loc="outside upper left",
        ncols=3,
    )
    return figure


PARTS = ("#4e79a7", "#f2a65a", "#76b7b2", "#b07aa1", "#9c9c9c")


def heat(
    values: np.ndarray,
    rows: Sequence[Any],
    columns: Sequence[Any],
    names: tuple[str, str, str],
    weights: bool = True,
) -> Figure:
    """`values` from 0 to 1, (rows, columns), as colours: `weights`, or shares.

    Args:
        names: of the columns, of the rows, and what the colours mean.
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
    name_places(axes, columns, rows, names[0], names[1])
    return figure


def name_places(axes: Axes, columns: Sequence[Any], rows: Sequence[Any], x: str, y: str) -> None:
    """Name both axes and the places on them, of many some ten each; long names below are turned,
    side by side."""
    for axis, names in ((axes.xaxis, columns), (axes.yaxis, rows)):
        shown = range(0, len(names), max(1, len(names) // 10))
        texts = [literal(str(names[k])) for k in shown]
        axis.set_ticks(shown, labels=texts)
        if axis is axes.xaxis and sum(map(len, texts)) > ABREAST:
            axis.set_ticks(shown, labels=texts, rotation=40, ha="right")
            _heighten(axes, 0.06 * max(map(len, texts)))
    axes.set(xlabel=x, ylabel=y)


def legend_label(label: str) -> str:
    """A label for the legend. Invisible first: matplotlib leaves out labels that begin with an
    underscore."""
    return f"\u200b{literal(label)}"


def literal(text: str) -> str:
    """A name as matplotlib takes it: no formula between dollars, and the middle of a long one left
    out."""
    short = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}…{text[-LONGEST // 2 :]}"
    return short.replace("$", r"\$")


# ---------------------------------------------------------------- files


def image(
    name: str,
    figure: Figure,
    kind: Kind,
    made_by: str | None = None,
) -> bytes:
    """A figure in a format; letters stay letters. `made_by`: kept in a PNG."""
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
    """An SVG element for a page, without the addresses that a file of its own would need."""
    text = image(name, figure, "svg").decode()
    addresses = r'<metadata>.*?</metadata>| xmlns(:\w+)?="[^"]*"'
    return re.sub(
        addresses,
        "",
        text[text.index("<svg") :],
        flags=re.DOTALL,
    )


def write(
    pictures: Mapping[str, Figure], folder: Path, kind: Kind, made_by: str = "fl-train report"
) -> None:
    """Write each picture to a file of its own, as `write_and_prune`."""
    contents = {name: image(name, figure, kind, made_by) for name, figure in pictures.items()}
    write_and_prune(folder, kind, contents)


def write_and_prune(folder: Path, kind: Kind, pictures: Mapping[str, bytes]) -> None:
    """Write these pictures, and delete others that an earlier report has written in this format.

    Raises:
        BadInput: a file that was not written by a report has one of their names.
    """
    before: set[str] = set()
    with contextlib.suppress(OSError, ValueError, TypeError):
        before = {
            Path(name).name for name in json.loads((folder / LISTED).read_text(encoding="utf-8"))
        }
    contents = {f"{name}.{kind}": content for name, content in pictures.items()}
    for name in contents:
        is_free = name in before or not (folder / name).exists()
        requirement = "exists and was not written by a report: move it, or give another --out"
        check("figures", kind, is_free, f"{folder / name} {requirement}")
    stale = {name for name in before - contents.keys() if name.endswith(f".{kind}")}
    for name in stale:
        (folder / name).unlink(missing_ok=True)
    # before the pictures: after a kill the next report knows them
    write_whole(folder / LISTED, json.dumps(sorted({*before, *contents} - stale)))
    for name, content in contents.items():
        write_whole(folder / name, content)
