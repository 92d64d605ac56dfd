import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from PIL import Image
from refusals import refuses

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import prepare, table
from fl_lightning.data.federated import number_of
from fl_lightning.data.load import read

FARMS = "farm,b1,b2,label\n" + "".join(
    f"{(i % 3) * 5},{i},{i * i},{'wheat' if i % 2 else 'oats'}\n" for i in range(90)
)


def write(folder, text, name="t.csv"):
    (folder / name).write_text(text)
    return str(folder / name)


def test_features_classes_and_groups(tmp_path):
    source = table.load(DataConfig(root=write(tmp_path, FARMS), group_column="farm"))
    assert source.class_names == ["oats", "wheat"]
    assert source.group_names == ["0", "5", "10"]  # as numbers: 10 is no second
    assert (len(source.train.labels), len(source.test.labels)) == (72, 18)
    for pool in (source.train, source.test):
        x = pool.read_all()
        assert x.shape[1:] == (2,) and x.dtype == np.float32
        assert_array_equal(x[:, 1], x[:, 0] ** 2)
        assert_array_equal(pool.labels, x[:, 0] % 2)
        assert_array_equal(pool.groups, x[:, 0] % 3)
    assert pool.groups is not None
    assert np.bincount(pool.groups).tolist() == [6, 6, 6]  # a fifth of each


def test_images_beside_the_table(tmp_path):
    lines = ["file,sex,year"]
    for i in range(40):
        year = 1905 + i % 4
        (tmp_path / str(year)).mkdir(exist_ok=True)
        Image.new("L", (32, 32), i).save(tmp_path / str(year) / f"{i}.png")
        lines.append(f"{year}/{i}.png,{'F' if i % 3 else 'M'},{year}")
    config = DataConfig(
        root=write(tmp_path, "\n".join(lines)),
        columns=["file"],
        label_column="sex",
        group_column="year",
        partition="natural",
        min_samples=4,
        client_test=0.4,
    )
    data = prepare(config, 4, 0)
    assert data.input_shape == (3, 32, 32)
    assert data.class_names == ["F", "M"]
    for client in range(4):
        for x, y in data.client(client).train.batches(99):
            raw = (x * data._train.std + data._train.mean)[:, 0, 0, 0].round()
            assert (raw % 4 == client).all()
            assert torch.equal((raw % 3 == 0).long(), y)
    (tmp_path / "1905" / "0.png").unlink()
    with refuses(r"data\.root=.*an image cannot be read: column 'file' of sample 1, 0\.png"):
        prepare(config, 4, 0)


@pytest.mark.parametrize(
    "text, options, message",
    [
        (FARMS, {"label_column": "crop"}, r"data\.label_column='crop'.*farm, b1, b2, label"),
        (FARMS, {"group_column": "site"}, r"data\.group_column='site'"),
        (FARMS, {"columns": ["b1", "b3"]}, r"data\.columns='b3'"),
        (FARMS, {"columns": ["b1", "label"]}, r"data\.columns=.*not the label's"),
        (FARMS, {"columns": []}, r"data\.columns=.*features"),
        ("a,b,label\n1,x,0\n", {}, r"column 'b' of sample 1 holds 'x'"),
        ("a,b,label\n1,2,0\n1,1e39,0\n", {}, r"column 'b' of sample 2 holds '1e39'"),
        ("a,label\n1,0\n2\n", {}, "sample 2 has 1 cells for 2"),
        ("a,label\n1,0\n2,NA\n", {}, r"column 'label' of sample 2 is empty \(NA\)"),
        (
            "a,label,g\n1,0,u\n2,1,NaN\n",
            {"group_column": "g"},
            r"column 'g' of sample 2 is empty \(NaN\)",
        ),
        (
            ",a,label\n0,1,0\n",
            {},
            r"data\.root=.*column '' is a row index that pandas wrote: list the feature columns",
        ),
        ("a,a,label\n1,1,0\n", {}, "it has 2 columns called 'a'"),
        ("a,label\n", {}, "no sample"),
        ("", {}, "a CSV file with"),
    ],
)
def test_bad_tables(text, options, message, tmp_path):
    with refuses(message) as caught:
        table.load(DataConfig(root=write(tmp_path, text), **options))
    assert "\n" not in str(caught.value)


def test_names_with_digits_and_underscores_are_no_numbers(tmp_path):
    """Python's `float` reads 3_4 as 34."""
    rows = "".join(f"{k}.5,{('3_4', '34', '5')[k % 3]}\n" for k in range(9))
    source = table.load(DataConfig(root=write(tmp_path, "a,label\n" + rows)))
    assert source.class_names == ["34", "3_4", "5"]
    with refuses(r"column 'a' of sample 2 holds '3_4', which is not a number"):
        table.load(DataConfig(root=write(tmp_path, "a,label\n5,1\n3_4,0\n")))


COMPOSED, APART = "Z\u00fcrich", "Zu\u0308rich"
"""One name in two spellings: macOS writes the second in file names."""


def test_names_in_two_spellings_are_one(tmp_path):
    rows = "".join(
        f"{(COMPOSED, APART, 'Bern')[i % 3]},{i},{(COMPOSED, APART)[i % 2]},{i % 2}\n"
        for i in range(60)
    )
    (tmp_path / "t.csv").write_text(f"gro\u0308\u00dfe,b,wo,label\n{rows}", encoding="utf-8")
    keys = {"group_column": "gr\u00f6\u00dfe", "columns": ["b", "wo"], "one_hot": ["wo"]}
    source = read(DataConfig(source="table", root=str(tmp_path / "t.csv"), **keys))
    assert source.group_names == ["Bern", COMPOSED]
    assert source.reading.columns.values == {"wo": [COMPOSED]}
    apart = {
        "group_column": "gro\u0308\u00dfe",
        "client_names": [APART, "Bern"],
        "partition": "natural",
    }
    data = prepare(
        DataConfig(source="table", root=str(tmp_path / "t.csv"), columns=["b"], **apart), 2, 0
    )
    assert data.client_names == [COMPOSED, "Bern"] and number_of(data, APART) == 0
