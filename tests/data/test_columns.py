"""Columns of a table one-hot, imputed and scaled by scikit-learn, on each silo's training part or
on all of them."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from refusals import refuses
from sklearn.base import BaseEstimator
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import RobustScaler, StandardScaler

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import prepare
from fl_lightning.data.columns import Columns
from fl_lightning.data.table import _features
from fl_lightning.exporting import plain as exported
from fl_lightning.exporting.about import described

HERE = "data.test_columns"
NOTHING = {"impute": None, "scale": None, "columns": ["row"], "one_hot": None}
SITES = ("Aarau", "Basel", "Chur")


def table(folder, empty=0.1):
    """Three hospitals of 40 patients: `row` is a number of its own, `age` has empty cells, doses
    differ by hospital."""
    rng = np.random.default_rng(0)
    with (folder / "t.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["site", "row", "age", "dose", "sex", "ill"])
        for number in range(120):
            site = number % 3
            age = "" if rng.random() < empty else f"{rng.normal(60 + 5 * site, 9):.1f}"
            sex = ["f", "m", ""][rng.choice(3, p=[0.5, 0.4, 0.1])]
            out.writerow(
                [
                    SITES[site],
                    number,
                    age,
                    f"{rng.lognormal(site, 1):.4f}",
                    sex,
                    ["no", "yes"][number % 2],
                ]
            )
    return DataConfig(
        root=str(folder / "t.csv"),
        label_column="ill",
        group_column="site",
        partition="natural",
        columns=["row", "age", "sex", "dose"],
        one_hot=["sex"],
        impute="median",
        scale="standard",
        client_test=0.25,
        validation=0.2,
        min_samples=5,
    )


def raw(folder):
    """The columns of numbers as they are in the file, (120, 3), and the column of words."""
    with (folder / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    numbers = [[float(r[c]) if r[c] else np.nan for c in ("row", "age", "dose")] for r in rows]
    return np.array(numbers), [r["sex"] for r in rows]


def inputs(data, client, part):
    batches = getattr(data.client(client), part).batches(999)
    return torch.cat([x for x, _ in batches]).double().numpy()


@pytest.mark.parametrize("fitted", ["own", "shared"])
@pytest.mark.parametrize(
    "scale, scaler",
    [("standard", StandardScaler), ("sklearn.preprocessing.RobustScaler", RobustScaler)],
)
def test_inputs_are_scikit_learns(tmp_path, fitted, scale, scaler):
    config = replace(table(tmp_path), fitted=fitted, scale=scale)
    data, (numbers, sexes) = prepare(config, 3, 0), raw(tmp_path)
    plain = prepare(
        replace(config, columns=["row"], one_hot=None, impute=None, scale=None, fitted="shared"),
        3,
        0,
    )
    mean, std = float(plain._train.mean), float(plain._train.std)
    places = {
        (c, part): np.rint(inputs(plain, c, part)[:, 0] * std + mean).astype(int)
        for c in range(3)
        for part in ("train", "validation", "test")
    }
    for client in range(3):
        fit_on = (
            [places[client, "train"]] if fitted == "own" else [places[c, "train"] for c in range(3)]
        )
        known = numbers[np.sort(np.concatenate(fit_on))]
        imputer = SimpleImputer(strategy="median").fit(known)
        fit = scaler().fit(imputer.transform(known))
        for part in ("train", "validation", "test"):
            place = places[client, part]
            x = inputs(data, client, part)
            expected = fit.transform(imputer.transform(numbers[place]))
            np.testing.assert_allclose(x[:, [0, 1, 4]], expected, rtol=1e-4, atol=1e-5)
            hot = [[sexes[k] == "f", sexes[k] == "m"] for k in place]
            assert_array_equal(x[:, 2:4], np.array(hot, float))


class Epoch(BaseEstimator):
    """A scaler of the user's own, of large numbers."""

    def fit(self, x):
        return self

    def transform(self, x):
        return (x - 1.7e9) / 170


