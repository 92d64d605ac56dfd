from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fl_lightning.drawing.heatmap import _font, _kept, _legible, _ticks, heatmap, save_png

YELLOW, VIOLET, GREY = (0xFD, 0xE7, 0x25), (0x44, 0x01, 0x54), (200, 200, 200)


def draw(values, rows=None, cols=None, **kwargs) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    rows = [f"layer{i}" for i in range(values.shape[0])] if rows is None else rows
    cols = list(range(values.shape[1])) if cols is None else cols
    return heatmap(values, rows, cols, "title", "source client", "layer", **kwargs)


def count(image: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((image == np.array(colour)).all(axis=-1).sum())


@pytest.mark.parametrize("shape", [(1, 1), (5, 10), (21, 10), (21, 100), (1, 100), (100, 1)])
def test_a_picture_is_a_uint8_rgb_array_that_png_keeps(shape, tmp_path) -> None:
    image = draw(np.linspace(0, 1, shape[0] * shape[1]).reshape(shape))
    assert image.dtype == np.uint8
    assert image.ndim == 3
    assert image.shape[2] == 3
    assert 150 <= image.shape[1] <= 1300
    save_png(image, tmp_path / "figures" / "one.png")
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "figures" / "one.png")), image)
    assert [p.name for p in (tmp_path / "figures").iterdir()] == ["one.png"]


def test_colours_span_zero_to_the_greatest_value() -> None:
    image = draw([[0.0] * 20, [0.05] * 20])  # 20 columns: no numbers inside the cells
    plain = 40 * 60  # pixels of a cell: 40 wide for 20 columns, 120 / 2 rows tall
    assert count(image, VIOLET) >= 20 * plain
    assert count(image, YELLOW) >= 20 * plain


def test_equal_weights_look_equal_and_a_missing_one_is_grey() -> None:
    values = np.full((4, 20), 0.05)
    values[2, 3] = np.nan
    image = draw(values)
    assert 40 * 30 <= count(image, GREY) < 2 * 40 * 30  # the cell, and a few pixels of text of that grey
    assert count(image, YELLOW) >= 79 * 40 * 30


def test_a_given_range_caps_the_colours_and_the_bar_says_so() -> None:
    capped, whole = (draw([[0.1] * 19 + [last]], high=0.2) for last in (0.9, 0.2))
    assert count(capped, YELLOW) >= 40 * 120
    differing = np.flatnonzero((capped != whole).any(axis=(0, 2)))
    assert differing.size
    assert differing.min() > capped.shape[1] - 40  # "0.2+" for "0.2", right of the bar


def test_few_columns_have_their_numbers_printed() -> None:
    with_numbers, without = draw(np.full((2, 12), 0.5)), draw(np.full((2, 13), 0.5))
    cell = 44 * 60
    assert count(with_numbers, YELLOW) < 24 * cell
    assert count(without, YELLOW) >= 26 * 40 * 60


def test_every_layer_is_named_and_crowded_numbers_are_thinned() -> None:
    layers = draw(np.zeros((62, 100)))
    assert layers.shape[0] > 62 * 15
    names = (layers[:, :80] < 100).all(axis=-1).any(axis=1)  # dark pixels in the column of names, by line
    assert np.count_nonzero(np.diff(names.astype(int)) == 1) >= 62
    numbered = draw(np.zeros((100, 100)), rows=list(range(100)))
    assert numbered.shape[0] < 1000


def test_long_names_keep_their_end() -> None:
    prefix = "backbone.encoder.block." * 8
    one, other = (draw(np.zeros((1, 20)), rows=[prefix + end]) for end in ("query", "value"))
    assert one.shape[1] < 1300
    assert one.shape != other.shape or (one != other).any()


@pytest.mark.parametrize("values", [np.zeros((2, 3)), np.full((2, 3), np.nan), np.full((2, 3), -1.0)])
def test_degenerate_values_are_drawn(values) -> None:
    assert draw(values).size


@pytest.mark.parametrize(
    ("low", "high", "most", "texts"),
    [
        (0, 1, 5, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (0, 0.271, 3, ["0", "0.1", "0.2", "0.271"]),
        (0, 0.0158, 4, ["0", "0.005", "0.010", "0.0158"]),
        (0, 30, 3, ["0", "10", "20", "30"]),
    ],
)
def test_the_bar_has_round_numbers_and_both_ends(low, high, most, texts) -> None:
    assert [text for _, text in _ticks(low, high, most)] == texts


@pytest.mark.parametrize(
    ("labels", "room", "written"),
    [
        (range(0, 12), 5, [0, 5, 10]),
        (range(0, 3), 20, [0, 1, 2]),
        (range(0, 3), 1, [0]),
        ([3, 17, 22, 40, 41, 60], 5, [3, 60]),  # a cohort
        (["a", "b"], 1, ["a", "b"]),
    ],
)
def test_numbers_that_are_written_are_round_ones(labels, room, written) -> None:
    assert [labels[k] for k in _kept(labels, room, 20)] == written


def test_the_cache_of_fonts_is_made_in_silence(tmp_path: Path) -> None:
    """A first use of matplotlib makes one, and may say so; a folder that cannot hold it would be named."""
    (tmp_path / "file").write_text("")
    env = {**os.environ, "MPLCONFIGDIR": str(tmp_path / "file" / "none"), "TMPDIR": str(tmp_path)}
    code = "from fl_lightning.cli import main; main(['list', 'methods']); import matplotlib.font_manager"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    assert "kapc" in done.stdout
    assert done.stderr == ""


def test_long_names_below_are_turned_and_none_is_a_box(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of hospitals side by side ran into each other, and Pillow's own font has no letter with an accent."""
    names = ["Zürich", "Universitätsspital Basel", "Genève"]
    turned, short = (heatmap(np.eye(3), ["a", "b", "c"], of, "t", "x", "y") for of in (names, ["a", "b", "c"]))
    assert turned.shape[0] - short.shape[0] > 100
    missing, box = (bytes(_font(12, letter).getmask(letter)) for letter in ("ü", "\uffff"))
    assert missing != box and _legible("Zürich") == "Zürich"
    monkeypatch.setattr("fl_lightning.drawing.heatmap._more_letters", lambda: None)  # matplotlib is an extra
    assert _legible("Zürich") == "Zurich"
