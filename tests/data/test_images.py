from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fl_lightning.config import DataConfig
from fl_lightning.data import images
from fl_lightning.errors import BadInput
from fl_lightning.exporting import plain


def fill(folder: Path, classes: dict[str, int], count: int = 5) -> Path:
    """`count` pictures of each class, whose green is the class's number."""
    for name, green in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (30 + number, 40), (number, green, 0)).save(folder / name / f"{number}.png")
    return folder


def test_train_and_test_folders(tmp_path: Path) -> None:
    fill(tmp_path / "train", {"cat": 10, "dog": 20, "owl": 30})
    fill(tmp_path / "test", {"dog": 20, "owl": 30}, count=2)
    source = images.load(DataConfig(root=str(tmp_path)))
    assert source.class_names == ["cat", "dog", "owl"]
    assert source.train.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert source.test.labels.tolist() == [1, 1, 2, 2]  # numbered as in train/, though test/ lacks the first class
    read = source.test.read(np.arange(4))
    assert read.shape == (4, 3, 32, 32)
    assert read[:, 1, 0, 0].tolist() == [20, 20, 30, 30]


def test_class_folders_alone_are_split(tmp_path: Path) -> None:
    source = images.load(DataConfig(root=str(fill(tmp_path, {"a": 1, "b": 2}, count=10))))
    assert np.bincount(source.train.labels).tolist() == [8, 8]
    assert np.bincount(source.test.labels).tolist() == [2, 2]


def test_grey_files_become_colour(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number in range(5):
        Image.new("L", (8, 8), 77).save(tmp_path / "a" / f"{number}.png")
    assert (images.load(DataConfig(root=str(tmp_path))).train.read(np.arange(2)) == 77).all()


def test_bad_folders_are_one_line(tmp_path: Path) -> None:
    for root in (None, str(tmp_path / "none")):
        with pytest.raises(BadInput, match="a folder with train/CLASS"):
            images.load(DataConfig(root=root))
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="it must be a folder with"):
        images.load(DataConfig(root=str(tmp_path / "empty")))
    fill(tmp_path / "half" / "train", {"a": 1})
    with pytest.raises(BadInput, match=r"test"):
        images.load(DataConfig(root=str(tmp_path / "half")))
    fill(tmp_path / "half" / "test", {"b": 1})
    with pytest.raises(BadInput, match="classes that train/ has not: b"):
        images.load(DataConfig(root=str(tmp_path / "half")))


def test_a_broken_image_is_one_line(tmp_path: Path) -> None:
    source = images.load(DataConfig(root=str(fill(tmp_path, {"a": 1}))))
    for number in range(5):
        (tmp_path / "a" / f"{number}.png").write_bytes(b"no image")
    with pytest.raises(BadInput, match=r"an image cannot be read: .*\d\.png \("):
        source.train.read(np.arange(2))
    whole = BytesIO()
    Image.new("RGB", (64, 64)).save(whole, "png")
    for number in range(5):  # pillow does not say of which file it is
        (tmp_path / "a" / f"{number}.png").write_bytes(whole.getvalue()[:-30])
    with pytest.raises(BadInput, match=r"an image cannot be read: .*\d\.png \("):
        source.train.read(np.arange(2))


@pytest.mark.parametrize(("mode", "kind"), [("I;16", np.uint16), ("I", np.int32), ("F", np.float32)])
def test_more_than_8_bits_a_channel_are_refused(tmp_path: Path, mode: str, kind: type) -> None:
    """Pillow would make them white or black; an exported model refuses the same."""
    (tmp_path / "a").mkdir()
    for number in range(5):
        Image.fromarray(np.full((8, 8), 700, kind)).save(tmp_path / "a" / f"{number}.tiff")
    line = rf"\d\.tiff .*more than 8 bits a channel, mode {mode}: convert it to 8"
    with pytest.raises(BadInput, match=rf"data\.root: .* an image cannot be read: .*{line}"):
        images.load(DataConfig(root=str(tmp_path))).train.read(np.arange(2))
    with pytest.raises(ValueError, match=line):
        plain.raw({"input": "images", "shape": [3, 32, 32]}, [tmp_path / "a" / "0.tiff"])