@pytest.mark.parametrize("scale", ["standard", "robust", "minmax", "maxabs", f"{HERE}.Epoch"])
def test_an_exported_file_makes_the_inputs_of_training_of_large_numbers(
    tmp_path, scale, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    rng = np.random.default_rng(0)
    cells = list(
        zip(
            rng.integers(0, 600, 300) + 1_700_000_000,
            rng.normal(size=300),
            rng.integers(0, 2, 300),
            strict=True,
        )
    )
    (tmp_path / "t.csv").write_text(
        "time,b,label\n" + "".join(f"{t},{b},{y}\n" for t, b, y in cells)
    )
    data = prepare(DataConfig(root=str(tmp_path / "t.csv"), scale=scale, partition="iid"), 3, 0)
    inputs = exported.inputs(described(data, 0), [[t, b] for t, b, _ in cells])
    x = data._train.inputs(
        torch.arange(len(data._train.raw)), 0.0, torch.device("cpu"), torch.float32
    )
    near = torch.cdist(x, inputs, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
    torch.testing.assert_close(
        x, inputs[near], **({} if "Epoch" in scale else {"rtol": 0, "atol": 0})
    )
    lines = [line for line in capsys.readouterr().err.splitlines() if "32 bits" in line]
    assert (
        len(lines) == 1
        and "data: column 'time': of 2" in lines[0]
        and "different values 6 are left" in lines[0]
    )


def test_without_a_scaler_the_usual_normalisation_follows_the_imputer(tmp_path):
    data = prepare(replace(table(tmp_path), scale=None), 3, 0)
    x = data._train.inputs(
        torch.arange(len(data._train.raw)), 0.0, torch.device("cpu"), torch.float32
    )
    assert torch.isfinite(x).all()
    assert x.mean(0).abs().max() < 1e-5 and (x.std(0, unbiased=False) - 1).abs().max() < 1e-3


def test_held_out_clients_are_in_no_shared_fit(tmp_path):
    config = replace(table(tmp_path), held_out_clients=0.34)
    data = prepare(config, 3, 0)
    here = np.concatenate([inputs(data, c, "train") for c in range(2)])
    assert np.abs(here[:, [0, 1, 4]].mean(0)).max() < 1e-6


def test_names_of_features_and_values_that_are_new():
    data = DataConfig(one_hot=["sex"], impute="mean")
    columns = Columns.of({"age": ["1", "2", ""], "sex": ["m", "f", "NA"]}, data)
    assert columns.features == ["age", "sex=f", "sex=m"]
    np.testing.assert_array_equal(
        _features(data, {"age": ["3", ""], "sex": ["m", "x"]}, columns),
        [[3, 0, 1], [np.nan, 0, 0]],
    )


class Picky(BaseEstimator):
    """Refuses a part whose doses are as large as those in Chur."""

    def fit(self, x):
        if np.median(x[:, 2]) > 4:
            raise ValueError("these doses are too large")
        return self

    def transform(self, x):
        return x


class Wide(BaseEstimator):
    """Makes twice as many columns."""

    def fit(self, x):
        return self

    def transform(self, x):
        return np.concatenate([x, x], 1)


@pytest.mark.parametrize(
    "change, what",
    [
        (
            {"scale": f"{HERE}.Picky", "fitted": "own"},
            r"data\.scale=.*it fails on the samples of Chur: these doses",
        ),
        (
            {"scale": f"{HERE}.Wide", "fitted": "own"},
            r"data\.scale=.*shape \(6,\) from \(3,\) for Aarau",
        ),
        ({"scale": "standrad"}, r"data\.scale='standrad'.*choose among standard"),
        ({"scale": "numpy.zeros"}, r"data\.scale='numpy\.zeros'.*it cannot be made"),
        ({"one_hot": ["age", "town"]}, r"data\.one_hot='town'.*feature columns"),
        ({"one_hot": None}, r"column 'sex' of sample 1 holds 'f'.*list it in data\.one_hot"),
        ({"impute": None}, r"column 'age' of sample \d+ holds ''.*set data\.impute"),
        (NOTHING | {"fitted": "own"}, r"data\.fitted='own'.*nothing is to be fitted"),
        ({"fitted": "own", "public": "held_back"}, r"data\.fitted='own'.*belong to no client"),
    ],
)
def test_what_cannot_work_is_one_line(tmp_path, change, what, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    with refuses(what) as caught:
        prepare(replace(table(tmp_path), **change), 3, 0)
    assert "\n" not in str(caught.value)


def test_a_column_that_a_silo_never_has_is_named(tmp_path):
    config = table(tmp_path)
    lines = (tmp_path / "t.csv").read_text().splitlines()
    cells = [line.split(",") for line in lines]
    emptied = [",".join([*c[:2], "" if c[0] == "Basel" else c[2], *c[3:]]) for c in cells]
    (tmp_path / "t.csv").write_text("\n".join(emptied))
    prepare(config, 3, 0)
    with refuses(r"data\.impute='median'.*column 'age' of Basel has no value.*shared"):
        prepare(replace(config, fitted="own"), 3, 0)
