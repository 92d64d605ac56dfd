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
from fl_lightning.drawing.heatmap import MISSING, NEGATIVE, WEIGHT_TICKS, extension, weight_scale
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
LETTER, LINE = 0.08, 0.18
"""Inches of a letter and of a line, about."""
ABREAST = 45
"""Letters of all names below a picture, beyond which they would run into each other."""
LONGEST = 46
"""Letters of a name; a longer one would leave its axes no room."""
LONG = 30
"""Letters of a name, from which on a legend has a line for each."""


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
    figure = Figure(figsize=(WIDTH * across, height * down), dpi=DPI)
    every = (
        figure.subplots(
            down,
            across,
            squeeze=False,
            sharex=one_scale,
        )
        .ravel()
        .tolist()
    )
    for axes, title in zip(every, titles, strict=False):
        axes.set_title(literal(title), fontsize=10, y=1.0)
        axes.tick_params(labelbottom=True)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in every[len(titles) :]:
        axes.set_visible(False)
    return figure, every[: len(titles)]


def curve(
    axes: Axes,
    x: Any,
    values: np.ndarray,
    label: str,
    look: Any,
) -> Any:
    """A line of means over `values` (seeds, T), in a band of one standard deviation (n - 1) on
    either side; places without a value are left out, a single place is a point with a bar."""
    mean = values.mean(axis=0)
    finite = np.isfinite(mean)
    x, mean = np.asarray(x)[finite], mean[finite]
    spread = values.std(axis=0, ddof=1)[finite] if len(values) > 1 else None
    look = {"linewidth": 1.5, "label": legend_label(label), **look}
    if len(x) == 1:
        return axes.errorbar(
            x,
            mean,
            spread,
            fmt="o",
            capsize=3,
            **look,
        )
    if spread is not None:
        shade = {
            "color": look["color"],
            "alpha": 0.18,
            "linewidth": 0,
        }
        axes.fill_between(
            x,
            mean - spread,
            mean + spread,
            **shade,
        )
    return axes.plot(x, mean, **look)


def finish(
    axes: Axes,
    x: str,
    y: str,
    percent: bool = False,
) -> None:
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
    if not labels:
        return
    look: dict[str, Any] = {
        "frameon": False,
        "fontsize": "small",
    }
    if columns := _columns_above(labels):
        look |= {
            "loc": "lower left",
            "bbox_to_anchor": (0.0, 1.06),
            "ncols": columns,
        }
        figure: Any = axes.figure
        figure.set_figheight(figure.get_figheight() + LINE * _lines_above(labels))
    axes.legend(**look)


def _columns_above(labels: Sequence[str]) -> int:
    """Columns of a legend that is too large to lie within the axes; 0: it lies there."""
    if max(map(len, labels)) > LONG:
        return 1
    return 3 if len(labels) > 4 else 0


def _lines_above(labels: Sequence[str]) -> float:
    """Lines that such a legend takes."""
    columns = _columns_above(labels)
    return math.ceil(len(labels) / columns) + 1.5 if columns else 0.0


def place(figure: Figure) -> None:
    """Leave room around each panel for its texts, by the number of their letters.

    The layouts of matplotlib measure all texts several times, which takes longer than to draw them.
    """
    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    legends = [legend for axes in panels if (legend := axes.get_legend())]
    labels = [[text.get_text() for text in legend.get_texts()] for legend in legends]
    lines = max([0.0, *map(_lines_above, labels)]) + 1.3 * len(figure.legends)
    lines += 1.5 * any(axes.get_title() for axes in panels)
    left = 0.45 + LETTER * max(_longest(axes.yaxis) for axes in panels)
    right = 0.15 + 0.7 * (len(panels) < len(figure.axes))
    bottom = 0.6 + 0.7 * LETTER * max(_longest(axes.xaxis, ABREAST) for axes in panels)
    top = 0.1 + LINE * lines
    first: Any = panels[0].get_subplotspec()
    rows, columns = first.get_topmost_subplotspec().get_gridspec().get_geometry()
    width, height = figure.get_size_inches()
    across, down = width / columns - left - right, height / rows - bottom - top
    figure.subplots_adjust(
        left / width,
        bottom / height,
        1 - right / width,
        1 - top / height,
    )
    figure.subplots_adjust(wspace=(left + right) / across, hspace=(bottom + top) / down)
    for axes in panels:
        axes.xaxis.set_label_coords(0.5, -(bottom - 0.25) / down)
        axes.yaxis.set_label_coords(-(left - 0.25) / across, 0.5)


