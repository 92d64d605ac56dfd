"""Clients and classes by their names, wherever a run speaks of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fl_lightning
from fl_lightning.callbacks import loggers
from fl_lightning.cli import main
from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import prepare
from fl_lightning.drawing.heatmap import heatmap
from fl_lightning.foundation.errors import BadInput
from fl_lightning.lab.report.clients import split_table, splits
from fl_lightning.lab.report.clients import table as client_table
from fl_lightning.lab.report.page import render
from fl_lightning.results.runs import load

SITES = ("Chur, old town", "Aarau", "Bülach")
FLAGS = (
    "--model mlp --method fedavg --federation.rounds 2 --federation.local_epochs 1 --loggers null "
    "--fabric.accelerator cpu --callbacks.progress null"
)


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on three hospitals and two outcomes."""
    folder = tmp_path_factory.mktemp("names")
    rng = np.random.default_rng(0)
    with (folder / "t.csv").open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(["site", "age", "dose", "outcome"])
        for number in range(120):
            out.writerow([SITES[number % 3], *rng.normal(size=2), ["ill", "healthy"][number % 2]])
    natural = (
        "--data.label_column outcome --data.group_column site --data.partition natural "
        "--federation.clients 3"
    )
    flags = f"--data.root {folder}/t.csv {natural} {FLAGS} --out {folder} --name run"
    assert main(["fit", *flags.split()]) == 0
    return folder / "run"


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


@pytest.mark.parametrize("table", ["clients", "final", "split", "heterogeneity"])
def test_every_table_of_clients_has_their_names(hospitals: Path, table: str) -> None:
    named = {row["client"]: row["name"] for row in rows(hospitals / f"{table}.csv")}
    assert named == dict(enumerate_as_text(sorted(SITES)))


def enumerate_as_text(names: list[str]) -> list[tuple[str, str]]:
    """Names in the order of a group column's values."""
    return [(str(number), name) for number, name in enumerate(names)]


def test_classes_have_theirs(hospitals: Path) -> None:
    first = rows(hospitals / "split.csv")[0]
    assert list(first)[-2:] == ["class_healthy", "class_ill"]
    assert int(first["class_healthy"]) + int(first["class_ill"]) == int(first["train_samples"])
    assert {"name", "class_ill"} <= json.loads((hospitals / "columns.json").read_text()).keys()


def test_a_name_with_a_comma_breaks_no_table(hospitals: Path) -> None:
    run = fl_lightning.Run(hospitals)
    assert run.client_names == dict(enumerate(sorted(SITES)))
    assert len(run.clients) == 6 and run.final["name"].tolist() == sorted(SITES)


def test_the_report_speaks_of_names(hospitals: Path) -> None:
    runs = load([hospitals])
    page = render(runs)
    for name in ("Aarau", "Chur, old town"):
        assert f">{name}<" in page
    [split] = splits(runs)
    assert [*split_table(split)] == ["class healthy", "class ill"]
    assert [*client_table(runs).index] == sorted(SITES)
    assert runs[0].files.read_relation(1).receivers == [0, 1, 2]  # arrays have numbers
    assert '"names":{"0":"Aarau","1":"B' in page


def test_older_runs_have_numbers(hospitals: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for name in ("config.yaml", "metrics.csv", "summary.json"):
        (old / name).write_bytes((hospitals / name).read_bytes())
    for name in ("clients", "final", "split"):
        table = [
            {k: v for k, v in row.items() if k != "name"} for row in rows(hospitals / f"{name}.csv")
        ]
        with (old / f"{name}.csv").open("w", newline="") as file:
            out = csv.DictWriter(file, table[0], lineterminator="\n")
            out.writeheader()
            out.writerows(table)
    assert [*client_table(load([old])).index] == ["0", "1", "2"]


def test_a_failure_names_the_client(
    hospitals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = hospitals.parent / "t.csv"
    natural = (
        "--data.label_column outcome --data.group_column site --data.partition natural "
        "--federation.clients 3"
    )
    flags = f"--data.root {root} {natural} {FLAGS} --out {tmp_path} --name bad --optimizer.lr 1e30"
    assert main(["fit", *flags.split()]) == 1
    assert "client 0 (Aarau) failed in round" in capsys.readouterr().err


def arrays(folder: Path, **more: Any) -> DataConfig:
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


def test_arrays_bring_clients_and_names(tmp_path: Path) -> None:
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


def test_names_of_the_users_own_and_who_is_held_out() -> None:
    names = ["Uri", "Zug", "Bern", "Glarus", "Jura"]
    data = prepare(DataConfig(client_names=names, held_out_clients=0.2), 5, 0)
    [away] = data.held_out
    assert data.client_names == [name for number, name in enumerate(names) if number != away.number]
    assert data.called(0) == f"client 0 ({data.client_names[0]})"
    assert prepare(DataConfig(), 5, 0).called(0) == "client 0"


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"client_names": np.array(["Uri", "Zug", "Uri"])}, r"two clients are called 'Uri'"),
        ({"client_names": np.array([1, 2, 3])}, r"client_names holds 1, which is no text"),
        ({"client_names": np.array(["Uri", "Zug"])}, r"client_train holds 2, which no name"),
        ({"class_names": np.array([0, 1])}, r"the class name 0 is no text"),
        ({"class_names": np.array(["a"])}, r"class_names has 1 names for 2 classes"),
        ({"class_names": np.array(["a", "a"])}, r"class_names has a name twice"),
        ({"client_train": np.arange(3)}, r"client_train holds 3 clients of 60 samples"),
    ],
)
def test_bad_names_are_one_line(tmp_path: Path, more: dict[str, Any], what: str) -> None:
    with pytest.raises(BadInput, match=what) as caught:
        prepare(arrays(tmp_path, **more), 3, 0)
    assert "\n" not in str(caught.value)


