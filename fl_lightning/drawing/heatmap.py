"""Heatmaps drawn with Pillow straight into arrays: milliseconds each, so that every round can afford its pictures."""

from __future__ import annotations

import functools
import importlib.util
import math
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fl_lightning.files import atomic_write

# Eleven even steps of viridis (van der Walt and Smith, CC0): equal steps in value look equally far apart.
_ANCHORS = (
    *("440154", "482475", "414487", "355f8d", "2a788e", "21918c"),
    *("22a884", "44bf70", "7ad151", "bddf26", "fde725"),
)
_INK, _FAINT, _PAPER, _MISSING = (30, 30, 30), (120, 120, 120), (255, 255, 255), (200, 200, 200)
_TITLE, _LABEL, _TICK = 16, 14, 12  # font sizes in pixels
_GAP, _BAR = 10, 16
_WIDEST_NAME = 300
_SMALLEST_SIDE = 120  # of the plot, so that the colour bar and the axis labels have room beside a single cell
_PRINTED_COLUMNS = 12

Point = tuple[int, int]


def heatmap(
    values: np.ndarray,
    row_labels: Sequence[str | int],
    col_labels: Sequence[str | int],
    title: str,
    x_label: str,
    y_label: str,
    high: float | None = None,
) -> np.ndarray:
    """Draw `values` [rows, cols] as a picture, uint8 (height, width, 3), row 0 on top.

    Labels that are numbers are thinned where they would collide; names never are, but turned. Colours run from 0,
    or the least value if that is negative, to `high` (default: the greatest value; a value beyond it has the last
    colour, and the bar says so); what is not finite is grey.
    """
    values = np.asarray(values, dtype=np.float64)
    finite = values[np.isfinite(values)]
    low = float(min(0.0, finite.min(initial=0.0)))
    high = float(finite.max(initial=low)) if high is None else high
    high = high if high > low else low + 1.0
    cell = _cell_size(values.shape, named=any(isinstance(label, str) for label in row_labels))
    width, height = values.shape[1] * cell[0], values.shape[0] * cell[1]
    title, names = _legible(title), [_shorten(_legible(str(label))) for label in row_labels]
    below, write_columns = _columns(col_labels, cell[0])
    ticks = _ticks(low, high, most=min(8, height // (2 * _line(_TICK))))
    if values.max(initial=high) > high:
        ticks[-1] = (high, f"{ticks[-1][1]}+")

    origin = (3 * _GAP + _line(_LABEL) + max(_width(name, _TICK) for name in names), 2 * _GAP + _line(_TITLE))
    bar = (origin[0] + width + 2 * _GAP, origin[1])
    size = (
        max(
            bar[0] + _BAR + 2 * _GAP + max(_width(text, _TICK) for _, text in ticks),
            origin[0] + (width + _width(x_label, _LABEL)) // 2 + _GAP,
            _width(title, _TITLE) + 2 * _GAP,
        ),
        origin[1] + height + below + _line(_LABEL) + 2 * _GAP,
    )
    image = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(image)

    colours = _colours(values, low, high)
    image.paste(Image.fromarray(colours.repeat(cell[1], axis=0).repeat(cell[0], axis=1)), origin)
    if values.shape[1] <= _PRINTED_COLUMNS:
        _print_values(draw, values, colours, origin, cell)
    _draw_bar(image, bar, height, ticks, low, high)

    draw.text((_GAP, _GAP), title, _INK, _font(_TITLE, title))
    draw.text((origin[0] + width // 2, size[1] - _GAP), x_label, _INK, _font(_LABEL), anchor="md")
    _write_upwards(image, y_label, (_GAP, origin[1] + height // 2))
    for row in _kept(row_labels, cell[1], _line(_TICK)):
        place = (origin[0] - _GAP // 2, origin[1] + row * cell[1] + cell[1] // 2)
        draw.text(place, names[row], _INK, _font(_TICK, names[row]), anchor="rm")
    write_columns(image, (origin[0] + cell[0] // 2, origin[1] + height + _GAP // 2))
    return np.asarray(image)


def _columns(labels: Sequence[str | int], wide: int) -> tuple[int, Callable[[Image.Image, Point], None]]:
    """The height that labels below cells of this width take, and what writes them, the first at a place.

    Where a name is wider than its cell, all are turned.
    """
    names = [_shorten(_legible(str(label))) for label in labels]
    widest = max(_width(name, _TICK) for name in names)
    turned = widest > wide and any(isinstance(label, str) for label in labels)

    def write(image: Image.Image, first: Point) -> None:
        for col in _kept(labels, wide, widest + _GAP // 2):
            name, (x, y) = names[col], (first[0] + col * wide, first[1])
            if turned:
                _write_upwards(image, name, (x - _line(_TICK) // 2, y + _width(name, _TICK) // 2), _TICK)
            else:
                ImageDraw.Draw(image).text((x, y), name, _INK, _font(_TICK, name), anchor="ma")

    return widest if turned else _line(_TICK), write


def top(values: np.ndarray, own: np.ndarray) -> float | None:
    """Where the colours of a relation end: see `Heatmaps`. None: at the greatest value. `own`: clients' own weights."""
    others = values[~own & np.isfinite(values)].max(initial=0.0)
    return float(1.5 * others) if 0 < 1.5 * others < values.max() else None


def save_png(image: np.ndarray, path: Path) -> None:
    """Write `image`, uint8 (height, width, 3), to `path`: a reader sees the old file or the new one, never a half."""
    with atomic_write(path, durable=False) as aside:
        Image.fromarray(image).save(aside, format="PNG", compress_level=1)


def _cell_size(shape: tuple[int, ...], named: bool) -> Point:
    """Width and height of a cell in pixels; a row with a name is always tall enough to read it."""
    rows, cols = shape
    wide = 44 if cols <= _PRINTED_COLUMNS else min(40, 800 // cols)
    tall = max(_line(_TICK) + 1, min(28, 420 // rows)) if named else min(44, 800 // rows)
    return max(wide, math.ceil(_SMALLEST_SIDE / cols)), max(tall, math.ceil(_SMALLEST_SIDE / rows))


@functools.cache
def _palette() -> np.ndarray:
    """256 colours from the anchors, uint8 [256, 3]."""
    anchors = np.array([[int(code[k : k + 2], 16) for k in (0, 2, 4)] for code in _ANCHORS])
    place = np.linspace(0, len(anchors) - 1, 256)
    channels = [np.interp(place, np.arange(len(anchors)), anchors[:, k]) for k in range(3)]
    return np.stack(channels, axis=1).round().astype(np.uint8)


def _colours(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """The colour of each value, uint8 [rows, cols, 3]."""
    finite = np.isfinite(values)
    level = np.clip((np.where(finite, values, low) - low) / (high - low), 0, 1)
    colours = _palette()[(level * 255).round().astype(int)]
    colours[~finite] = _MISSING
    return colours


def _print_values(
    draw: ImageDraw.ImageDraw, values: np.ndarray, colours: np.ndarray, origin: Point, cell: Point
) -> None:
    """Write each value into its cell, dark on bright and bright on dark."""
    bright = colours @ np.array([0.299, 0.587, 0.114]) > 140
    counts = values.max(initial=0) > 1 and bool((values == values.round()).all())
    for (row, col), value in np.ndenumerate(values):
        text = f"{value:.0f}" if counts else f"{value:.3f}" if abs(value) < 9.9995 else f"{value:.3g}"
        place = (origin[0] + col * cell[0] + cell[0] // 2, origin[1] + row * cell[1] + cell[1] // 2)
        draw.text(place, text, _INK if bright[row, col] else _PAPER, _font(_TICK), anchor="mm")


def _draw_bar(
    image: Image.Image, place: Point, height: int, ticks: list[tuple[float, str]], low: float, high: float
) -> None:
    """The colour bar with its numbers, greatest value on top."""
    draw = ImageDraw.Draw(image)
    ramp = _colours(np.linspace(high, low, height)[:, None], low, high)
    image.paste(Image.fromarray(ramp.repeat(_BAR, axis=1)), place)
    right = place[0] + _BAR
    for value, text in ticks:
        y = place[1] + round((high - value) / (high - low) * (height - 1))
        draw.line([(right, y), (right + 4, y)], _FAINT)
        draw.text((right + _GAP, y), text, _INK, _font(_TICK), anchor="lm")


def _ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """Round numbers between both ends, and the ends themselves; `most` numbers fit without crowding."""
    rough = (high - low) / max(most, 1)
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= rough)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    between = [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
    inner = [(value, f"{value:.{digits}f}") for value in between if min(value - low, high - value) > step / 2]
    return [(low, f"{low:.3g}"), *inner, (high, f"{high:.3g}")]


def _kept(labels: Sequence[str | int], room: int, needed: int) -> range:
    """Which labels are written: all names, and every first, second, fifth, tenth, ... number, as fits."""
    if any(isinstance(label, str) for label in labels):
        return range(len(labels))
    steps = (factor * 10**power for power in range(7) for factor in (1, 2, 5))
    return range(0, len(labels), next(step for step in steps if step * room >= needed))


def _write_upwards(image: Image.Image, text: str, place: Point, size: int = _LABEL) -> None:
    """Write `text` from bottom to top, its left edge and its middle at `place`."""
    label = Image.new("RGB", (_width(text, size), _line(size)), _PAPER)
    ImageDraw.Draw(label).text((0, 0), text, _INK, _font(size, text))
    turned = label.transpose(Image.Transpose.ROTATE_90)
    image.paste(turned, (place[0], max(0, place[1] - turned.height // 2)))


def _legible(text: str) -> str:
    """`text`; where no font for it is there, without its accents."""
    if text.isascii() or _more_letters() is not None:
        return text
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))


@functools.cache
def _shorten(name: str) -> str:
    """`name`, without its beginning if it is too wide: the end tells layers apart."""
    if _width(name, _TICK) <= _WIDEST_NAME:
        return name
    ends = (name[k:].lstrip(".") for k in range(len(name)))
    return next(f"…{end}" for end in ends if _width(f"…{end}", _TICK) <= _WIDEST_NAME)


def _font(size: int, text: str = "") -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font, which has ASCII and "…"; for other letters matplotlib's, where it is installed."""
    return _loaded(size, None if text.replace("…", "").isascii() else _more_letters())


@functools.cache
def _loaded(size: int, file: Path | None) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size) if file is None else ImageFont.truetype(file, size)


@functools.cache
def _more_letters() -> Path | None:
    spec = importlib.util.find_spec("matplotlib")
    file = Path(spec.origin).with_name("mpl-data") / "fonts/ttf/DejaVuSans.ttf" if spec and spec.origin else None
    return file if file is not None and file.is_file() else None


def _width(text: str, size: int) -> int:
    font = _font(size, text)
    return math.ceil(font.getlength(text)) if isinstance(font, ImageFont.FreeTypeFont) else 6 * len(text)


def _line(size: int) -> int:
    """Height of a line of text in pixels."""
    return round(1.25 * size)
