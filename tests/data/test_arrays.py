import numpy as np
import pytest
from refusals import refuses

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import arrays


def good(shape=(8, 9, 3), dtype=np.uint8):
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(0, 200, (6, *shape)).astype(dtype),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": rng.integers(0, 200, (3, *shape)).astype(dtype),
        "y_test": np.array([0, 1, 2]),
    }


def load(folder, contents):
    np.savez(folder / "a.npz", **contents)
    return arrays.load(DataConfig(root=str(folder / "a.npz")))


@pytest.mark.parametrize(
    "shape, read",
    [((8, 9, 3), (3, 8, 9)), ((8, 9, 1), (1, 8, 9)), ((8, 9), (1, 8, 9)), ((5,), (5,))],
)
def test_layouts(shape, read, tmp_path):
    contents = good(shape)
    source = load(tmp_path, contents)
    samples = source.train.read(np.array([4, 0]))
    assert samples.shape == (2, *read)
    expected = contents["x_train"][4]
    assert np.array_equal(
        samples[0], expected if len(shape) == 1 else expected.reshape(8, 9, -1).transpose(2, 0, 1)
    )
    assert source.class_names == ["0", "1", "2"]


def test_numbers_become_float32_and_columns_of_labels_flat(tmp_path):
    contents = good(dtype=np.float64)
    contents["y_train"] = contents["y_train"][:, None].astype(np.uint8)
    source = load(tmp_path, contents)
    assert source.train.read(np.arange(2)).dtype == np.float32
    assert source.train.labels.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"y_test": None}, "it lacks y_test"),
        ({"y_train": np.zeros(5, int)}, "x_train holds 6 samples"),
        ({"y_test": np.array([0, -1, 2])}, r"negative label -1 \(sample 2\)"),
        ({"y_test": np.array([0.5, 1, 2])}, "whole numbers"),
        ({"y_test": np.array([0, 1, 700])}, "label 700"),
        ({"x_test": np.zeros((3, 8, 8, 3), np.uint8)}, "samples of one shape"),
        ({"x_test": np.full((3, 8, 9, 3), np.nan)}, r"not finite \(sample 1\)"),
        ({"x_test": np.array(["a", "b", "c"])}, "must hold numbers"),
        ({"x_test": np.zeros((0, 8, 9, 3), np.uint8), "y_test": np.zeros(0, int)}, "is empty"),
        ({"x_test": np.zeros((3, 8, 8, 8, 3))}, "it must be x_train"),
        ({"x_test": np.array([{}, {}, {}])}, "cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_contents_are_one_line(change, message, tmp_path):
    contents = {key: value for key, value in {**good(), **change}.items() if value is not None}
    with refuses(message) as caught:
        load(tmp_path, contents)
    assert caught.value.key == "data.root"
    assert "\n" not in str(caught.value)


def test_what_is_no_archive_is_said_so(tmp_path):
    """And not answered with numpy's advice to load it unsafely."""
    file = tmp_path / "x.csv"
    file.write_text("a,b\n1,2\n")
    for read in (
        lambda: arrays.newcomer(str(file), "classification"),
        lambda: arrays.public("data.public", str(file)),
    ):
        with refuses(r"it is no \.npz archive: write it with numpy\.savez$"):
            read()


@pytest.mark.parametrize(
    "shape, where",
    [
        ((3, 32, 32), "first"),
        ((32, 32, 3), "last"),
        ((12, 64, 64), "first"),
        ((64, 64, 12), "last"),
        ((2, 20, 28), "first"),
        ((20, 28, 2), "last"),
        ((3, 3, 3), "last"),
        ((8, 8, 8), "unknown"),
        ((16, 128, 20), "unknown"),
    ],
)
def test_where_channels_are(shape, where, tmp_path):
    """Of more than four channels the shape tells where they are, or the file must."""
    assert arrays.channel_axis((6, *shape)) == where
    if where == "last":
        assert load(tmp_path, good(shape)).train.read(np.array([0])).shape[1:] == (
            shape[2],
            *shape[:2],
        )
        return
    what = (
        "seems to have its channels first"
        if where == "first"
        else "may have its channels first or last"
    )
    with refuses(rf"x_train of shape .* {what}: .* channels='first'"):
        load(tmp_path, good(shape))


def merged(capsys):
    return [line.split("; ")[0] for line in capsys.readouterr().err.splitlines()]


def test_values_that_32_bits_merge_are_named(tmp_path, capsys):
    rng, contents = np.random.default_rng(0), good((4,), np.float64)
    n = 500
    x = rng.normal(size=(n, 5))
    x[:, 1] = 1.76e9 + np.arange(n) % 100
    x[:, 2] = 1e6 + 0.01 * rng.normal(size=n)
    x[:, 3] = np.arange(n) + 0.1
    x[:, 4] = 2.0**31 + 300.0 * (np.arange(n) % 10)  # no two become one, but all are moved
    contents |= {"x_train": x, "y_train": np.arange(n) % 3, "x_test": rng.normal(size=(3, 5))}
    load(tmp_path, contents)
    [line] = merged(capsys)
    assert line.startswith(
        "data: feature 1 of x_train (and feature 2 of x_train, feature 4 of x_train): of 100 "
        "different"
    )
    contents["x_train"] = x[:, [4]]
    contents["x_test"] = contents["x_test"][:, :1]
    load(tmp_path, contents)
    assert merged(capsys) == [
        "data: feature 0 of x_train: 32 bits round its values by up to 124, of a deviation of 862"
    ]


def test_images_and_targets_are_looked_at_too(tmp_path, capsys):
    contents = good((8, 9, 3), np.float64)
    contents["x_train"] += 1e9
    contents |= {"y_train": 1.76e9 + np.arange(6), "y_test": np.zeros(3)}
    np.savez(tmp_path / "a.npz", **contents)
    arrays.load(DataConfig(root=str(tmp_path / "a.npz"), task="regression"))
    first, second = merged(capsys)
    assert first.startswith("data: y_train: of 6 different values 1 are left")
    assert second.startswith("data: x_train: of ")
    load(tmp_path, good(dtype=np.float64))
    assert merged(capsys) == []
