"""Who holds which classes, a row for each client, runs over seeds, and charts as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fl_lightning.cli import main
from fl_lightning.lab.report import clients
from fl_lightning.lab.report.page import render
from fl_lightning.lab.report.tables import differences, overview
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.result import RunResult
from fl_lightning.results.runs import load, run_folders

from .conftest import MakeRun, cells

COUNTS = np.array([[8, 0, 0], [0, 3, 3], [1, 1, 1], [0, 0, 4]])


def split(path: Path, counts: np.ndarray = COUNTS) -> Path:
    RunFolder(path).write_split(counts.sum(axis=1).tolist(), [2] * len(counts), counts)
    return path


def change(path: Path, **settings: Any) -> Path:
    held = yaml.safe_load((path / "config.yaml").read_text())
    (path / "config.yaml").write_text(yaml.safe_dump(held | settings))
    return path


def row(runs: list[RunResult], name: str) -> list[str]:
    return cells(overview(runs))[name]


def test_a_split_is_shown_once_and_again_where_it_is_another(make_run: MakeRun) -> None:
    paths = [
        split(make_run("a")),
        split(make_run("b")),
        split(make_run("c"), COUNTS[::-1]),
        make_run("d"),
    ]
    runs = load(paths)
    one, other = clients.splits(runs)
    assert (one["runs"], other["runs"]) == ([0, 1], [2])
    assert (one["classes"], one["clients"]) == (list("012"), list("0123"))
    assert one["counts"] == COUNTS.T.tolist()  # numbers to read, not colours alone
    held = clients.split_table(one)
    assert [held.index.name, *held] == ["client", "class 0", "class 1", "class 2"]
    assert cells(held[:2]) == {"0": ["8", "", ""], "1": ["", "3", "3"]}
    assert "The same as a table: a, b: 4 clients" in render(runs)
    assert (
        clients.split_words(one, runs)
        == "a, b: 4 clients with 3 to 8 training samples of 1 to 3 classes"
    )
    assert (
        clients.split_words(one, runs[:2])
        == "4 clients with 3 to 8 training samples of 1 to 3 classes"
    )
    assert clients.splits(load(paths[3:])) == []
    assert row(runs, "samples") == [*["21 for training (3 to 8 a client), 8 for tests"] * 3, "–"]


def test_what_own_data_are_worth_is_what_is_no_noise(make_run: MakeRun) -> None:
    """Of the last round that has it; runs that do not measure it have no column, and without one
    there is no table."""
    paths = [make_run("a"), make_run("b")]
    table = paths[0] / "metrics.csv"
    head, *rows = table.read_text().splitlines()
    shares = [f",{0.5 + 0.01 * k},{0.25 if k == 0 else ''}" for k in range(len(rows))]
    lines = [
        f"{head},noise_share_body,noise_share_out",
        *(row + s for row, s in zip(rows, shares, strict=True)),
    ]
    table.write_text("\n".join(lines) + "\n")
    runs = load(paths)
    held = clients.own_worth(runs)
    assert [held.index.name, *held] == ["layer", "a"]
    assert cells(held) == {"body": [f"{0.5 - 0.01 * (len(rows) - 1):.0%}"], "out": ["75%"]}
    assert "are worth, by layer" in render(runs) and "are worth, by layer" not in render(runs[1:])
    assert len(clients.own_worth(runs[1:])) == 0


def test_how_far_clients_are_apart_is_what_the_summary_says(make_run: MakeRun) -> None:
    path = split(make_run("a", ended=False))
    assert clients.unlike_words(load([path])[0]) == ""
    (path / "summary.json").write_text('{"rounds": 3, "heterogeneity_hellinger": 0.25}')
    words = "; in the mean over pairs 0.25 by Hellinger"
    assert clients.unlike_words(load([path])[0]) == words


def test_every_client_has_a_row_by_its_number(make_run: MakeRun) -> None:
    runs = load([split(make_run("a")), split(make_run("b"))])
    table = clients.table(runs)
    assert list(table) == ["training samples", "test samples", "classes", "a", "b"]
    assert cells(table)["1"] == ["6", "2", "2", "80.00 %", "80.00 %"]
    assert list(table.index) == ["0", "1", "2", "3"]
    table = clients.table(load([runs[0].folder, make_run("c", cohort=(0, 1), ended=False)]))
    assert list(table) == ["a", "c"]  # one of them does not say what its clients hold
    assert cells(table)["3"] == ["60.00 %", "–"]


def test_how_a_run_descends_stands_in_the_overview(make_run: MakeRun) -> None:
    optimizer = {
        "name": "sgd",
        "lr": 0.05,
        "lr_decay": 0.9,
        "lr_step": 2,
        "momentum": 0.5,
        "weight_decay": 0.0,
    }
    federation = {"rounds": 3, "clients": 4, "batch_size": 16}
    runs = load(
        [make_run("a", config={"optimizer": optimizer, "federation": federation}), make_run("b")]
    )
    assert row(runs, "optimiser") == ["sgd, lr 0.05, times 0.9 every 2 rounds, momentum 0.5", "–"]
    assert row(runs, "batch size") == ["16", "–"]


def test_a_small_participation_is_not_none(make_run: MakeRun) -> None:
    shares = {"a": 0.001, "b": 0.1, "c": 1.0}
    runs = load(
        [
            make_run(n, config={"federation": {"rounds": 3, "participation": s}})
            for n, s in shares.items()
        ]
    )
    assert row(runs, "participation") == [
        f"{share}% of the clients a round" for share in ("0.1", "10", "100")
    ]


def test_settings_that_differ_are_seen_to_differ(make_run: MakeRun) -> None:
    """A method without arguments holds an empty mapping where another has a key for each."""
    runs = load(
        [make_run("a"), make_run("b", config={"method": {"name": "local", "init_args": {}}})]
    )
    assert set(differences(runs).index) == {"method.name", "method.init_args.lam"}


def test_data_of_ones_own_go_by_their_file(make_run: MakeRun) -> None:
    """Such a file overrides the source, which the configuration may not name."""
    data = {"source": "digits", "partition": "natural", "root": "here/fields.csv"}
    assert row(load([make_run("a", config={"data": data})]), "data") == ["fields.csv, natural"]


def test_a_folder_of_runs_stands_for_all_in_it(
    make_run: MakeRun, tmp_path: Path, monkeypatch, capsys
) -> None:
    for name in ("runs/b", "runs/a", "study/runs/kapc/seed-0", "study/references/x"):
        make_run(name)
    inside = tmp_path / "runs/a/wandb/offline-run/files"
    inside.mkdir(parents=True)
    (inside / "config.yaml").write_text("{}")  # W&B's own, and no run folder
    monkeypatch.chdir(tmp_path)
    found = run_folders([Path("runs"), Path("study"), Path("nowhere")])
    assert [str(path) for path in found] == [
        "runs/a",
        "runs/b",
        "study/runs/kapc/seed-0",
        "nowhere",
    ]
    assert main(["report", "runs"]) == 0
    assert capsys.readouterr().out == "report: runs/report.html\n"
    assert "2 runs side by side" in Path("runs/report.html").read_text()
