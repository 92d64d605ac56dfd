import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from fl_lightning.drawing.heatmap import (
    heatmap,
    save_png,
    weight_scale,
)

YELLOW, VIOLET, GREY, RED = (
    (0xFD, 0xE7, 0x24),
    (0x44, 0x01, 0x54),
    (0xC8, 0xC8, 0xC8),
    (0xD6, 0x27, 0x28),
)


def draw(values, rows=None, **kwargs):
    values = np.asarray(values, dtype=float)
    rows = [f"layer{i}" for i in range(values.shape[0])] if rows is None else rows
    cols = list(range(values.shape[1]))
    return heatmap(values, rows, cols, "title", "source client", "layer", **kwargs)


def count(image, colour):
    return int((image == np.array(colour)).all(axis=-1).sum())


@pytest.mark.sampled("shape0")
@pytest.mark.parametrize("shape", [(1, 1), (5, 10), (21, 100), (1, 100), (100, 1), (1000, 1000)])
def test_a_picture_is_a_bounded_uint8_rgb_array_that_png_keeps(shape, tmp_path):
    image = draw(np.linspace(0, 1, shape[0] * shape[1]).reshape(shape), rows=list(range(shape[0])))
    assert image.dtype == np.uint8
    assert image.ndim == 3 and image.shape[2] == 3
    assert 200 <= image.shape[0] <= 1000 and 300 <= image.shape[1] <= 1000
    save_png(image, tmp_path / "figures" / "one.png")
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "figures" / "one.png")), image)
    assert [p.name for p in (tmp_path / "figures").iterdir()] == ["one.png"]


def test_weights_have_one_scale_in_all_pictures():
    """From 0 to 1, whatever else a picture holds: 0.25 has the middle colour."""
    alone, beside = draw(np.full((2, 20), 0.25)), draw([[0.25] * 20, [0.9] * 20])
    middle = tuple(int(x) for x in alone[alone.shape[0] // 2, alone.shape[1] // 3])
    assert float(weight_scale()(0.25)) == 0.5
    assert count(alone, middle) > 20 * 300
    assert count(beside, middle) > 10 * 300
    whole = draw([[0.0] * 20, [1.0] * 20])
    assert count(whole, VIOLET) > 10 * 300 < count(whole, YELLOW)


@pytest.mark.slow
def test_a_missing_weight_is_grey_and_one_below_zero_red():
    values = np.full((4, 20), 0.05)
    cell = count(draw(np.full((4, 20), 1.0)), YELLOW) / 80
    values[2, 3], values[1, 1] = np.nan, -0.1
    image = draw(values)
    assert 0.8 * cell < count(image, GREY) < 1.2 * cell
    assert 0.8 * cell < count(image, RED) < 1.5 * cell + 400  # and the end of the colour bar


@pytest.mark.parametrize(
    "values", [np.zeros((2, 3)), np.full((2, 3), np.nan), np.full((2, 3), -1.0)]
)
def test_degenerate_values_are_drawn(values):
    assert draw(values, numbers=True).size
    assert draw(values, counts=True).size


def test_the_cache_of_fonts_is_made_in_silence(tmp_path):
    """A first use of matplotlib makes one, and may say so; a folder that cannot hold it would be
    named."""
    (tmp_path / "file").write_text("")
    env = {**os.environ, "MPLCONFIGDIR": str(tmp_path / "file" / "none"), "TMPDIR": str(tmp_path)}
    code = (
        "from fl_lightning.cli import main; main(['list', 'methods']); import "
        "matplotlib.font_manager"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "kapc" in done.stdout
    assert done.stderr == ""
