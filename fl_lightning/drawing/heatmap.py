"""Heatmaps drawn by matplotlib as arrays of pixels. A layout is kept, so that the next round costs one drawing."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fl_lightning.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import Normalize
    from matplotlib.image import AxesImage
    from matplotlib.text import Text

MOST_CELLS = 128
"""Cells on a side. More rows or columns are drawn in blocks, so that a picture of 1,000 clients stays small."""
MISSING, NEGATIVE = "#c8c8c8", "#d62728"
"""Colours of what is not finite, and of weights below 0."""
WEIGHT_TICKS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
_DPI = 100
_PRINTED_COLUMNS, _PRINTED_ROWS = 10, 20
_SMALLEST, _LARGEST, _NAMED = 2.2, 6.0, 10.0
"""Inches of a side of the cells: at least, at most, and at most where rows have names."""
_NAME_HEIGHT = 0.16
"""Inches of a row with a name."""
_LONGEST_NAME = 32
"""Letters; of a longer name the end is written, which tells layers apart."""

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
    """Draw `values` (rows, columns) as a picture, uint8 (height, width, 3), row 0 on top; what is not finite is grey.

    Weights have the colours of `weight_scale`, the same in every picture; `counts` run from 0 to the greatest.
    With `numbers` the values of few cells are written into them, some 1 ms each. Of more than `MOST_CELLS` rows or
    columns each cell has the greatest value of a block, and the title says so.
    """
    values = np.asarray(values, dtype=np.float64)
    down, across = (math.ceil(size / MOST_CELLS) for size in values.shape)
    blocks = in_blocks(values, down, across)
    ends = (float(np.nanmin(blocks, initial=0.0)), float(np.nanmax(blocks, initial=0.0)))
    high = max(ends[1], 1.0) if counts else None
    extend = extension(*ends, high or 1.0)
    frame = _frame(tuple(row_labels)[::down], tuple(col_labels)[::across], x_label, y_label, high, extend)
    note = f"; each cell: the greatest of {down} x {across}" if max(down, across) > 1 else ""
    frame.cells.set_data(blocks)
    frame.title.set_text(_literal(title + note))
    frame.canvas.restore_region(frame.background)
    frame.axes.draw_artist(frame.cells)
    frame.axes.draw_artist(frame.title)
    if numbers and blocks.shape[1] <= _PRINTED_COLUMNS and blocks.shape[0] <= _PRINTED_ROWS:
        _print(frame, blocks, ".0f" if counts else ".2f")
    return np.asarray(frame.canvas.buffer_rgba())[..., :3].copy()


def weight_scale() -> Normalize:
    """The colours of weights in every picture: from 0 to 1, by their square roots, which tells small weights apart."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, vmin=0.0, vmax=1.0)


def extension(low: float, high: float, end: float) -> str:
    """What colour bars show of values beyond their ends, 0 and `end`, in matplotlib's words."""
    return {(0, 0): "neither", (1, 0): "min", (0, 1): "max", (1, 1): "both"}[low < 0, high > end * (1 + 1e-6)]


def in_blocks(values: np.ndarray, down: int, across: int) -> np.ndarray:
    """The greatest value of each block of `down` rows and `across` columns; NaN where none is finite."""
    if down == across == 1:
        return np.where(np.isfinite(values), values, np.nan)
    rows, columns = (math.ceil(size / step) for size, step in zip(values.shape, (down, across), strict=True))
    padded = np.full((rows * down, columns * across), -np.inf)
    padded[: values.shape[0], : values.shape[1]] = np.where(np.isfinite(values), values, -np.inf)
    greatest = padded.reshape(rows, down, columns, across).max(axis=(1, 3))
    return np.where(np.isfinite(greatest), greatest, np.nan)


def save_png(image: np.ndarray, path: Path) -> None:
    """Write `image`, uint8 (height, width, 3), to `path`: a reader sees the old file or the new one, never a half."""
    from PIL import Image

    with atomic_write(path, durable=False) as aside:
        Image.fromarray(image).save(aside, format="PNG", compress_level=1)


class _Frame(NamedTuple):
    """All of a picture but its values and title, drawn."""

    canvas: FigureCanvasAgg
    background: Any
    axes: Axes
    cells: AxesImage
    title: Text


@functools.lru_cache(maxsize=8)
def _frame(rows: Labels, columns: Labels, x_label: str, y_label: str, high: float | None, extend: str) -> _Frame:
    """Axes, names and colour bar; `high`: end of the colours of counts, None for weights."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    wide, tall = (_widest(labels) for labels in (rows, columns))
    height = max(_SMALLEST, min(len(rows) * 0.3, _LARGEST), min(len(rows) * _NAME_HEIGHT, _NAMED) if wide else 0.0)
    width = min(max(_SMALLEST, len(columns) * 0.42), _LARGEST)
    figure = Figure(figsize=(width + wide + 2.0, height + tall + 1.2), dpi=_DPI, layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.add_subplot()
    norm = weight_scale() if high is None else Normalize(0.0, high)
    colours = colormaps["viridis"].with_extremes(bad=MISSING, under=NEGATIVE)
    empty = np.zeros((len(rows), len(columns)))
    cells = axes.imshow(empty, norm=norm, cmap=colours, aspect="auto", interpolation="nearest")
    ticks: dict[str, Any] = {"ticks": WEIGHT_TICKS, "format": "%g"} if high is None else {}
    figure.colorbar(cells, ax=axes, extend=extend, **ticks).minorticks_off()
    _name(axes.yaxis, rows, int(height / _NAME_HEIGHT))
    _name(axes.xaxis, columns, int(width / (_NAME_HEIGHT if tall else 0.3)))
    axes.set(xlabel=x_label, ylabel=y_label)
    title = figure.suptitle("Round", fontsize=10, x=0.02, ha="left")
    for artist in (cells, title):
        artist.set_animated(True)  # drawn over the background
    canvas.draw()
    return _Frame(canvas, canvas.copy_from_bbox(figure.bbox), axes, cells, title)


def _print(frame: _Frame, values: np.ndarray, form: str) -> None:
    """Write each value into its cell, black on bright and white on dark."""
    from matplotlib.text import Text

    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "transform": frame.axes.transData}
    for (row, column), value in np.ndenumerate(values):
        bright = np.isfinite(value) and np.asarray(frame.cells.norm(value)) > 0.6
        text = Text(column, row, format(value, form), color="black" if bright else "white", **look)
        text.set_figure(frame.axes.figure)
        frame.axes.draw_artist(text)


def _name(axis: Any, labels: Labels, room: int) -> None:
    """Name as many places along an axis as there is room for: every first, second, fifth, tenth ..."""
    steps = (factor * 10**power for power in range(7) for factor in (1, 2, 5))
    step = next(step for step in steps if len(labels) <= step * max(room, 1))
    texts = [_literal(_shortened(str(label))) for label in labels[::step]]
    turned = axis.axis_name == "x" and _widest(labels) > 0
    axis.set_ticks(range(0, len(labels), step), texts, fontsize=8, rotation=90 if turned else 0)


def _widest(labels: Labels) -> float:
    """Inches of the longest name; 0 of numbers."""
    return max((0.07 * len(_shortened(label)) for label in labels if isinstance(label, str)), default=0.0)


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :].lstrip('.')}"


def _literal(text: str) -> str:
    """No formula between dollars."""
    return text.replace("$", r"\$")
