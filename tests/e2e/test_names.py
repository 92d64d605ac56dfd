"""Clients and classes by their names, wherever a run speaks of them."""

import csv

import numpy as np
import pytest
from lines import run_line
from refusals import refuses

import fl_lightning
from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import prepare
from fl_lightning.lab.report.page import render
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.runs import load

SITES = ("Chur, old town", "Aarau", "Bülach")
FLAGS = (
    "--model mlp --method fedavg --federation.rounds 2 --federation.local_epochs 1 --loggers null "
    "--fabric.accelerator cpu --callbacks.progress null --data.label_column outcome "
    "--data.group_column site --data.partition natural --federation.clients 3"
)


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    """A run on three hospitals and two outcomes."""
    folder = tmp_path_factory.mktemp("names")
    rng = np.random.default_rng(0)
    with (folder / "t.csv").open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(["site", "age", "dose", "outcome"])
        for number in range(120):
            out.writerow([SITES[number % 3], *rng.normal(size=2), ["ill", "healthy"][number % 2]])
    flags = f"--data.root {folder}/t.csv {FLAGS} --out {folder} --name run"
    assert run_line(f"fit {flags}") == 0
    return folder / "run"


@pytest.mark.slow
def test_tables_and_the_report_have_their_names(hospitals):
    names = dict(enumerate(sorted(SITES)))  # in the order of a group column's values
    run = fl_lightning.Run(hospitals)
    for table in ("clients", "final", "split", "heterogeneity"):
        rows = RunFolder(hospitals).read(table)
        assert {row["client"]: row["name"] for row in rows} == names
    assert list(run.split)[-2:] == ["class_healthy", "class_ill"]
    assert run.client_names == names
    page = render(load([hospitals]))
    assert ">Aarau<" in page and ">Chur, old town<" in page
    assert '"names":{"0":"Aarau","1":"B' in page


def test_a_failure_names_the_client(hospitals, tmp_path, capsys):
    root = hospitals.parent / "t.csv"
    flags = f"--data.root {root} {FLAGS} --out {tmp_path} --name bad --optimizer.lr 1e30"
    assert run_line(f"fit {flags}") == 1
    assert "client 0 (Aarau) failed in round" in capsys.readouterr().err


def arrays(folder, **more):
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    y, who = np.arange(60) % 2, np.arange(60) // 2 % 3
    parts = {
        "x_train": x,
        "y_train": y,
        "x_test": x,
        "y_test": y,
        "client_train": who,
        "client_test": who,
    }
    np.savez(folder / "a.npz", **(parts | more))
    return DataConfig(root=str(folder / "a.npz"), partition="natural", min_samples=4)


def test_arrays_bring_clients_and_names(tmp_path):
    more = {
        "client_names": np.array(["Uri", "Zug", "Bern"]),
        "class_names": np.array(["well", "sick"]),
    }
    data = prepare(arrays(tmp_path, **more), 3, 0)
    assert data.client_names == ["Uri", "Zug", "Bern"] and data.class_names == ["well", "sick"]
    words = np.array(["Uri", "Zug", "Bern"])[np.arange(60) // 2 % 3]
    data = prepare(arrays(tmp_path, client_train=words, client_test=words), 3, 0)
    assert data.client_names == ["Bern", "Uri", "Zug"]
    assert prepare(arrays(tmp_path), 3, 0).client_names == ["0", "1", "2"]


@pytest.mark.parametrize(
    "more, what",
    [
        ({"client_names": np.array(["Uri", "Zug", "Uri"])}, r"2 clients have the name 'Uri'"),
        ({"client_names": np.array([1, 2, 3])}, r"client_names holds 1, which is no text"),
        ({"client_names": np.array(["Uri", "Zug"])}, r"client_train holds 2, which has no name"),
        ({"class_names": np.array([0, 1])}, r"the class name 0 is no text"),
        ({"class_names": np.array(["a"])}, r"class_names has 1 names for 2 classes"),
        ({"class_names": np.array(["a", "a"])}, r"class_names holds a name twice"),
        ({"client_train": np.arange(3)}, r"client_train holds 3 clients of 60 samples"),
    ],
)
def test_bad_names_are_one_line(tmp_path, more, what):
    with refuses(what) as caught:
        prepare(arrays(tmp_path, **more), 3, 0)
    assert "\n" not in str(caught.value)
