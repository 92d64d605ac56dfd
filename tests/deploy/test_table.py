"""A CSV study at its hospitals: tables with words, empty cells, imputers and scalers."""

import importlib
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from lines import run_line

from fl_lightning.cli import main
from fl_lightning.sites.app import PACKAGE
from fl_lightning.sites.ends import config_of
from fl_lightning.sites.rehearsal import differences, rehearse, simulate

from .processes import in_process, nodes_of, run_of
from .test_equal import SMALL
from .test_equal import config_of as small

TABLE = (
    "--data.source table --data.root table.csv --data.label_column outcome --data.public null "
    "--data.one_hot [sex,ward] --data.fraction 1"
)


@pytest.fixture(autouse=True)
def rows(tmp_path, monkeypatch):
    """The rows of `table.csv` in the working directory."""
    monkeypatch.chdir(tmp_path)
    draws, count = np.random.default_rng(0), 240
    table = pd.DataFrame(
        {
            "age": draws.normal(60, 12, count),
            "dose": draws.exponential(3, count),
            "sex": draws.choice(["m", "f"], count),
            "ward": draws.choice(["a, b", "b", "ü"], count),
        }
    )
    score = table["age"] / 20 + table["dose"] / 3 + draws.normal(size=count)
    table["outcome"] = np.where(score > 4, "sick", "well")
    for name, empty, share in (("age", "", 0.1), ("dose", "NA", 0.2), ("sex", "", 0.1)):
        table[name] = table[name].astype(object).mask(draws.random(count) < share, empty)
    table.to_csv("table.csv", index=False)
    return table.to_dict("records")


@pytest.mark.sampled("robust")
@pytest.mark.parametrize(
    "method, flags",
    [
        ("fedavg", "--data.impute median --data.scale robust"),
        ("fedper", "--data.impute mean --data.scale standard"),
        ("ditto", "--data.impute mean --data.scale minmax --data.fitted own"),
        ("ditto", "--data.impute most_frequent"),
        (
            "fedmd",
            "--method.samples 16 --data.impute median --data.scale maxabs --data.public held_back",
        ),
    ],
    ids=["robust", "standard", "own", "impute", "public"],
)
def test_scores_are_the_simulators(method, flags, tmp_path):
    config = small(method, *f"{TABLE} {flags}".split())
    assert differences(simulate(config, tmp_path), rehearse(config, tmp_path)) == []


@pytest.fixture
def app():
    """An app of the table for two sites."""
    flags = f"{SMALL.replace('clients 3', 'clients 2')} {TABLE} --method ditto"
    flags += " --data.impute median --data.scale standard --rehearse false"
    assert run_line(f"deploy {flags} --out app --sites sites") == 0
    return Path("app").resolve() / PACKAGE


def nodes(folder):
    """Node configurations of the two sites."""
    return [node | {"data": node["data"].replace(".npz", ".csv")} for node in nodes_of(folder)]


@pytest.mark.slow
def test_predictions_at_the_site_are_the_simulators(app, rows, tmp_path, monkeypatch, capsys):
    """Of exported models, on raw rows; what travels with the app are declared statistics."""
    run_of(app, in_process(app, nodes(tmp_path)), tmp_path / "center")
    simulated = simulate(config_of(app), tmp_path)
    (simulated / "config.yaml").write_bytes((app / "config.yaml").read_bytes())
    answers = []
    for name, run in (("simulated", simulated), ("deployed", tmp_path / "at-0" / "app")):
        words = ["--client", "0", "--out", f"{name}.safetensors"]
        words += ["--temperature", "--threshold", "youden"]
        assert main(["export", "--run", str(run), *words]) == 0
        monkeypatch.syspath_prepend(str(tmp_path))
        loader = importlib.import_module(name)
        answers.append((loader.predict(rows[:50]), loader.predict_proba(rows[:50])))
    assert answers[0] == answers[1]
    assert set(answers[0][0]) == {"sick", "well"}
    chosen = capsys.readouterr().out.splitlines()
    chosen = [line for line in chosen if "on validation data" in line or "fitted to" in line]
    assert len(chosen) == 4 and chosen[:2] == chosen[2:]
    facts = json.loads((app / "facts.json").read_text())
    assert facts["class_names"] == ["sick", "well"]
    assert facts["columns"][2:] == [["sex", ["f", "m"]], ["ward", ["a, b", "b", "ü"]]]
    assert len(facts["fills"]) == len(facts["scale"][0]) == 2 + 2 + 3