def _longest(axis: Any, abreast: int = 0) -> int:
    """Letters of the longest tick label on an axis, 6 for numbers; 0 if all labels together have at
    most `abreast` letters, and so fit side by side."""
    letters = [len(name) for name in getattr(axis.get_major_formatter(), "seq", ["0.0125"])]
    return max(letters) if sum(letters) > abreast else 0


def bars(
    rows: Sequence[str],
    parts: Mapping[str, Any],
    title: str,
) -> Figure:
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
    name_ticks(axes.yaxis, places, [*map(literal, rows)])
    axes.invert_yaxis()
    axes.set_xlabel(title)
    axes.grid(alpha=0.3)
    # beside long names there is no room for it above the axes
    figure.legend(
        frameon=False,
        fontsize="small",
        loc="upper left",
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
    norm: Normalize = Normalize(0.0, 1.0)
    ticks: dict[str, Any] = {}
    if weights:
        norm, ticks = (
            weight_scale(),
            {
                "ticks": WEIGHT_TICKS,
                "format": "%g",
            },
        )
    picture = axes.imshow(
        values,
        colours,
        norm,
        aspect="auto",
        interpolation="nearest",
    )
    low, high = np.nanmin(values, initial=0.0), np.nanmax(values, initial=0.0)
    ends: Any = extension(float(low), float(high), 1.0)
    bar = figure.colorbar(
        picture,
        ax=axes,
        label=names[2],
        extend=ends,
        **ticks,
    )
    bar.minorticks_off()
    name_places(
        axes,
        columns,
        rows,
        names[0],
        names[1],
    )
    return figure


def name_places(
    axes: Axes,
    columns: Sequence[Any],
    rows: Sequence[Any],
    x: str,
    y: str,
) -> None:
    """Name both axes and the places on them, of many some ten each; long names below are turned,
    side by side."""
    for axis, names in ((axes.xaxis, columns), (axes.yaxis, rows)):
        shown = range(0, len(names), max(1, len(names) // 10))
        texts = [literal(str(names[k])) for k in shown]
        name_ticks(axis, shown, texts)
        if axis is axes.xaxis and sum(map(len, texts)) > ABREAST:
            name_ticks(
                axis,
                shown,
                texts,
                rotation=40,
                ha="right",
            )
            # what else is there keeps its room
            figure: Any = axes.figure
            figure.set_figheight(figure.get_figheight() + 0.06 * max(map(len, texts)))
    axes.set(xlabel=x, ylabel=y)


def name_ticks(axis: Any, places: Sequence[int], texts: Sequence[str], **look: Any) -> None:
    """Write the texts at their places on an axis."""
    from matplotlib.ticker import FixedFormatter

    axis.set_ticks(places, texts, **look)
    axis.set_major_formatter(FixedFormatter(texts))


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
    if figure.get_layout_engine() is None:
        place(figure)
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
) -> list[Path]:
    """Write each picture to a file of its own, as `write_and_prune`."""
    contents = {
        name: image(
            name,
            figure,
            kind,
            made_by,
        )
        for name, figure in pictures.items()
    }
    return write_and_prune(folder, kind, contents)


def write_and_prune(
    folder: Path,
    kind: Kind,
    pictures: Mapping[str, bytes],
) -> list[Path]:
    """Write these pictures, and delete others that an earlier report has written in this format;
    returns their files.

    Raises:
        BadInput: a file that was not written by a report has one of their names.
    """
    before: list[str] = []
    with contextlib.suppress(OSError, ValueError, TypeError):
        before = [str(name) for name in json.loads((folder / LISTED).read_text(encoding="utf-8"))]
    contents = {f"{name}.{kind}": content for name, content in pictures.items()}
    for name in contents:
        is_free = name in before or not (folder / name).exists()
        requirement = "exists and was not written by a report: move it, or give another --out"
        check("figures", kind, is_free, f"{folder / name} {requirement}")
    # first: after a kill the next report knows them
    _list(folder, {*before, *contents})
    for name, content in contents.items():
        write_whole(folder / name, content)
    of_kind = {name for name in before if name.endswith(f".{kind}")}
    for name in of_kind.difference(contents):
        if Path(name).name == name:
            (folder / name).unlink(missing_ok=True)
    _list(folder, {*contents, *before} - (of_kind - contents.keys()))
    return [folder / name for name in contents]


def _list(folder: Path, names: Iterable[str]) -> None:
    write_whole(folder / LISTED, json.dumps(sorted(names)))
