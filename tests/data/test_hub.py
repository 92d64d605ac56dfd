"""Hugging Face data on disk, in their own formats."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from PIL import Image
from refusals import refuses

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import hub, prepare
from fl_lightning.data.load import load

datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")


def table(count=60):
    return {
        "a": [float(k) for k in range(count)],
        "b": [[k, k + 1] for k in range(count)],
        "label": ["yes" if k % 2 else "no" for k in range(count)],
        "writer": [f"w{k % 3}" for k in range(count)],
    }


def test_columns_of_numbers_and_a_group_column(tmp_path):
    datasets.Dataset.from_dict(table()).save_to_disk(str(tmp_path / "d"))
    config = DataConfig(
        source="hf", root=str(tmp_path / "d"), group_column="writer", partition="natural"
    )
    source = hub.load(config)
    assert source.class_names == ["no", "yes"] and source.group_names == ["w0", "w1", "w2"]
    for pool, size in ((source.train, 48), (source.test, 12)):
        x = pool.read_all()
        assert x.shape == (size, 3) and x.dtype == np.float32 and pool.groups is not None
        assert_array_equal(x[:, 0], x[:, 1])
        assert_array_equal(x[:, 0] % 2, pool.labels)
        assert_array_equal(x[:, 0] % 3, pool.groups)
    assert prepare(config, 3, 0).train_sizes == [16, 16, 16]


@pytest.mark.parametrize("form", ["saved", "parquet"])
def test_images_with_named_classes_and_a_test_part(form, tmp_path):
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )

    def part(first, count):
        pictures = [Image.new("RGB", (20, 24), (k, 0, 0)) for k in range(first, first + count)]
        held = {"image": pictures, "label": [k % 2 for k in range(first, first + count)]}
        return datasets.Dataset.from_dict(held, features=features)

    if form == "saved":
        datasets.DatasetDict({"train": part(0, 20), "test": part(100, 6)}).save_to_disk(
            str(tmp_path / "d")
        )
    else:
        (tmp_path / "d").mkdir()
        part(0, 20).to_parquet(str(tmp_path / "d" / "train-00000-of-00001.parquet"))
        part(100, 6).to_parquet(str(tmp_path / "d" / "test-00000-of-00001.parquet"))
    source, made_up = load(DataConfig(source="hf", root=str(tmp_path / "d")), 2, False)
    assert not made_up and source.class_names == ["cat", "dog"]
    assert (len(source.train.labels), len(source.test.labels)) == (20, 6)
    for pool in (source.train, source.test):
        raw = pool.read_all()
        assert raw.shape[1:] == (3, 32, 32) and raw.dtype == np.uint8
        assert_array_equal(raw[:, 0, 5, 5] % 2, pool.labels)
    assert source.test.read_all()[:, 0, 0, 0].tolist() == list(range(100, 106))


def test_texts(tmp_path):
    def part(words):
        return datasets.Dataset.from_dict({"text": [words, words[::-1]] * 10, "label": [0, 1] * 10})

    datasets.DatasetDict({"train": part("abcd"), "validation": part("abxd")}).save_to_disk(
        str(tmp_path / "d")
    )
    source = hub.load(DataConfig(source="hf", root=str(tmp_path / "d"), length=6))
    assert source.vocabulary == 5  # a to d, and what is new
    assert source.train.read(np.array([0, 1])).tolist() == [[0, 0, 1, 2, 3, 4], [0, 0, 4, 3, 2, 1]]
    assert source.test.read(np.array([0])).tolist() == [[0, 0, 1, 2, 0, 4]]


@pytest.mark.parametrize(
    "change, options, message",
    [
        (
            {},
            {"label_column": "crop"},
            r"data\.label_column='crop'.*no such column; columns: a, b, label, writer",
        ),
        (
            {"__index_level_0__": [*range(60)]},
            {},
            r"data\.root=.*column '__index_level_0__' is a row index that pandas wrote",
        ),
        (
            {},
            {"columns": ["a", "writer"]},
            r"data\.columns='writer'.*row 1 of train holds 'w0': no numbers",
        ),
        (
            {"b": [[1, 2]] * 59 + [[1]]},
            {"columns": ["a", "b"]},
            r"column 'b' of row 60 of train holds '\[1\]'",
        ),
        ({"a": [1.0, None] * 30}, {"columns": ["a"]}, r"column 'a' of row 2 of train holds 'None'"),
        (
            {"label": [1.0, float("nan")] * 30},
            {"columns": ["a"]},
            r"column 'label' of row 2 of train is empty",
        ),
        (
            {"label": [[1, 2]] * 60},
            {"columns": ["a"]},
            r"column 'label' of row 1 of train holds several values",
        ),
    ],
)
def test_what_does_not_go_is_named(change, options, message, tmp_path):
    datasets.Dataset.from_dict(table() | change).to_parquet(str(tmp_path / "d.parquet"))
    with refuses(message):
        hub.load(DataConfig(source="hf", root=str(tmp_path / "d.parquet"), **options))


@pytest.mark.parametrize(
    "image, says",
    [
        (None, "an image cannot be read: column 'image' of row"),
        (
            Image.fromarray(np.full((8, 8), 700, np.uint16)),
            "it has more than 8 bits",
        ),
    ],
)
def test_cells_without_an_image_or_a_class_are_named(image, says, tmp_path):
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    held = {"image": [Image.new("RGB", (8, 8)), image] * 5, "label": [0, 1] * 5}

    def source():
        made = datasets.Dataset.from_dict(held, features=datasets.Features(kinds))
        made.to_parquet(str(tmp_path / "d.parquet"))
        return hub.load(DataConfig(source="hf", root=str(tmp_path / "d.parquet")))

    with refuses(says):
        source().train.read_all()
    held["label"][3] = None
    with refuses(r"column 'label' of row 4 of train is empty"):
        source()


@pytest.mark.parametrize("column", ["label_column", "group_column"])
def test_a_test_part_that_numbers_its_classes_in_another_order(column, tmp_path):
    def part(names, *classes):
        cells = {"a": [*range(len(classes))], "kind": [*classes], "other": ["x"] * len(classes)}
        made = datasets.Dataset.from_dict(cells)
        return made.cast_column("kind", datasets.ClassLabel(names=names)) if names else made

    other = "label_column" if column == "group_column" else "group_column"
    options = {column: "kind", other: "other"}
    config = DataConfig(source="hf", root=str(tmp_path), columns=["a"], **options)
    part(["cat", "dog"], "cat", "dog", "cat").to_parquet(str(tmp_path / "train.parquet"))
    for names in (["eel", "dog", "cat"], []):
        part(names, "dog", "dog", "cat").to_parquet(str(tmp_path / "test.parquet"))
        test = hub.load(config).test
        assert (test.labels if column == "label_column" else test.groups).tolist() == [1, 1, 0]
        part(names, "dog", "eel").to_parquet(str(tmp_path / "test.parquet"))
        with refuses(r"'kind' .*row 2 of test holds 'eel', which training data do not have"):
            hub.load(config)
