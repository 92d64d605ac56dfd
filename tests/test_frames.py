"""A DataFrame from `fit` to probabilities, and what is said of a table before torch is imported."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from refusals import refuses

import fl_lightning
from fl_lightning.exporting import plain
from fl_lightning.exporting.calibration import CalibrationRule, best_temperature, best_threshold
from fl_lightning.lab.given import object_settings
from fl_lightning.lab.report.figures import certainty

SITES = ("Aarau", "Basel", "Chur")
QUICK = {
    "evaluation.predictions": True,
    "method": "local",
    "federation": {"rounds": 1, "local_epochs": 2},
    "data": {
        "impute": "median",
        "one_hot": ["sex"],
        "dates": ["seen"],
        "scale": "standard",
        "fitted": "own",
        "validation": 0.2,
    },
    "fabric.accelerator": "cpu",
    "loggers": None,
    "callbacks": {"heatmaps": None, "progress": None},
}


def patients():
    """Two rows of each patient; ages are missing, as Int64 has it."""
    rng = np.random.default_rng(0)
    age = np.repeat(rng.integers(30, 90, 90), 2)
    return pd.DataFrame(
        {
            "hospital": np.repeat([SITES[k % 3] for k in range(90)], 2),
            "patient": np.repeat([f"p{k}" for k in range(90)], 2),
            "age": pd.array(
                [None if k % 11 == 0 else k_age for k, k_age in enumerate(age)], "Int64"
            ),
            "sex": pd.Categorical(rng.choice(["f", "m"], 180)),
            "seen": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 99, 180), "D"),
            "outcome": np.where(age > 60, "ill", "well"),
        },
        index=[f"row {k}" for k in range(180)],
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    keys = QUICK | {"out": str(tmp_path_factory.mktemp("frames"))}
    columns = {"label": "outcome", "group": "hospital", "unit": "patient"}
    return fl_lightning.fit(keys, data=patients(), **columns)


def test_a_frame_gives_probabilities_by_class(run):
    assert list(run.client_names.values()) == list(SITES)
    some = patients().iloc[[5, 0, 40, 3, 11]]
    chances = run.predict_proba(some)
    assert (list(chances.index), list(chances)) == (list(some.index), ["ill", "well"])
    np.testing.assert_allclose(chances.sum(axis=1), 1, rtol=1e-6)
    for place, (hospital, row) in enumerate(zip(some.hospital, chances.to_numpy(), strict=True)):
        alone = run.predict_proba(hospital, some.iloc[[place]])
        np.testing.assert_allclose(alone.to_numpy()[0], row, rtol=1e-5)
    assert list(run.predict(some)) == list(chances.idxmax(axis=1))


def test_predictions_are_kept_and_drawn_by_client(run):
    kept = run.predictions
    assert kept.groupby("name").size().to_dict() == dict(
        zip(SITES, run.split.test_samples, strict=True)
    )
    rows = patients().iloc[kept.row]
    assert list(rows.hospital) == list(kept["name"]) and list(rows.outcome) == list(kept.label)
    chances = run.predict_proba(rows).to_numpy()
    np.testing.assert_allclose(kept[["probability_ill", "probability_well"]], chances, atol=1e-6)
    right = kept.label.to_numpy() == np.array(["ill", "well"])[chances.argmax(1)]
    by_client = pd.Series(right).groupby(kept.client).mean()
    np.testing.assert_allclose(by_client, run.final_accuracies)
    figures = certainty(run, 0)
    assert [len(axes.lines) for axes in figures["certainty-0"].axes] == [4, 4]  # and the diagonal


@pytest.mark.parametrize(
    "change, line",
    [
        (lambda frame: frame.assign(hospital="Davos"), "no client 'Davos'; names: "),
        (lambda frame: frame.drop(columns="hospital"), "x=.*rows whose column 'hospital'"),
        (lambda frame: frame.drop(columns="age"), "x=.*it lacks the column age"),
        (lambda frame: frame.iloc[:0], "x=.*rows whose column"),
    ],
)
def test_frames_that_cannot_be_predicted(change, line, run):
    with refuses(line):
        run.predict_proba(change(patients()))


@pytest.mark.parametrize(
    "data, columns, line",
    [
        (None, {"label": "outcome"}, "label='outcome'.*a DataFrame"),
        ((np.zeros((9, 2)), np.zeros(9)), {"group": "g"}, "group='g'.*a DataFrame"),
        (patients().T, {"label": 3}, "label=3.*it must be a column's name, a text"),
        (pd.DataFrame({("a", "b"): [1]}), {}, "data=.*2 levels"),
    ],
)
def test_columns_that_are_none(data, columns, line, tmp_path):
    with refuses(line), object_settings({"data": data, **columns}, tmp_path / "out"):
        pass
    assert not (tmp_path / "out").exists()


def test_an_index_with_a_name_is_a_column(tmp_path):
    frame = patients().set_index("hospital")
    with object_settings(
        {"data": frame, "label": "outcome", "group": "hospital"}, tmp_path
    ) as layer:
        assert layer["federation"] == {"clients": 3}
        assert layer["data"]["group_column"] == "hospital"


@pytest.mark.slow
def test_an_exported_file_gives_probabilities(run, tmp_path, monkeypatch):
    exported = fl_lightning.export(
        run.folder,
        "Basel",
        tmp_path / "basel_proba.safetensors",
        temperature=True,
        threshold="cost",
        cost=1000.0,
        case="ill",
    )
    assert "ill from a probability of" in str(exported)
    patients().to_csv(tmp_path / "rows.csv", index=False)
    words = [sys.executable, str(exported.loader), str(tmp_path / "rows.csv")]
    answers = [
        subprocess.run([*words, *more], capture_output=True, text=True, check=True).stdout
        for more in ([], ["--proba"])
    ]
    head, *rows = answers[1].splitlines()
    assert head == "ill,well"
    chances = np.array([row.split(",") for row in rows], float)
    np.testing.assert_allclose(chances.sum(1), 1)
    case, least = exported.facts["about"]["threshold"]
    assert case == "ill"
    expected = np.where(chances[:, 0] >= least, "ill", "well")
    assert answers[0].splitlines() == expected.tolist()
    raw = run.predict_proba("Basel", patients()).to_numpy()
    ratio = np.log(chances[:, 0] / chances[:, 1]) / np.log(raw[:, 0] / raw[:, 1])
    np.testing.assert_allclose(ratio, 1 / exported.facts["about"]["temperature"], rtol=1e-3)


# ---------------------------------------------------------------- what is chosen on validation data


def test_the_temperature_is_that_of_the_labels():
    rng = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(20_000, 3, generator=rng, dtype=torch.float64)
    labels = (scores / 2.5).softmax(1).multinomial(1, generator=rng)[:, 0]
    assert best_temperature(scores, labels) == pytest.approx(2.5, rel=0.05)


@pytest.mark.parametrize("cost", [None, 0.2, 5.0])
def test_the_threshold_is_the_best_of_all(cost):
    rng = np.random.default_rng(0)
    is_case = rng.random(300) < 0.3
    chances = rng.beta(2 + 2 * is_case, 4)

    def loss(least):
        missed, alarms = (chances < least) & is_case, (chances >= least) & ~is_case
        if cost is None:
            return float(missed.sum() / is_case.sum() + alarms.sum() / (~is_case).sum())
        return float(cost * missed.sum() + alarms.sum())

    best = min(loss(least) for least in [*chances, 2.0])
    assert loss(best_threshold(chances, is_case, cost)) == pytest.approx(best)


@pytest.mark.parametrize(
    "wanted, labels, names, line",
    [
        ({"temperature": True}, [], ["a", "b"], "temperature=.*data.validation 0.2"),
        (
            {"threshold": "youden"},
            [0, 1],
            ["a", "b", "c"],
            "threshold=.*two classes, and the model has 3",
        ),
        ({"threshold": "youden"}, [1, 1], ["a", "b"], "threshold=.*only one class"),
        (
            {"threshold": "cost", "cost": 2.0, "case": "c"},
            [0, 1],
            ["a", "b"],
            "case='c'.*a and b",
        ),
        (
            {"threshold": "cost", "cost": 2.0},
            [0, 1],
            ["a", "b"],
            "case=None.*give cost and case with threshold cost",
        ),
        ({"cost": 2.0}, [0, 1], ["a", "b"], "cost=2.0.*and only then"),
    ],
)
def test_what_cannot_be_chosen(wanted, labels, names, line):
    with refuses(line):
        CalibrationRule(**wanted).fitted(
            torch.zeros(len(labels), len(names)), torch.tensor(labels), names, "client 0"
        )


def test_a_regression_has_no_probabilities():
    with pytest.raises(ValueError, match="only a model that gives each row a class"):
        plain.probabilities({"class_names": []}, torch.zeros(3, 1))


# ---------------------------------------------------------------- before torch


TABLE = "--data.root t.csv --data.label_column sick"
REFUSED = {
    f"fit {TABLE}": "data.label_column='sick'",
    f"deploy {TABLE} --out a": "data.label_column='sick'",
    f"plan {TABLE}": "data.label_column='sick'",
    "worth --data.root none.csv --out w": "data.root='none.csv'",
}
REFUSE = """
import sys
from fl_lightning.cli import main
assert [main(line.split()) for line in sys.argv[1:]] == [2] * len(sys.argv[1:])
assert "torch" not in sys.modules
"""


@pytest.mark.slow
def test_torch_is_not_imported_to_refuse_a_table(tmp_path):
    patients().to_csv(tmp_path / "t.csv", index=False)
    words = [sys.executable, "-c", REFUSE, *REFUSED]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=True)
    lines = done.stderr.splitlines()
    for shown, line in zip(lines, REFUSED.values(), strict=True):
        assert shown.startswith(f"fl-train: error: {line}")