def test_client_names_fit_the_clients() -> None:
    with pytest.raises(BadInput, match=r"data\.client_names: .*2 names for 5 clients"):
        prepare(DataConfig(client_names=["Uri", "Zug"]), 5, 0)
    with pytest.raises(BadInput, match=r"data\.client_names: .*two clients are called 'Uri'"):
        prepare(DataConfig(client_names=["Uri", "Zug", "Uri", "a", "b"]), 5, 0)


# ---------------------------------------------------------------- pictures, and tables at W&B


def test_pictures_have_names_of_clients_and_classes(
    tmp_path: Path, hospitals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written at rows and columns of each PNG, in the order of their numbers."""
    written: dict[str, tuple[list[object], list[object]]] = {}

    def spy(
        values: np.ndarray,
        rows: list[object],
        columns: list[object],
        title: str,
        *more: Any,
        **named: Any,
    ) -> Any:
        written[title] = list(rows), list(columns)
        return heatmap(values, rows, columns, title, *more, **named)

    monkeypatch.setattr("fl_lightning.drawing.relation.heatmap", spy)
    root, names = hospitals.parent / "t.csv", sorted(SITES)
    natural = (
        "--data.label_column outcome --data.group_column site --data.partition natural "
        "--federation.clients 3"
    )
    flags = (
        f"--data.root {root} {natural} {FLAGS} --out {tmp_path} --name drawn --federation.rounds 1"
    )
    assert main(["fit", *flags.split()]) == 0
    assert {"split.png", "round-0001-overview.png"} <= {
        p.name for p in (tmp_path / "drawn" / "figures").iterdir()
    }
    assert written["Training samples by client and class"] == (["healthy", "ill"], names)
    [overview] = [labels for title, labels in written.items() if "who receives from whom" in title]
    assert overview == (names, names)
    assert {
        name
        for name in names
        if any(f"how much client {name} receives" in title for title in written)
    } == {*names}


def test_tables_at_wandb_have_names(
    tmp_path: Path, hospitals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relation's table by round, and the clients' at the end; in an offline run."""
    tables: list[tuple[list[str], list[list[Any]]]] = []
    made = loggers._table

    def spy(cells: Any) -> Any:
        tables.append((cells.columns, cells.rows))
        return made(cells)

    monkeypatch.setattr(loggers, "_table", spy)
    monkeypatch.setenv("WANDB_MODE", "offline")
    root, names = hospitals.parent / "t.csv", sorted(SITES)
    natural = (
        "--data.label_column outcome --data.group_column site --data.partition natural "
        "--federation.clients 3"
    )
    flags = (
        f"{FLAGS.replace('--loggers null', '--loggers wandb')} --callbacks.heatmaps null "
        f"--federation.rounds 1"
    )
    words = f"--data.root {root} {natural} {flags} --out {tmp_path} --name sent".split()
    assert main(["fit", *words]) == 0
    relation = [
        rows for columns, rows in tables if columns == ["receiver", "layer", "source", "weight"]
    ]
    assert {row[0] for row in relation[0]} == {row[2] for row in relation[0]} == {*names}
    [clients] = [rows for columns, rows in tables if columns[:2] == ["client", "name"]]
    assert [row[:2] for row in clients] == [[number, name] for number, name in enumerate(names)]
