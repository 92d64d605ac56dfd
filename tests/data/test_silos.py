"""What is odd about the columns of a table, silo by silo: found from summaries alone, as
`fl-train check-data` and as lines when a run starts."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from pandas import DataFrame, read_csv

import fl_lightning
from fl_lightning.cli import main
from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import silos

SIZES = {"Aarau": 200, "Basel": 150, "Davos": 80, "Geneva": 120}
KEYS = {"label_column": "ill", "group_column": "hospital", "partition": "natural"}
CONFIG = {"data": {**KEYS, "one_hot": ["sex"], "columns": ["age", "sex", "creatinine"]}}


def clean():
    rng = np.random.default_rng(0)
    names = np.repeat(list(SIZES), list(SIZES.values()))
    creatinine = rng.lognormal(0.1, 0.3, len(names)).round(2)
    ill = creatinine + rng.logistic(size=len(names)) > 2.7
    return DataFrame(
        {
            "hospital": names,
            "age": rng.normal(60, 15, len(names)).round(),
            "sex": rng.choice(["f", "m"], len(names)),
            "creatinine": creatinine,
            "ill": np.where(ill, "yes", "no"),
        }
    )


def checked(rows, folder, **keys):
    rows.to_csv(folder / "t.csv", index=False)
    return silos.check_table(DataConfig(root=str(folder / "t.csv"), **{**KEYS, **keys}))[0]


def warnings(listed):
    return [(f.finding, f.column, f.silo) for f in listed if f.finding in silos.WARNINGS]


def test_nothing_is_odd_about_silos_that_are_alike(tmp_path):
    listed = checked(clean(), tmp_path)
    assert warnings(listed) == []
    share = {f.silo: f.here for f in listed if f.finding == "outcome"}
    rows = clean()
    assert share == {s: (rows.ill[rows.hospital == s] == "yes").mean() for s in SIZES}


def test_every_fault_is_found_at_its_silo(tmp_path):
    rows, rng = clean(), np.random.default_rng(1)
    at = {name: rows.hospital == name for name in SIZES}
    sick = rows.ill == "yes"
    rows["temperature"] = np.where(at["Basel"], 98.6, 37) + rng.normal(0, 0.5, len(rows)).round(2)
    rows.loc[at["Geneva"], "creatinine"] *= 88.4
    rows.loc[at["Davos"], "sex"] = rows.sex[at["Davos"]].replace("f", "w")
    rows["sodium"] = rng.normal(140, 3, len(rows)).round(1).astype(str)
    rows.loc[at["Davos"], "sodium"] = rows.sodium[at["Davos"]].str.replace(".", ",")
    rows["smokes"] = np.where(at["Basel"], 1, rng.integers(0, 2, len(rows)))
    rows["number"] = np.arange(len(rows))
    rows["code"] = np.where(sick, "I21", "Z00")
    rows["death"] = np.where(sick, rng.normal(50, 9, len(rows)).round(1), np.nan)
    rows.loc[at["Aarau"] & (rng.random(len(rows)) < 0.6), "age"] = np.nan
    listed = checked(rows, tmp_path)
    assert warnings(listed)[:4] == [
        ("leak", "code", "all"),
        ("leak", "death", "all"),
        ("units", "creatinine", "Geneva"),
        ("units", "temperature", "Basel"),
    ]
    assert set(warnings(listed)[4:]) == {
        ("coding", "sodium", "Davos"),
        ("coding", "sex", "Davos"),
        ("constant", "smokes", "Basel"),
        ("identifier", "number", "all"),
    }
    by_column = {(f.finding, f.column): f for f in listed}
    words = by_column["units", "creatinine"].numbers
    assert re.fullmatch(r"median (9\d.*|1\d\d.*), 1\.\d+ elsewhere", words)
    assert by_column["coding", "sex"].numbers.startswith("'w' in ")
    missing = by_column["missing", "age"]
    assert missing.silo == "Aarau" and 0.5 < missing.here < 0.7 and missing.elsewhere == 0


def test_two_silos_with_another_coding_are_named(tmp_path):
    rows = clean()
    other = rows.hospital.isin(["Davos", "Geneva"])
    rows["sex"] = rows.sex.where(~other, rows.sex.replace("f", "w"))
    assert ("coding", "sex", "Geneva") in warnings(checked(rows, tmp_path))


def test_findings_are_computed_from_what_silos_send(tmp_path):
    rows = clean()
    rows.loc[rows.hospital == "Geneva", "creatinine"] *= 88.4
    rows.loc[0, "sex"] = "unlike any other"
    keys = DataConfig(**KEYS)
    summaries = {
        name: silos.summary({c: part[c].astype(str).tolist() for c in part}, keys)
        for name, part in rows.drop(columns="hospital").groupby(rows.hospital)
    }
    sent = {
        s: {c: dataclasses.asdict(column) for c, column in of.items()}
        for s, of in summaries.items()
    }
    text = json.dumps(sent)
    assert "unlike" not in text
    received = {
        s: {c: silos.SiloColumn(**d) for c, d in of.items()} for s, of in json.loads(text).items()
    }
    listed = silos.findings(received, keys)
    assert listed == checked(rows, tmp_path)
    assert warnings(listed) == [("units", "creatinine", "Geneva")]


def test_of_a_regression_the_target_is_compared(tmp_path):
    rows = clean()
    rows["days"] = 3 * rows.creatinine
    rows.loc[rows.hospital == "Basel", "days"] *= 24
    keys = {"label_column": "days", "task": "regression", "columns": ["age", "creatinine"]}
    listed = checked(rows, tmp_path, **keys)
    assert warnings(listed) == [("leak", "creatinine", "all"), ("units", "days", "Basel")]
    assert next(f for f in listed if f.finding == "outcome").numbers.startswith("median ")


def test_a_table_without_silos_is_one(tmp_path):
    rows = clean()
    rows["code"] = np.where(rows.ill == "yes", 1, 0)
    listed = checked(rows, tmp_path, group_column=None, columns=["age", "code"])
    assert warnings(listed) == [("leak", "code", "all")]


def test_images_and_texts_are_no_columns_to_compare(tmp_path):
    rows = clean().assign(file=[f"{k}.png" for k in range(sum(SIZES.values()))])
    assert warnings(checked(rows, tmp_path, columns=["file"])) == []
    assert warnings(checked(rows, tmp_path, columns=["file"], tokens="characters")) == []


def test_persons_with_several_rows_are_named_unless_a_column_is(tmp_path):
    rows = clean().sort_values(["hospital", "ill"])
    rows["patient"] = rows.hospital + (np.arange(len(rows)) // 2).astype(str)
    listed = checked(rows, tmp_path, columns=["age"])
    assert [(f.column, f.finding) for f in listed][:1] == [("patient", "identifier")]
    assert warnings(checked(rows, tmp_path, columns=["age"], unit_column="patient")) == []


# ---------------------------------------------------------------- as a user


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """A folder with a table in which Geneva measures in another unit."""
    monkeypatch.chdir(tmp_path)
    rows = clean()
    rows.loc[rows.hospital == "Geneva", "creatinine"] *= 88.4
    rows.loc[rows.hospital == "Basel", "age"] *= 12
    rows.to_csv("t.csv", index=False)
    Path("c.yaml").write_text(json.dumps(CONFIG))
    return tmp_path


def test_the_command_prints_a_table_and_writes_a_page(faulty, capsys):
    words = ["check-data", "--config", "c.yaml", "--data.root", "t.csv", "--out", "p.html"]
    assert main(words) == 0 == main(words)  # a page is written over
    printed = capsys.readouterr().out
    assert "creatinine" in printed and "Geneva" in printed
    assert "1.055 elsewhere" in Path("p.html").read_text()
    table = fl_lightning.check_data({"config": "c.yaml", "data.root": "t.csv"})
    assert list(table.columns) == list(silos.Finding._fields)
    assert table.iloc[0].column == "creatinine" and table.iloc[0].here > 80
    frame = fl_lightning.check_data(data=read_csv("t.csv"), label="ill", group="hospital")
    assert frame.equals(table)


@pytest.mark.slow
def test_a_fit_prints_them(faulty, capsys):
    small = (
        "--federation.clients 4 --federation.rounds 1 --federation.local_epochs 1 --loggers null"
    )
    words = ["fit", "--config", "c.yaml", "--data.root", "t.csv", "--name", "one", *small.split()]
    assert main(words) == 0
    assert "column 'creatinine' at Geneva" in capsys.readouterr().err
    assert main([*words, "--resume", "--federation.rounds", "2"]) == 0
    assert "creatinine" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, says",
    {
        "--data.source digits": "data.source='digits': its columns cannot be",
        "--data.root none.csv": "data.root='none.csv'",
        "--data.root t.csv --data.label_column x": "there is no such column",
        "--data.root t.csv --out p.txt": "it must end with .html",
        "--data.root t.csv --out no/p.html": "there is no folder",
        "--data.root t.csv --out other.html": "it exists and is no page of check-data",
    }.items(),
)
def test_bad_input_is_one_line(words, says, faulty, refused):
    Path("other.html").write_text("mine")
    assert says in refused(f"check-data --config c.yaml {words}")


def test_one_of_three_silos_in_another_unit_is_named_alone(tmp_path):
    """The median of the two others lies between both units: it would name these, too."""
    draws = np.random.default_rng(0)
    rows = DataFrame({"silo": list("abc") * 40, "level": draws.lognormal(0.1, 0.3, 120)})
    rows.loc[rows.silo == "b", "level"] *= 88.4
    rows["label"] = [0, 1] * 60
    table = fl_lightning.check_data({}, data=rows, label="label", group="silo")
    assert [*table[table.finding == "units"].silo] == ["b"]
