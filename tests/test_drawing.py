from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fl_lightning.drawing import heatmap as drawing
from fl_lightning.drawing.curves import draw_scores
from fl_lightning.drawing.heatmap import (
    MOST_CELLS,
    extension,
    heatmap,
    in_blocks,
    save_png,
    weight_scale,
)
from fl_lightning.foundation.metric import ACCURACY, MAE

YELLOW, VIOLET, GREY, RED = (
    (0xFD, 0xE7, 0x24),
    (0x44, 0x01, 0x54),
    (0xC8, 0xC8, 0xC8),
    (0xD6, 0x27, 0x28),
)


def draw(values: Any, rows: Any = None, cols: Any = None, **kwargs: Any) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    rows = [f"layer{i}" for i in range(values.shape[0])] if rows is None else rows
    cols = list(range(values.shape[1])) if cols is None else cols
    return heatmap(values, rows, cols, "title", "source client", "layer", **kwargs)


def forget() -> None:
    """Layouts that are kept."""
    drawing._labelled.cache_clear()
    drawing._frame.cache_clear()


def labels_of(axis: str, rows: list[Any], columns: list[Any]) -> list[str]:
    """What is written along an axis of a picture."""
    forget()
    frame, _ = drawing._labelled(tuple(rows), tuple(columns), "x", "y", None, "neither")
    return [label.get_text() for label in getattr(frame.axes, f"get_{axis}ticklabels")()]


def count(image: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((image == np.array(colour)).all(axis=-1).sum())


@pytest.mark.parametrize("shape", [(1, 1), (5, 10), (21, 100), (1, 100), (100, 1), (1000, 1000)])
def test_a_picture_is_a_bounded_uint8_rgb_array_that_png_keeps(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    image = draw(np.linspace(0, 1, shape[0] * shape[1]).reshape(shape), rows=list(range(shape[0])))
    assert image.dtype == np.uint8
    assert image.ndim == 3 and image.shape[2] == 3
    assert 200 <= image.shape[0] <= 1000 and 300 <= image.shape[1] <= 1000
    save_png(image, tmp_path / "figures" / "one.png")
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "figures" / "one.png")), image)
    assert [p.name for p in (tmp_path / "figures").iterdir()] == ["one.png"]


def test_weights_have_one_scale_in_all_pictures() -> None:
    """From 0 to 1, whatever else a picture holds: 0.25 has the middle colour."""
    alone, beside = draw(np.full((2, 20), 0.25)), draw([[0.25] * 20, [0.9] * 20])
    middle = tuple(int(x) for x in alone[alone.shape[0] // 2, alone.shape[1] // 3])
    assert float(weight_scale()(0.25)) == 0.5
    assert count(alone, middle) > 20 * 300
    assert count(beside, middle) > 10 * 300
    whole = draw([[0.0] * 20, [1.0] * 20])
    assert count(whole, VIOLET) > 10 * 300 < count(whole, YELLOW)


def test_counts_run_from_zero_to_the_greatest() -> None:
    image = draw([[0] * 20, [7] * 20], counts=True)
    assert count(image, VIOLET) > 10 * 300 < count(image, YELLOW)


def test_a_missing_weight_is_grey_and_one_below_zero_red() -> None:
    values = np.full((4, 20), 0.05)
    cell = count(draw(np.full((4, 20), 1.0)), YELLOW) / 80
    values[2, 3], values[1, 1] = np.nan, -0.1
    image = draw(values)
    assert 0.8 * cell < count(image, GREY) < 1.2 * cell
    assert 0.8 * cell < count(image, RED) < 1.5 * cell + 400  # and the end of the colour bar


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (0, 1, "neither"),
        (-0.1, 1, "min"),
        (0, 1.2, "max"),
        (-1, 2, "both"),
        (0, 1 + 1e-7, "neither"),
    ],
)
def test_colour_bars_say_what_lies_beyond_them(low: float, high: float, shown: str) -> None:
    assert extension(low, high, 1.0) == shown


def test_a_kept_layout_gives_the_same_picture_as_a_new_one() -> None:
    first, other = np.full((3, 3), 0.2), np.eye(3)
    drawn = draw(first)
    assert (draw(other) != drawn).any()
    again = draw(first)
    forget()
    np.testing.assert_array_equal(drawn, again)
    np.testing.assert_array_equal(drawn, draw(first))


