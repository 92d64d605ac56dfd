"""A CSV study at its hospitals: tables with words, empty cells, imputers and scalers."""

from __future__ import annotations

import csv
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning.cli import main
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.sites.app import PACKAGE
from fl_lightning.sites.data import Facts, Unfit, at_site
from fl_lightning.sites.ends import config_of
from fl_lightning.sites.rehearsal import differences, rehearse, simulate

from .processes import in_process, nodes_of, run_of
from .test_equal import SMALL
from .test_equal import config_of as small

HEAD = ["age", "dose", "sex", "ward", "outcome"]
TABLE = (
    "--data.source table --data.root table.csv --data.label_column outcome --data.public null "
    "--data.one_hot [sex,ward] --data.fraction 1"
)


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The rows of `table.csv` in the working directory."""
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0)
    lines = []
    for _ in range(240):
        age, dose = draws.normal(60, 12), draws.exponential(3)
        sex, ward = draws.choice(["m", "f"]), draws.choice(["a, b", "b", "ü"])
        outcome = "sick" if age / 20 + dose / 3 + draws.normal() > 4 else "well"
        first = "" if draws.random() < 0.1 else f"{age:.7f}"
        second = "NA" if draws.random() < 0.2 else f"{dose:.9f}"
        lines.append([first, second, "" if draws.random() < 0.1 else sex, ward, outcome])
    with Path("table.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([HEAD, *lines])
    return [dict(zip(HEAD, line, strict=True)) for line in lines]


@pytest.mark.sampled("robust", "own")
@pytest.mark.parametrize(
    ("method", "flags"),
    [
        ("fedavg", "--data.impute median --data.scale robust"),
        ("fedper", "--data.impute mean --data.scale standard"),
        ("ditto", "--data.impute mean --data.scale minmax --data.fitted own"),
        ("ditto", "--data.impute most_frequent"),
        ("fedmd", "--data.impute median --data.scale maxabs --data.public held_back"),
    ],
    ids=["robust", "standard", "own", "impute", "public"],
)
def test_scores_are_the_simulators(method: str, flags: str, tmp_path: Path) -> None:
    config = small(method, *f"{TABLE} {flags}".split())
    assert differences(simulate(config, tmp_path), rehearse(config, tmp_path)) == []


def test_a_regression_of_a_table(tmp_path: Path) -> None:
    table = TABLE.replace("outcome", "age").replace("[sex,ward]", "[sex,ward,outcome]")
    text = Path("table.csv").read_text(encoding="utf-8").splitlines()
    kept = [line for line in text if not line.startswith(",")]
    Path("table.csv").write_text("\n".join(kept) + "\n", encoding="utf-8")
    flags = f"{table} --data.task regression --data.impute median --data.scale standard"
    flags += " --optimizer.lr 0.00001"
    config = small("fedavg", *flags.split())
    assert differences(simulate(config, tmp_path), rehearse(config, tmp_path)) == []


@pytest.fixture
def app() -> Path:
    """An app of the table for two sites."""
    flags = f"{SMALL.replace('clients 3', 'clients 2')} {TABLE} --method ditto"
    flags += " --data.impute median --data.scale standard --rehearse false"
    assert main(["deploy", *flags.split(), "--out", "app", "--sites", "sites"]) == 0
    return Path("app").resolve() / PACKAGE


def nodes(folder: Path) -> list[dict[str, Any]]:
    """Node configurations of the two sites."""
    return [node | {"data": node["data"].replace(".npz", ".csv")} for node in nodes_of(folder)]


def test_predictions_at_the_site_are_the_simulators(
    app: Path, rows: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of exported models, on raw rows; what travels with the app are declared statistics."""
    run_of(app, in_process(app, nodes(tmp_path)), tmp_path / "center")
    simulated = simulate(config_of(app), tmp_path)
    (simulated / "config.yaml").write_bytes((app / "config.yaml").read_bytes())
    answers = []
    for name, run in (("simulated", simulated), ("deployed", tmp_path / "at-1" / "app")):
        words = ["--client", "1", "--out", f"{name}.safetensors"]
        assert main(["export", "--run", str(run), *words]) == 0
        monkeypatch.syspath_prepend(str(tmp_path))
        answers.append(importlib.import_module(name).predict(rows[:50]))
    assert answers[0] == answers[1]
    assert set(answers[0]) == {"sick", "well"}
    facts = json.loads((app / "facts.json").read_text())
    assert facts["class_names"] == ["sick", "well"]
    assert facts["columns"][2:] == [["sex", ["f", "m"]], ["ward", ["a, b", "b", "ü"]]]
    assert len(facts["fills"]) == len(facts["scale"][0]) == 2 + 2 + 3


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("sick", "dead", "its data have classes that the federation does not know"),
        (",ü,", ",z,", "its data cannot be read"),
        ("dose", "drug", "its data cannot be read"),
        ("part", "half", "its data cannot be read"),
        ("test\n", "exam\n", "its data cannot be read"),
    ],
)
def test_a_table_that_does_not_fit_is_one_line(
    old: str, new: str, sentence: str, app: Path, tmp_path: Path
) -> None:
    file = Path("sites/site-1.csv")
    file.write_text(file.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(RunFailed, match=rf"^site 1 cannot take part: {sentence}$"):
        run_of(app, in_process(app, nodes(tmp_path)), tmp_path / "center")


def test_an_array_of_raw_features_is_scaled_as_the_table(app: Path) -> None:
    """A site may also have an npz file of encoded features."""
    config, facts = config_of(app), Facts.read(app / "facts.json")
    table = at_site(facts, config, 1, Path("sites/site-1.csv"))
    with Path("sites/site-1.csv").open(newline="", encoding="utf-8") as file:
        whole = [row for row in csv.DictReader(file) if row["age"] and row["dose"]]
    arrays = {"raw": np.ones(1)}
    for part in ("train", "validation", "test"):
        chosen = [row for row in whole if row["part"] == part]
        encoded = [
            [float(row["age"]), float(row["dose"])]
            + [
                float(row[name] == word)
                for name, words in facts.columns[2:]
                for word in words or []
            ]
            for row in chosen
        ]
        arrays[f"x_{part}"] = np.array(encoded, np.float32)
        arrays[f"y_{part}"] = np.array([facts.class_names.index(r["outcome"]) for r in chosen])
    np.savez("site.npz", **arrays)  # type: ignore[arg-type]
    array = at_site(facts, config, 1, Path("site.npz"))
    ours, theirs = (data.client(1).train.x for data in (array, table))
    assert any(torch.equal(ours[0], row) for row in theirs)
    with pytest.raises(Unfit):
        at_site(facts, config, 1, Path("none.csv"))
