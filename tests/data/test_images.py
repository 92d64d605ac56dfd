from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from refusals import refuses

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import images
from fl_lightning.exporting import plain


def source_in(folder):
    return images.load(DataConfig(root=str(folder)))


def fill(folder, classes, count=5):
    """`count` pictures of each class, whose green is the class's number."""
    for name, green in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (30 + number, 40), (number, green, 0)).save(
                folder / name / f"{number}.png"
            )
    return folder


def test_train_and_test_folders(tmp_path):
    fill(tmp_path / "train", {"cat": 10, "dog": 20, "owl": 30})
    fill(tmp_path / "test", {"dog": 20, "owl": 30}, count=2)
    source = source_in(tmp_path)
    assert source.class_names == ["cat", "dog", "owl"]
    assert source.train.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    # numbered as in train/, though test/ lacks the first class
    assert source.test.labels.tolist() == [1, 1, 2, 2]
    read = source.test.read(np.arange(4))
    assert read.shape == (4, 3, 32, 32)
    assert read[:, 1, 0, 0].tolist() == [20, 20, 30, 30]


def test_bad_folders_are_one_line(tmp_path):
    for root in (None, str(tmp_path / "none")):
        with refuses("a folder with train/CLASS"):
            images.load(DataConfig(root=root))
    (tmp_path / "empty").mkdir()
    with refuses("it must be a folder with"):
        source_in(tmp_path / "empty")
    fill(tmp_path / "half" / "train", {"a": 1})
    with refuses(r"test"):
        source_in(tmp_path / "half")
    fill(tmp_path / "half" / "test", {"b": 1})
    with refuses("classes that train/ lacks: b"):
        source_in(tmp_path / "half")


def test_a_broken_image_is_one_line(tmp_path):
    source = source_in(fill(tmp_path, {"a": 1}))
    for number in range(5):
        (tmp_path / "a" / f"{number}.png").write_bytes(b"no image")
    with refuses(r"an image cannot be read: .*\d\.png \("):
        source.train.read(np.arange(2))
    whole = BytesIO()
    Image.new("RGB", (64, 64)).save(whole, "png")
    for number in range(5):  # pillow does not say of which file it is
        (tmp_path / "a" / f"{number}.png").write_bytes(whole.getvalue()[:-30])
    with refuses(r"an image cannot be read: .*\d\.png \("):
        source.train.read(np.arange(2))


@pytest.mark.parametrize("mode, kind", {"I;16": np.uint16, "I": np.int32, "F": np.float32}.items())
def test_more_than_8_bits_a_channel_are_refused(tmp_path, mode, kind):
    """Pillow would make them white or black; an exported model refuses the same."""
    (tmp_path / "a").mkdir()
    for number in range(5):
        Image.fromarray(np.full((8, 8), 700, kind)).save(tmp_path / "a" / f"{number}.tiff")
    line = rf"\d\.tiff .*more than 8 bits a channel, mode {mode}: convert it to 8"
    with refuses(rf"data\.root=.* an image cannot be read: .*{line}"):
        source_in(tmp_path).train.read(np.arange(2))
    with pytest.raises(ValueError, match=line):
        plain.raw({"input": "images", "shape": [3, 32, 32]}, [tmp_path / "a" / "0.tiff"])


def lines(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("data:")]


def test_hidden_folders_and_files_are_no_classes_and_no_samples(tmp_path, capsys):
    fill(tmp_path, {"cat": 1, "dog": 2, ".ipynb_checkpoints": 3, "__MACOSX": 4})
    fill(tmp_path / "cat", {".ipynb_checkpoints": 3, "more": 1})
    for name in (".DS_Store", "Thumbs.db", "._0.png"):
        (tmp_path / "dog" / name).write_bytes(b"")
    source = source_in(tmp_path)
    assert source.class_names == ["cat", "dog"]
    assert len(source.train.labels) + len(source.test.labels) == 15
    [line] = lines(capsys)
    assert ".ipynb_checkpoints (2)" in line and "__MACOSX" in line and ".DS_Store" in line


