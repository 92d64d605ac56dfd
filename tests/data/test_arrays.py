from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_lightning.config import DataConfig
from fl_lightning.data import arrays
from fl_lightning.errors import BadInput


def good(shape: tuple[int, ...] = (8, 9, 3), dtype: type = np.uint8) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(0, 200, (6, *shape)).astype(dtype),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": rng.integers(0, 200, (3, *shape)).astype(dtype),
        "y_test": np.array([0, 1, 2]),
    }


def load(folder: Path, contents: dict[str, Any]) -> Any:
    np.savez(folder / "a.npz", **contents)
    return arrays.load(DataConfig(root=str(folder / "a.npz")))


@pytest.mark.parametrize(
    ("shape", "read"), [((8, 9, 3), (3, 8, 9)), ((8, 9, 1), (1, 8, 9)), ((8, 9), (1, 8, 9)), ((5,), (5,))]
)
def test_layouts(shape: tuple[int, ...], read: tuple[int, ...], tmp_path: Path) -> None:
    contents = good(shape)
    source = load(tmp_path, contents)
    samples = source.train.read(np.array([4, 0]))
    assert samples.shape == (2, *read)
    expected = contents["x_train"][4]
    assert np.array_equal(samples[0], expected if len(shape) == 1 else expected.reshape(8, 9, -1).transpose(2, 0, 1))
    assert source.class_names == ["0", "1", "2"]


def test_numbers_become_float32_and_columns_of_labels_flat(tmp_path: Path) -> None:
    contents = good(dtype=np.float64)
    contents["y_train"] = contents["y_train"][:, None].astype(np.uint8)
    source = load(tmp_path, contents)
    assert source.train.read(np.arange(2)).dtype == np.float32
    assert source.train.labels.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y_test": None}, "it lacks y_test"),
        ({"y_train": np.zeros(5, int)}, "x_train holds 6 samples"),
        ({"y_train": np.zeros((6, 2), int)}, r"y_train has the shape \(6, 2\)"),
        ({"y_test": np.array([0, -1, 2])}, r"negative label -1 \(sample 2\)"),
        ({"y_test": np.array([0.5, 1, 2])}, "whole numbers"),
        ({"y_test": np.array([0, 1, 700])}, "label 700"),
        ({"x_test": np.zeros((3, 8, 8, 3), np.uint8)}, "differ in shape"),
        ({"x_test": np.full((3, 8, 9, 3), np.nan)}, r"not finite \(sample 1\)"),
        ({"x_test": np.array(["a", "b", "c"])}, "must hold numbers"),
        ({"x_test": np.zeros((0, 8, 9, 3), np.uint8), "y_test": np.zeros(0, int)}, "is empty"),
        ({"x_test": np.zeros((3, 3, 8, 9))}, "channels first"),
        ({"x_test": np.zeros((3, 8, 8, 8, 3))}, "it must be x_train"),
        ({"x_test": np.array([{}, {}, {}])}, "cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_contents_are_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    contents = {key: value for key, value in {**good(), **change}.items() if value is not None}
    with pytest.raises(BadInput, match=message) as caught:
        load(tmp_path, contents)
    assert caught.value.key == "data.root"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("contents", [b"", b"no zip", b"PK\x03\x04 cut short"])
def test_a_file_that_is_no_archive(contents: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(contents)
    with pytest.raises(BadInput, match="cannot be read"):
        arrays.load(DataConfig(root=str(tmp_path / "a.npz")))


def test_a_plain_npy_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(BadInput, match="cannot be read"):
        arrays.load(DataConfig(root=str(tmp_path / "a.npz")))


@pytest.mark.parametrize("root", [None, "folder", "missing.npz"])
def test_no_file(root: str | None) -> None:
    with pytest.raises(BadInput, match=r"an \.npz file|no such file"):
        arrays.load(DataConfig(root=root))


def test_real_cifar10(fl_data: Path) -> None:
    source = arrays.load(DataConfig(root=str(fl_data / "cifar10_10pct.npz")))
    assert (len(source.train.labels), len(source.test.labels)) == (5000, 1000)
    assert len(source.class_names) == 10
    assert source.train.read(np.array([7])).shape == (1, 3, 32, 32)


def test_what_is_no_archive_is_said_so(tmp_path: Path) -> None:
    """And not answered with numpy's advice to load it unsafely."""
    file = tmp_path / "x.csv"
    file.write_text("a,b\n1,2\n")
    for read in (lambda: arrays.newcomer(str(file), "classification"), lambda: arrays.public("data.public", str(file))):
        with pytest.raises(BadInput, match=r"it is no \.npz archive, which numpy\.savez writes$"):
            read()