def test_another_cohort_takes_the_layout_of_the_last_one_with_its_own_numbers() -> None:
    """A round with 10 of 100 clients must not lay out its picture anew."""
    forget()
    one, other = (
        draw(np.eye(4), rows=cohort, cols=cohort) for cohort in ([10, 20, 33, 47], [11, 12, 13, 99])
    )
    assert drawing._frame.cache_info().misses == 1
    assert one.shape == other.shape and (one != other).any()
    forget()
    np.testing.assert_array_equal(
        other, draw(np.eye(4), rows=[11, 12, 13, 99], cols=[11, 12, 13, 99])
    )


def test_the_greatest_of_a_block_stands_for_many_cells() -> None:
    values = np.zeros((5, 4))
    values[4, 3], values[0, 1], values[2] = 0.7, 0.3, np.nan
    np.testing.assert_array_equal(in_blocks(values, 2, 2), [[0.3, 0.0], [0.0, 0.0], [0.0, 0.7]])
    assert np.isnan(in_blocks(np.full((2, 2), np.nan), 2, 2)).all()
    n = 3 * MOST_CELLS
    spike = np.zeros((n, n))
    spike[17, 200] = 1.0
    assert count(draw(spike, rows=list(range(n))), YELLOW) > count(
        draw(np.zeros((n, n)), rows=list(range(n))), YELLOW
    )


def test_few_columns_have_their_numbers_where_they_are_asked_for() -> None:
    plain = draw(np.full((2, 10), 1.0))
    assert count(draw(np.full((2, 10), 1.0), numbers=True), YELLOW) < count(plain, YELLOW) - 500
    wide = np.full((2, 11), 1.0)
    np.testing.assert_array_equal(draw(wide, numbers=True), draw(wide))


def test_every_layer_is_named_and_crowded_numbers_are_thinned() -> None:
    layers = draw(np.zeros((62, 20)))
    assert layers.shape[0] > 62 * 15
    assert labels_of("y", list(range(100)), [0]) == [str(5 * k) for k in range(20)]
    assert labels_of("y", [f"l{k}" for k in range(62)], [0]) == [f"l{k}" for k in range(62)]


def test_long_names_keep_their_end_and_are_turned_below() -> None:
    prefix = "backbone.encoder.block." * 8
    one, other = (draw(np.zeros((1, 20)), rows=[prefix + end]) for end in ("query", "value"))
    assert one.shape[1] < 1100 and (one != other).any()
    names = ["Zürich", "Universitätsspital Basel", "a$b$c"]
    turned, short = (
        heatmap(np.eye(3), ["a", "b", "c"], of, "t", "x", "y") for of in (names, ["a", "b", "c"])
    )
    assert turned.shape[0] - short.shape[0] > 100
    assert labels_of("x", ["a", "b", "c"], names) == [
        "Zürich",
        "Universitätsspital Basel",
        r"a\$b\$c",
    ]


@pytest.mark.parametrize(
    "values", [np.zeros((2, 3)), np.full((2, 3), np.nan), np.full((2, 3), -1.0)]
)
def test_degenerate_values_are_drawn(values: np.ndarray) -> None:
    assert draw(values, numbers=True).size
    assert draw(values, counts=True).size


@pytest.mark.parametrize("metric", [ACCURACY, MAE])
def test_scores_by_round_have_a_line_for_each_kind_of_model(metric: Any) -> None:
    column = metric.by("after")
    rows = [{"round": t, column: 0.1 * t} for t in (1, 2, 3)]
    one = draw_scores(rows, metric, "after", "run $1$")
    two = draw_scores(
        [row | {metric.by("global"): 0.2} for row in rows], metric, "after", "run $1$"
    )
    assert one.shape == two.shape == (400, 640, 3)
    assert count(one, (0x2A, 0x78, 0xD6)) > 50 and count(two, (0x1A, 0x9E, 0x6D)) > 50 > count(
        one, (0x1A, 0x9E, 0x6D)
    )
    assert draw_scores([], metric, "global", "empty").shape == (400, 640, 3)
    assert draw_scores(rows[:1], metric, "after", "one").shape == (400, 640, 3)


def test_the_cache_of_fonts_is_made_in_silence(tmp_path: Path) -> None:
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