def test_what_is_no_picture_is_counted_and_named(tmp_path, capsys):
    fill(tmp_path, {"cat": 1, "dog": 2})
    for name in ("cat/a.heic", "cat/b.HEIC", "dog/notes.txt", "labels.csv", "dog/c.h5"):
        (tmp_path / name).write_bytes(b"")
    source_in(tmp_path)
    [line] = lines(capsys)
    assert (
        "5 files that are no pictures of a class (2 .heic, " in line
        and "1 .txt" in line
        and "1 .h5" in line
    )


@pytest.mark.parametrize(
    "end, form", {"gif": "GIF", "jfif": "JPEG", "JP2": "JPEG2000", "tga": "TGA"}.items()
)
def test_every_format_of_pillow_is_read(tmp_path, end, form):
    """Of several frames the first."""
    (tmp_path / "a").mkdir()
    blue = Image.new("RGB", (8, 8), "blue")
    for number in range(5):
        file = tmp_path / "a" / f"{number}.{end}"
        more = {"save_all": True, "append_images": [blue]} if form == "GIF" else {}
        Image.new("RGB", (8, 8), (200, 0, 0)).save(file, form, **more)
    read = source_in(tmp_path).train.read_all()
    assert (
        read.shape == (4, 3, 32, 32)
        and abs(read[:, 0].astype(int) - 200).max() < 4
        and read[:, 1].max() < 4
    )


def exported(file):
    return plain.raw({"input": "images", "shape": [3, 32, 32]}, [file])[0].numpy()


def test_orientation_tags_are_heeded(tmp_path):
    """A camera that was held upright stores a lying picture, and a tag; an exported model turns it
    alike."""
    (tmp_path / "a").mkdir()
    lying = Image.new("L", (32, 32))
    lying.paste(255, (0, 0, 16, 32))  # the left half is white
    tag = Image.Exif()
    tag[0x0112] = 6  # turned by 90 degrees to the right: the top half is
    for number in range(5):
        lying.save(tmp_path / "a" / f"{number}.png", exif=tag)
    read = source_in(tmp_path).train.read_all()
    assert (read[:, :, :16] == 255).all() and (read[:, :, 16:] == 0).all()
    assert np.array_equal(exported(tmp_path / "a/0.png"), read[0])


def test_transparent_pixels_lie_over_white(tmp_path):
    (tmp_path / "a").mkdir()
    for number in range(5):
        Image.new("RGBA", (32, 32), (10, 20, 30, 0)).save(tmp_path / "a" / f"{number}.png")
    read = source_in(tmp_path).train.read_all()
    assert (read == 255).all() and (exported(tmp_path / "a/0.png") == 255).all()


def test_one_class_in_two_spellings_is_one(tmp_path):
    fill(tmp_path / "train", {"Zu\u0308rich": 1, "b": 2})
    fill(tmp_path / "test", {"Z\u00fcrich": 1, "b": 2})
    assert source_in(tmp_path).class_names == ["Z\u00fcrich", "b"]


def test_a_class_without_pictures_is_named(tmp_path):
    fill(tmp_path, {"cat": 1, "dog": 2})
    (tmp_path / "owl").mkdir()
    with refuses(r"its class folder 'owl' in .* holds no picture that Pillow opens"):
        source_in(tmp_path)


def test_a_linked_folder_is_read_once(tmp_path):
    fill(tmp_path / "elsewhere", {"x": 1})
    fill(tmp_path / "data", {"a": 1})
    (tmp_path / "data" / "b").symlink_to(tmp_path / "elsewhere" / "x")
    (tmp_path / "data" / "a" / "circle").symlink_to(tmp_path / "data" / "a")
    source = source_in(tmp_path / "data")
    assert (
        source.class_names == ["a", "b"]
        and len(source.train.labels) + len(source.test.labels) == 10
    )


def test_folders_beside_train_and_test_are_named(tmp_path, capsys):
    for part in ("train", "test", "val"):
        fill(tmp_path / part, {"a": 1})
    source_in(tmp_path)
    assert lines(capsys) == [f"data: not read in {tmp_path.name}/: val"]
