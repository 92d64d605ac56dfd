"""Rows of one person: no unit in two parts of a split; copies in one fold; what is refused."""

import numpy as np
import pytest
from refusals import refuses

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import arrays, given, prepare, units


def written(folder, visits=4, persons=12, clash=False):
    """Two hospitals of so many persons with so many rows each."""
    rng, lines = np.random.default_rng(0), ["hospital,patient,a,b,ill"]
    for hospital in ("Aarau", "Basel"):
        for person in range(persons):
            name = f"p{person}" if clash else f"{hospital}{person}"
            for _ in range(visits):
                a, b = rng.normal(size=2)
                lines.append(f"{hospital},{name},{a:.4f},{b:.4f},{int(a > 0)}")
    file = folder / "visits.csv"
    file.write_text("\n".join(lines))
    return file


def config(root, **keys):
    plain = {"label_column": "ill", "group_column": "hospital", "partition": "natural"}
    plain |= {"unit_column": "patient", "min_samples": 2}
    return DataConfig(root=str(root), **(plain | keys))


@pytest.mark.parametrize("keys", [{"folds": 4}, {"client_test": 0.25}, {"client_test": None}])
def test_no_unit_lies_in_two_parts(tmp_path, keys):
    """Of training, validation and test; folds test every row once."""
    chosen, tested = config(written(tmp_path), validation=0.3, **keys), []
    for seed in range(keys.get("folds", 2)):
        data = prepare(chosen, 2, seed)
        for c in range(2):
            train, test = data.unit_ids(c)
            validation = data._train.units[data._shares[1][c]]
            parts = [set(part.tolist()) for part in (train, validation, test)]
            assert all(parts) and sum(map(len, parts)) == len(set.union(*parts))
        tested.append(np.concatenate([data.test_sample_ids(c) for c in range(2)]))
    if "folds" in keys:
        assert sorted(np.concatenate(tested).tolist()) == list(range(96))


def test_the_unit_column_is_no_feature(tmp_path):
    assert prepare(config(written(tmp_path)), 2, 0).input_shape == (2,)


@pytest.mark.parametrize(
    "made, keys, says",
    [
        ({"clash": True}, {}, "Aarau and Basel have rows of the same unit"),
        ({}, {"unit_column": "clinic"}, "there is no such column"),
        ({}, {"columns": ["a", "patient"]}, "it cannot be a feature or the label: leave it out"),
        ({"persons": 3}, {"folds": 4}, "Aarau has 3 units: set it to at most"),
        ({"persons": 1}, {"client_test": 0.2}, "samples of one unit"),
        ({}, {"public": "held_back"}, "public samples may come from"),
    ],
)
def test_what_cannot_work_is_one_line(tmp_path, made, keys, says):
    with refuses(says):
        prepare(config(written(tmp_path, **made), **keys), 2, 0)


def test_one_unit_is_refused():
    with refuses("all rows are of one unit"):
        units.check_apart("patient", np.zeros(4, int), [np.arange(4)], ["a"])


def test_arrays_and_python_data_have_units(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)).astype(np.float32), np.arange(40) % 2
    client, unit = np.arange(40) // 20, np.array([f"p{k // 4}" for k in range(40)])
    _, settings = given.keep((x, y, client, unit), tmp_path)
    data = prepare(DataConfig(**settings["data"], folds=2), 2, 0)
    train, test = data.unit_ids(0)
    assert len(np.unique(np.concatenate([train, test]))) == 5 and not set(train) & set(test)
    keep = {"x_train": x, "y_train": y, "x_test": x, "y_test": y, "unit_train": unit}
    np.savez(tmp_path / "a.npz", **keep)
    with refuses("unit_test holds 0 units of 40 samples"):
        arrays.load(DataConfig(root=str(tmp_path / "a.npz")))


def test_copies_are_found_up_to_the_last_digits_and_coarse_rows_are_none():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(60, 4))
    copied = np.concatenate([rows, np.round(rows[:20], 4), rng.normal(size=(20, 4))])
    group = units.copies(copied)
    assert (group[60:80] == np.arange(20)).mean() > 0.9
    assert len(np.unique(group[80:])) == 20 and (group[:60] == np.arange(60)).all()
    coarse = rng.integers(0, 2, (100, 4)).astype(float)
    assert len(np.unique(units.copies(coarse))) == 100


def test_copies_lie_in_one_fold(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 4)).astype(np.float32)
    x, y = np.concatenate([x, x[:10]]), np.concatenate([np.arange(30), np.arange(10)]) % 2
    _, settings = given.keep((x, y, np.zeros(40, int)), tmp_path)
    for seed in range(3):
        data = prepare(DataConfig(**settings["data"], folds=3), 1, seed)
        both = [set(map(bytes, part.numpy())) for part in data.raw_samples(0)]
        assert not both[0] & both[1]
