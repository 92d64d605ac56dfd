"""Who holds which classes, a row for each client, runs over seeds, and charts as files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure

from fl_lightning.cli import main
from fl_lightning.lab.report import clients, figures, load, render, run_folders, vector
from fl_lightning.lab.report.tables import differences, incomparable, overview
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.result import RunResult
from fl_lightning.results.runs import seeds_apart

from .conftest import MakeRun

COUNTS = np.array([[8, 0, 0], [0, 3, 3], [1, 1, 1], [0, 0, 4]])


def split(path: Path, counts: np.ndarray = COUNTS) -> Path:
    RunFolder(path).write_split(counts.sum(axis=1).tolist(), [2] * len(counts), counts)
    return path


def change(path: Path, **settings: Any) -> Path:
    held = yaml.safe_load((path / "config.yaml").read_text())
    (path / "config.yaml").write_text(yaml.safe_dump(held | settings))
    return path


def row(runs: list[RunResult], name: str) -> list[str]:
    return next(row[1:] for row in overview(runs).rows if row[0] == name)


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
    assert (one["classes"], one["clients"]) == ([0, 1, 2], [0, 1, 2, 3])
    assert one["counts"] == COUNTS.T.tolist()  # numbers to read, not colours alone
    held = clients.split_table(one)
    assert held.head == ["client", "class 0", "class 1", "class 2"]
    assert held.rows[:2] == [["0", "8", "", ""], ["1", "", "3", "3"]]
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
    assert held.head == ["layer", "a"]
    assert held.rows == [["body", f"{0.5 - 0.01 * (len(rows) - 1):.0%}"], ["out", "75%"]]
    assert "are worth, by layer" in render(runs) and "are worth, by layer" not in render(runs[1:])
    assert clients.own_worth(runs[1:]).rows == []


def test_how_far_clients_are_apart_is_the_mean_over_pairs(make_run: MakeRun) -> None:
    """Distances 0.2, 0.4 and 0.9; one of four clients has no class in common with two others, and
    0.5 to the third."""
    path = split(make_run("a", ended=False))
    table = np.full((4, 4), np.nan, dtype=np.float32)
    for (one, other), value in {(0, 1): 0.2, (0, 2): 0.4, (1, 2): 0.9, (2, 3): 0.5}.items():
        table[one, other] = table[other, one] = value
    RunFolder(path).write_heterogeneity([0, 1, 2, 3], {"hellinger": table})
    words = "; in the mean over pairs {} by Hellinger"
    assert clients.unlike_words(load([path])[0]) == words.format("0.50")
    (path / "summary.json").write_text('{"rounds": 3, "heterogeneity_hellinger": 0.25}')
    assert clients.unlike_words(load([path])[0]) == words.format("0.25")
    (path / "summary.json").unlink()
    (path / "heterogeneity.npz").write_bytes(b"no archive")
    assert clients.unlike_words(load([path])[0]) == ""


def test_every_client_has_a_row_by_its_number(make_run: MakeRun) -> None:
    runs = load([split(make_run("a")), split(make_run("b"))])
    table = clients.table(runs)
    assert table.head == ["client", "training samples", "test samples", "classes", "a", "b"]
    assert table.rows[1] == ["1", "6", "2", "2", "80.00 %", "80.00 %"]
    assert [cells[0] for cells in table.rows] == ["0", "1", "2", "3"]
    table = clients.table(load([runs[0].folder, make_run("c", cohort=(0, 1), ended=False)]))
    assert table.head == ["client", "a", "c"]  # one of them does not say what its clients hold
    assert table.rows[3] == ["3", "60.00 %", "–"]


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
    assert {cells[0] for cells in differences(runs).rows} == {"method.name", "method.init_args.lam"}


def test_data_of_ones_own_go_by_their_file(make_run: MakeRun) -> None:
    """Such a file overrides the source, which the configuration may not name."""
    data = {"source": "digits", "partition": "natural", "root": "here/fields.csv"}
    assert row(load([make_run("a", config={"data": data})]), "data") == ["fields.csv, natural"]


def test_losses_are_drawn_and_the_pull_where_there_is_one(make_run: MakeRun) -> None:
    path = make_run("a")
    rows = [(1, 2.5, 0.0), (2, 1.5, 0.0)]
    path.joinpath("metrics.csv").write_text(
        "round,train_loss,coaching_loss\n" + "".join(f"{t},{a},{b}\n" for t, a, b in rows)
    )
    (loss,) = figures.training(load([path]))["losses"]["data"]
    assert (loss["name"], loss["x"], loss["y"]) == ("a · loss", [1, 2], [2.5, 1.5])
    path.joinpath("metrics.csv").write_text("round,train_loss,coaching_loss\n1,2.5,0.5\n")
    assert [line["name"] for line in figures.training(load([path]))["losses"]["data"]] == [
        "a · loss",
        "a · proximal term alone",
    ]
    assert figures.training(load([make_run("b")])) == {}


@pytest.mark.slow
def test_losses_over_seeds_are_a_band(make_run: MakeRun, tmp_path: Path) -> None:
    """Losses 2, 1 and 4, 1 of two seeds: mean 3 and 1, the sample's deviation sqrt(2) and 0; a
    third run is a line."""
    paths = [
        make_run("a"),
        change(make_run("b"), seed=1),
        change(make_run("c"), method={"name": "fedavg"}),
    ]
    for path, losses in zip(paths, ((2, 1), (4, 1), (5, 5)), strict=True):
        lines = [f"{t},{loss}" for t, loss in enumerate(losses, 1)]
        path.joinpath("metrics.csv").write_text("\n".join(["round,train_loss", *lines, ""]))
    low, high, mean, other = figures.training(load(paths))["losses"]["data"]
    assert (mean["name"], mean["y"]) == ("a and 1 more seed · loss", [3, 1])
    assert (other["name"], other["y"]) == ("c · loss", [5, 5])
    assert (low["y"], high["y"]) == (
        pytest.approx([3 - 2**0.5, 1], abs=1e-4),
        pytest.approx([3 + 2**0.5, 1], abs=1e-4),
    )
    assert (low["line"]["width"], high["fill"], low["showlegend"]) == (0, "tonexty", False)
    drawn = {file.name: file for file in vector.write(load(paths), tmp_path / "figures", "svg")}
    text = drawn["losses.svg"].read_text()
    assert "a and 1 more seed · loss" in text
    assert text.count('id="FillBetweenPolyCollection') + text.count('id="PolyCollection') == 1


def test_one_round_is_a_point(make_run: MakeRun) -> None:
    """A line of one round would not be seen, on the page or in a file."""
    path = make_run("a", (0.1,))
    (path / "metrics.csv").write_text("round,train_loss\n1,2.5\n")
    runs = load([path])
    assert {line["mode"] for line in figures.training(runs)["losses"]["data"]} == {"lines+markers"}
    axes = Figure().subplots()
    vector._chart(axes, figures.training(runs)["losses"])
    assert {line.get_marker() for line in axes.lines} == {"o"} and list(axes.get_xticks()) == [1]


def test_runs_over_seeds_are_a_band_without_a_warning(make_run: MakeRun) -> None:
    paths = [make_run("a", (0.1, 0.5, 0.8)), change(make_run("b", (0.3, 0.5)), seed=1)]
    paths[1] = change(
        paths[1], federation=yaml.safe_load((paths[0] / "config.yaml").read_text())["federation"]
    )
    runs = load(paths)
    assert seeds_apart(runs) == [[0, 1]]
    assert incomparable(runs) == []
    (band,) = figures.curves(runs)["bands"]
    mean = band["y"]["mean_accuracy"]
    assert (band["runs"], band["round"]) == ([0, 1], [1, 2])  # rounds that both have done
    assert mean["mean"] == [0.2, 0.5]
    assert mean["low"] == pytest.approx([0.2 - 0.02**0.5, 0.5], abs=1e-5)
    other = load([*paths, change(make_run("c"), seed=2, data={"source": "mnist"})])
    assert seeds_apart(other) == [[0, 1]]
    assert {"data.source", "seed"} <= set(incomparable(other))
    assert seeds_apart(load([paths[0], make_run("d")])) == []  # the same seed twice is no spread
    twice = load([*paths, make_run("e")])  # and not a third seed beside another
    assert seeds_apart(twice) == figures.curves(twice)["bands"] == []
    assert incomparable(twice) == ["seed"]


def test_a_seed_that_has_just_started_leaves_the_others_their_curves(make_run: MakeRun) -> None:
    federation = {"rounds": 4, "clients": 4}
    done = [(0.1, 0.5, 0.8, 0.9), (0.3, 0.5, 0.8), (0.2,), ()]
    paths = [
        make_run(name, rounds, config={"federation": federation})
        for name, rounds in zip("abcd", done, strict=True)
    ]
    for seed, path in enumerate(paths):
        change(path, seed=seed)
        lines = [f"{t},{accuracy},{accuracy}" for t, accuracy in enumerate(done[seed], 1)]
        path.joinpath("metrics.csv").write_text(
            "\n".join(["round,mean_accuracy,train_loss", *lines, ""])
        )
    runs = load(paths)
    assert seeds_apart(runs) == [[0, 1, 2, 3]]
    (band,) = figures.curves(runs)["bands"]
    assert (band["runs"], band["round"], band["cut"]) == ([0, 1], [1, 2, 3], 1)
    lines = figures.training(runs)["losses"]["data"]
    assert [line["name"] for line in lines if "showlegend" not in line] == [
        "a and 1 more seed · loss",
        "c · loss",
    ]
    assert "The band of a ends at round 3: b has done no more." in render(runs)
    assert (
        figures.curves(load(paths[::3]))["bands"] == figures.curves(load(paths[::2]))["bands"] == []
    )


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


def test_shares_of_one_colour_are_said_in_words(make_run: MakeRun) -> None:
    path = make_run("a")
    (one,) = figures.shares(load([path]))
    assert one["constant"] == ""
    for file in (path / "traffic").iterdir():
        with np.load(file) as held:
            kept = dict(held)
        np.savez(file, **(kept | {"sent": np.ones_like(kept["sent"])}))
    runs = load([path])
    assert "ledger-layers" not in figures.ledger(runs)
    assert "ledger-layers" in figures.ledger(load([path, make_run("b")]))
    assert figures.constant(np.zeros((2, 3, 4))) == "no layer was ever sent or received"
    (one,) = figures.shares(runs)
    assert one["constant"] == (
        "in every round every layer was sent by 100% of the cohort and received by 100% of the "
        "cohort"
    )
    page = render(runs)
    assert one["constant"] in page
    assert 'id="share-0"' not in page


def test_names_of_clients_and_classes_stand_below_their_dots(
    make_run: MakeRun, tmp_path: Path
) -> None:
    """Class names of which some are numbers; names that matplotlib takes for formulas; a client
    without a class."""
    folder = RunFolder(make_run("a"))
    folder.names = ["$a$ and $\\b{", "007", "a client with a name, long", "Züri ²"]
    folder.write_split([8, 6, 3, 4], [2] * 4, COUNTS, ["1", "2", "3+"])
    runs = load([folder.path])
    (one,) = clients.splits(runs)
    assert (one["classes"], one["clients"]) == (["1", "2", "3+"], folder.names)
    drawn = {
        file.stem: file.read_text() for file in vector.write(runs, tmp_path / "figures", "svg")
    }
    words = re.findall(r">([^<>]+)</text>", drawn["split-0"])
    assert words == [*folder.names, "client", "1", "2", "3+", "class"]
    assert words[:4] == re.findall(r">([^<>]+)</text>", drawn["relation-0"])[:4]
    assert "rotate(-40)" in drawn["split-0"]  # or they would run into each other


@pytest.mark.slow
def test_names_that_matplotlib_reads_otherwise_stand_in_the_legends(
    make_run: MakeRun, tmp_path: Path
) -> None:
    """It leaves out labels that begin with an underscore, and takes what stands between dollars for
    a formula."""
    names = ["_a", "a$x^{$b"]
    runs = load([make_run(name, (0.1,)) for name in names])
    drawn = {
        file.stem: file.read_text() for file in vector.write(runs, tmp_path / "figures", "svg")
    }
    for figure, begin in {
        "accuracy": "",
        "fairness-order": "",
        "ledger-kinds": " up",
        "ledger-bytes": " · up",
    }.items():
        words = re.findall(r">([^<>]+)</text>", drawn[figure])
        assert {f"{name}{begin}" for name in names} <= set(words), figure
    assert "parameters" in drawn["ledger-kinds"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["svg", "pdf", "png"])
def test_charts_become_files_that_are_the_same_every_time(
    kind: str, make_run: MakeRun, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    split(make_run("a", channel=True))
    change(split(make_run("b")), seed=1)
    names = {
        "accuracy",
        "fairness-order",
        "ledger-bytes",
        "ledger-layers",
        "ledger-kinds",
        "cost-seconds",
    }
    names |= {
        "cost-channel",
        "cost-flops",
        "split-0",
        "ledger-down-0",
        "ledger-up-0",
        "ledger-down-1",
        "ledger-up-1",
    }
    names |= {
        f"relation-{run}{what}"
        for run in (0, 1)
        for what in ("", "-client-000", "-client-001", "-client-002")
    }
    kept = []
    for _ in range(2):
        assert main(["report", "a", "b", "--figures", kind]) == 0
        assert capsys.readouterr().out == "report: report.html\nfigures: report-figures\n"
        files = {file.stem: file.read_bytes() for file in Path("report-figures").iterdir()}
        assert json.loads(files.pop("figures")) == sorted(f"{name}.{kind}" for name in names)
        assert files.keys() == names
        kept.append(files)
    assert kept[0] == kept[1]
    start = {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}[kind]
    assert all(content.startswith(start) for content in kept[0].values())
    if kind == "svg":
        words = re.findall(r">([^<>]+)</text>", kept[0]["accuracy"].decode())
        assert {"round", "a and 1 more seed"} <= set(words)  # letters, not outlines
