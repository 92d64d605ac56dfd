"""Heatmaps drawn by matplotlib as arrays of pixels. Layouts are cached, so another round only draws
its cells."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fl_lightning.foundation.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import Normalize
    from matplotlib.image import AxesImage
    from matplotlib.text import Text

MOST_CELLS = 128
"""The greatest number of cells on a side: more rows or columns are drawn in blocks, so that a
picture of 1,000 clients stays small."""
MISSING, NEGATIVE = "#c8c8c8", "#d62728"
"""Colours of values that are not finite, and of weights below 0."""
WEIGHT_TICKS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
_DPI = 100
_PRINTED_COLUMNS, _PRINTED_ROWS = 10, 20
_SMALLEST, _LARGEST, _NAMED = 2.2, 6.0, 10.0
"""Inches of a side of the cells: at least, at most, and at most if rows have names."""
_NAME_HEIGHT = 0.16
"""Inches of a row with a name."""
_LONGEST_NAME = 32
"""Letters of a name; of a longer one its end is written, which tells layers apart."""

Labels = tuple[str | int, ...]


def heatmap(
    values: np.ndarray,
    row_labels: Sequence[str | int],
    col_labels: Sequence[str | int],
    title: str,
    x_label: str,
    y_label: str,
    counts: bool = False,
    numbers: bool = False,
) -> np.ndarray:
    """Draw `values` (rows, columns) as a picture, uint8 (height, width, 3), row 0 on top; values
    that are not finite are grey.

    If there are more than `MOST_CELLS` rows or columns, each cell shows the greatest value of a
    block, and the title says so.

    Args:
        values: weights have the colours of `weight_scale`, the same in every picture.
        row_labels: a label for each row.
        col_labels: a label for each column.
        title: title of the picture.
        x_label: name of the axis below the columns.
        y_label: name of the axis beside the rows.
        counts: values are counts, whose colours run from 0 to the greatest.
        numbers: write the values into the cells, if they are few; some 1 ms each.
    """
    values = np.asarray(values, dtype=np.float64)
    down, across = (math.ceil(size / MOST_CELLS) for size in values.shape)
    blocks = in_blocks(values, down, across)
    least, most = float(np.nanmin(blocks, initial=0.0)), float(np.nanmax(blocks, initial=0.0))
    high = max(most, 1.0) if counts else None
    extend = colour_bar_ends(least, most, high or 1.0)
    rows, columns = tuple(row_labels)[::down], tuple(col_labels)[::across]
    frame, background = _labelled(rows, columns, x_label, y_label, high, extend)
    if max(down, across) > 1:
        title += f"; each cell: the greatest of {down} x {across}"
    frame.cells.set_data(blocks)
    frame.title.set_text(_literal(title))
    frame.canvas.restore_region(background)
    for artist in (frame.cells, frame.title):
        frame.axes.draw_artist(artist)
    if numbers and blocks.shape[1] <= _PRINTED_COLUMNS and blocks.shape[0] <= _PRINTED_ROWS:
        _print(frame, blocks, ".0f" if counts else ".2f")
    return np.asarray(frame.canvas.buffer_rgba())[..., :3].copy()


def weight_scale() -> Normalize:
    """Return the colours of weights in every picture: from 0 to 1 on a square root scale, which
    tells small weights apart."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, vmin=0.0, vmax=1.0)


def colour_bar_ends(low: float, high: float, end: float) -> str:
    """Return matplotlib's `extend` for a colour bar from 0 to `end`: `min`, `max`, `both` or
    `neither`, by the ends beyond which values lie.

    Args:
        low: the smallest value.
        high: the greatest value.
        end: the upper end of the bar.
    """
    is_beyond = high > end * (1 + 1e-6)
    if low < 0:
        return "both" if is_beyond else "min"
    return "max" if is_beyond else "neither"


def in_blocks(values: np.ndarray, down: int, across: int) -> np.ndarray:
    """Return the greatest value of each block of `down` rows and `across` columns; NaN if none is
    finite."""
    finite = np.where(np.isfinite(values), values, -np.inf)
    height, width = values.shape
    margins = ((0, -height % down), (0, -width % across))
    padded = np.pad(finite, margins, constant_values=-np.inf)
    rows, columns = padded.shape[0] // down, padded.shape[1] // across
    greatest = padded.reshape(rows, down, columns, across).max(axis=(1, 3))
    return np.where(np.isfinite(greatest), greatest, np.nan)


def save_png(image: np.ndarray, path: Path) -> None:
    """Write `image`, uint8 (height, width, 3), to `path`: a reader sees the old file or the new
    one, never a part."""
    from PIL import Image

    with atomic_write(path, durable=False) as aside:
        Image.fromarray(image).save(aside, format="PNG", compress_level=1)


class _Side(NamedTuple):
    """The properties of an axis' labels on which the layout depends. Pictures of different clients
    with equal properties share one layout."""

    places: int
    letters: int
    """Of the longest label."""
    named: bool
    """Whether labels are names, not numbers."""

    @classmethod
    def of(cls, labels: Labels) -> _Side:
        """Return the side with these labels."""
        longest = max(len(_shortened(str(label))) for label in labels)
        return cls(len(labels), longest, _has_names(labels))

    @property
    def inches(self) -> float:
        """The approximate room for names; 0 for numbers."""
        return 0.07 * self.letters * self.named

    @property
    def examples(self) -> Labels:
        """Labels of the same number and length."""
        number = 10 ** (self.letters - 1)
        return ("n" * self.letters if self.named else number,) * self.places


class _Frame(NamedTuple):
    """A drawn picture without its values, labels and title."""

    canvas: FigureCanvasAgg
    background: Any
    axes: Axes
    inches: tuple[float, float]
    """Width and height of the cells, about."""
    cells: AxesImage
    title: Text


@functools.lru_cache(maxsize=8)
def _labelled(
    rows: Labels,
    columns: Labels,
    x_label: str,
    y_label: str,
    high: float | None,
    extend: str,
) -> tuple[_Frame, Any]:
    """Return the frame, and its background with the labels of both sides."""
    sides = _Side.of(rows), _Side.of(columns)
    frame = _frame(*sides, x_label, y_label, high, extend)
    width, height = frame.inches
    label_width = _NAME_HEIGHT if _has_names(columns) else 0.3
    _name(frame.axes.yaxis, rows, int(height / _NAME_HEIGHT))
    _name(frame.axes.xaxis, columns, int(width / label_width))
    frame.canvas.restore_region(frame.background)
    for axis in (frame.axes.xaxis, frame.axes.yaxis):
        frame.axes.draw_artist(axis)
    return frame, frame.canvas.copy_from_bbox(frame.canvas.figure.bbox)


@functools.lru_cache(maxsize=8)
def _frame(
    rows: _Side,
    columns: _Side,
    x_label: str,
    y_label: str,
    high: float | None,
    extend: str,
) -> _Frame:
    """Return axes and colour bar; `high`: upper end of the colours of counts, None for weights."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    height = max(_SMALLEST, min(rows.places * 0.3, _LARGEST))
    if rows.named:
        height = max(height, min(rows.places * _NAME_HEIGHT, _NAMED))
    width = min(max(_SMALLEST, columns.places * 0.42), _LARGEST)
    size = (width + rows.inches + 2.0, height + columns.inches + 1.2)
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.add_subplot()
    norm, ticks = weight_scale(), {"ticks": WEIGHT_TICKS, "format": "%g"}
    if high is not None:
        norm, ticks = Normalize(0.0, high), {}
    colours = colormaps["viridis"].with_extremes(bad=MISSING, under=NEGATIVE)
    empty = np.zeros((rows.places, columns.places))
    cells = axes.imshow(
        empty,
        colours,
        norm,
        aspect="auto",
        interpolation="nearest",
    )
    bar: Any = figure.colorbar
    bar(
        cells,
        ax=axes,
        extend=extend,
        **ticks,
    ).minorticks_off()
    _name(axes.yaxis, rows.examples, 1)
    _name(axes.xaxis, columns.examples, 1)
    axes.set(xlabel=x_label, ylabel=y_label)
    title = figure.suptitle(
        "Round",
        fontsize=10,
        x=0.02,
        ha="left",
    )
    for artist in (cells, axes.xaxis, axes.yaxis, title):
        artist.set_animated(True)  # drawn over the background
    canvas.draw()
    figure.set_layout_engine("none")  # it has been laid out
    return _Frame(
        canvas,
        canvas.copy_from_bbox(figure.bbox),
        axes,
        (width, height),
        cells,
        title,
    )


def _print(frame: _Frame, values: np.ndarray, form: str) -> None:
    """Write each value into its cell, black on bright and white on dark."""
    from matplotlib.text import Text

    look: dict[str, Any] = {
        "ha": "center",
        "va": "center",
        "fontsize": 8,
        "transform": frame.axes.transData,
    }
    for (row, column), value in np.ndenumerate(values):
        is_bright = np.isfinite(value) and np.asarray(frame.cells.norm(value)) > 0.6
        colour = "black" if is_bright else "white"
        text = Text(
            column,
            row,
            format(value, form),
            color=colour,
            **look,
        )
        text.set_figure(frame.axes.figure)
        frame.axes.draw_artist(text)


def _name(axis: Any, labels: Labels, room: int) -> None:
    """Label as many places along an axis as there is room for: every first, second, fifth, tenth
    ..."""
    steps = (factor * 10**power for power in range(7) for factor in (1, 2, 5))
    step = next(step for step in steps if len(labels) <= step * max(room, 1))
    texts = [_literal(_shortened(str(label))) for label in labels[::step]]
    angle = 90 if axis.axis_name == "x" and _has_names(labels) else 0
    axis.set_ticks(
        range(0, len(labels), step),
        texts,
        fontsize=8,
        rotation=angle,
    )


def _has_names(labels: Labels) -> bool:
    """Return whether labels are names, not numbers."""
    return any(isinstance(label, str) for label in labels)


def _shortened(name: str) -> str:
    if len(name) <= _LONGEST_NAME:
        return name
    return f"…{name[1 - _LONGEST_NAME :].lstrip('.')}"


def _literal(text: str) -> str:
    """Return `text` for matplotlib, in which dollars do not enclose a formula."""
    return text.replace("$", r"\$")
