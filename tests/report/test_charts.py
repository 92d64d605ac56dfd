"""The charts on runs: lines, bands over seeds, colours, names, files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fl_lightning.cli import main
from fl_lightning.lab.report import clients, figures, newcomers, vector
from fl_lightning.lab.report.page import render
from fl_lightning.lab.report.tables import incomparable
from fl_lightning.lab.report.vector import svg
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.result import RunResult
from fl_lightning.results.runs import load, seeds_apart, settings

from .conftest import MakeRun, cells
from .test_clients import COUNTS, change, split

METHODS = ("local", "kapc", "fedavg")


@pytest.fixture
def paths(make_run: MakeRun) -> list[Path]:
    """Three methods, four seeds each, in the order of `runs/*/seed-*`."""
    return [
        change(make_run(f"{name}-{seed}"), seed=seed, method={"name": name})
        for name in METHODS
        for seed in range(4)
    ]


def lines(figure: Any) -> dict[str, list[float]]:
    """Of the one panel of a figure the values of each line, by its name."""
    [axes] = figure.axes
    handles, labels = axes.get_legend_handles_labels()
    held = (getattr(handle, "lines", [handle])[0] for handle in handles)
    return {
        name.strip("\u200b"): [*line.get_ydata()] for name, line in zip(labels, held, strict=True)
    }


def losses(path: Path, *rows: tuple[Any, ...], more: str = "") -> Path:
    """The run with these rows of rounds and losses alone."""
    text = [",".join(map(str, row)) for row in rows]
    (path / "metrics.csv").write_text("\n".join([f"round,train_loss{more}", *text, ""]))
    return path


def texts(drawn: str) -> list[str]:
    return [text.strip("\u200b") for text in re.findall(r">([^<>]+)</text>", drawn)]


# ---------------------------------------------------------------- seeds and methods


def test_seeds_share_a_colour_and_methods_do_not(paths: list[Path]) -> None:
    runs = load(paths)
    colours = figures.colours(runs)
    assert colours == [vector.COLOURS[group] for group in range(3) for _ in range(4)]
    [axes] = figures.fairness(runs)["fairness-order"].axes
    assert [line.get_color() for line in axes.lines] == colours
    shuffled = load([*paths[::4], *paths[1::4]])
    assert figures.colours(shuffled) == [*vector.COLOURS[:3]] * 2
    many = vector.looks(map(str, range(12)))
    assert many["10"] == many["0"] | {"linestyle": "--"}


def test_seeds_of_bands_are_no_warning_and_rates_are_named(paths: list[Path]) -> None:
    assert incomparable(load(paths)) == []
    assert "What differs" not in render(load(paths))
    for number, path in enumerate(paths):
        change(path, optimizer={"lr": 0.1 if 4 <= number < 8 else 0.05})
    assert incomparable(load(paths)) == ["optimizer.lr"]
    assert "What differs: <code>optimizer.lr</code>." in render(load(paths))
    # one method lacks a seed that others have
    assert incomparable(load(paths[:-1])) == ["optimizer.lr", "seed"]
    assert incomparable(load([paths[0], paths[9]])) == ["seed"]


def test_runs_on_other_data_are_no_seeds_of_one_method(make_run: MakeRun) -> None:
    """A table of one's own is its file: where it lies may differ, which it is may not."""

    def at(root: str, seed: int, digest: str = "") -> Path:
        path = make_run(f"{root.replace('/', '-')}-{seed}{digest}")
        if digest:
            (path / "provenance.json").write_text(json.dumps([{"data": digest}]))
        kept = yaml.safe_load((path / "config.yaml").read_text())["data"]
        return change(path, seed=seed, data=kept | {"source": "table", "root": root})

    moved = load([at("here/a.csv", 0), at("there/a.csv", 1)])
    other = load([at("here/a.csv", 2), at("b.csv", 3)])
    assert seeds_apart(moved) == [[0, 1]] and settings(moved) == ["", ""]
    assert seeds_apart(other) == [] and settings(other) == ["data.root=a.csv", "data.root=b.csv"]
    one, same, changed = at("a.csv", 4, "x"), at("there/a.csv", 4, "x"), at("a.csv", 4, "y")
    assert incomparable(load([one, same])) == []
    assert incomparable(load([one, changed])) == ["data.root"]
    assert "What differs: <code>data.root</code>" in render(load([one, changed]))


def test_runs_over_seeds_are_a_band_without_a_warning(make_run: MakeRun) -> None:
    paths = [make_run("a", (0.1, 0.5, 0.8)), change(make_run("b", (0.3, 0.5)), seed=1)]
    federation = yaml.safe_load((paths[0] / "config.yaml").read_text())["federation"]
    change(paths[1], federation=federation)
    runs = load(paths)
    assert seeds_apart(runs) == [[0, 1]]
    assert incomparable(runs) == []
    figure = figures.accuracy(runs)["accuracy"]
    assert lines(figure) == {"a and 1 more seed": pytest.approx([0.2, 0.5])}  # rounds of both
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    at_first = band[band[:, 0] == 1][:, 1]
    assert at_first.min() == pytest.approx(0.2 - 0.02**0.5)
    other = load([*paths, change(make_run("c"), seed=2, data={"source": "mnist"})])
    assert seeds_apart(other) == [[0, 1]]
    assert {"data.source", "seed"} <= set(incomparable(other))
    assert seeds_apart(load([paths[0], make_run("d")])) == []  # the same seed twice is no spread
    twice = load([*paths, make_run("e")])  # and not a third seed beside another
    assert seeds_apart(twice) == figures.together(twice, ("mean_accuracy",)) == []
    assert incomparable(twice) == ["seed"]


def test_a_seed_that_has_just_started_leaves_the_others_their_curves(make_run: MakeRun) -> None:
    federation = {"rounds": 4, "clients": 4}
    done = [(0.1, 0.5, 0.8, 0.9), (0.3, 0.5, 0.8), (0.2,), ()]
    paths = []
    for seed, scores in enumerate(done):
        path = change(make_run("abcd"[seed], scores, config={"federation": federation}), seed=seed)
        rows = [(t, score, score) for t, score in enumerate(scores, 1)]
        paths.append(losses(path, *rows, more=",mean_accuracy"))
    runs = load(paths)
    assert seeds_apart(runs) == [[0, 1, 2, 3]]
    assert figures.together(runs, ("train_loss",)) == [[0, 1]]
    found = lines(figures.losses(runs)["losses"])
    assert {name: len(values) for name, values in found.items()} == {
        "a and 1 more seed · loss": 3,
        "c · loss": 1,
    }
    assert "The band of a ends at round 3: b has done no more." in render(runs)
    for few in (paths[::3], paths[::2]):
        assert figures.together(load(few), ("train_loss",)) == []


# ---------------------------------------------------------------- what is drawn


def test_losses_are_drawn_and_the_pull_where_there_is_one(make_run: MakeRun) -> None:
    more = ",coaching_loss"
    path = losses(make_run("a"), (1, 2.5, 0.0), (2, 1.5, 0.0), more=more)
    assert lines(figures.losses(load([path]))["losses"]) == {"a · loss": [2.5, 1.5]}
    losses(path, (1, 2.5, 0.5), more=more)
    figure = figures.losses(load([path]))["losses"]
    assert lines(figure) == {"a · loss": [2.5], "a · proximal term alone": [0.5]}
    # a line of one round would not be seen
    assert {line.get_marker() for line in figure.axes[0].lines} >= {"o"}
    assert list(figure.axes[0].get_xticks()) == [1]
    assert figures.losses(load([make_run("b")])) == {}


def test_curves_over_bytes_and_time_and_by_other_kinds(make_run: MakeRun) -> None:
    runs = load([make_run("a", channel=True), make_run("b")])
    drawn = figures.accuracy(runs)
    assert lines(drawn["accuracy"]) == {"a": [0.1, 0.5, 0.8], "b": [0.1, 0.5, 0.8]}
    assert lines(drawn["accuracy-channel"]) == {"a": [0.1, 0.5, 0.8]}
    assert figures.unmeasured(runs) == [
        "Not measured in every round of b: modelled channel seconds"
    ]
    titles = [axes.get_title() for axes in drawn["accuracy-kinds"].axes]
    assert "before local training" in titles and "worst 10 %, by each run's own judge" in titles


def test_no_tick_lies_between_two_rounds_and_a_legend_covers_no_bar(make_run: MakeRun) -> None:
    runs = load([make_run("one")])
    [axes] = figures.accuracy(runs)["accuracy"].axes
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    figure = figures.costs(runs)["cost-seconds"]
    vector.place(figure)
    figure.draw_without_rendering()
    [axes] = figure.axes
    [legend] = figure.legends
    assert legend.get_window_extent().y0 >= axes.get_window_extent().y1


@pytest.mark.parametrize(("value", "end"), [(1.0, "neither"), (1.5, "max"), (-0.5, "min")])
@pytest.mark.parametrize("weights", [True, False])
def test_scales_run_from_zero_to_one_and_say_what_lies_beyond(
    weights: bool, value: float, end: str
) -> None:
    figure = vector.heat(value * np.eye(2), "ab", "cd", ("x", "y", "weight"), weights)
    [picture] = figure.axes[0].images
    assert picture.colorbar.extend == end
    assert picture.get_clim() == (0.0, 1.0)
    assert float(picture.norm(0.25)) == (0.5 if weights else 0.25)


def test_shares_of_one_colour_are_said_in_words(make_run: MakeRun) -> None:
    path = make_run("a")
    assert "ledger-up-0" in figures.draw(load([path]))
    for file in (path / "traffic").iterdir():
        with np.load(file) as held:
            kept = dict(held)
        np.savez(file, **(kept | {"sent": np.ones_like(kept["sent"])}))
    runs = load([path])
    assert "ledger-layers" not in figures.ledger(runs)
    assert "ledger-layers" in figures.ledger(load([path, make_run("b")]))
    assert figures.constant(np.zeros((2, 3, 4))) == "no layer was ever sent or received"
    page = render(runs)
    whole = "100% of the cohort"
    assert f"in every round every layer was sent by {whole} and received by {whole}" in page
    assert 'id="ledger-up-0"' not in page


# ---------------------------------------------------------------- names and files


def test_names_of_clients_and_classes_stand_below_their_dots(make_run: MakeRun) -> None:
    """Class names of which some are numbers; names that matplotlib takes for formulas; a client
    without a class."""
    folder = RunFolder(make_run("a"))
    folder.names = ["$a$ and $\\b{", "007", "a client with a name, long", "Züri ²"]
    folder.write_split([8, 6, 3, 4], [2] * 4, COUNTS, ["1", "2", "3+"])
    runs = load([folder.path])
    (one,) = clients.splits(runs)
    assert (one["classes"], one["clients"]) == (["1", "2", "3+"], folder.names)
    drawn = figures.draw(runs) | figures.relations(runs)
    split_svg = svg("split-0", drawn["split-0"])
    assert texts(split_svg) == [*folder.names, "client", "1", "2", "3+", "class"]
    assert texts(svg("relation-0", drawn["relation-0"]))[:4] == folder.names
    assert "rotate(-40)" in split_svg  # or they would run into each other


def test_names_that_matplotlib_reads_otherwise_stand_in_the_legends(make_run: MakeRun) -> None:
    """It leaves out labels that begin with an underscore, and takes what stands between dollars for
    a formula."""
    names = ["_a", "a$x^{$b", "n" * 40]
    runs = load([make_run(name, (0.1,)) for name in names])
    drawn = figures.draw(runs)
    ends = {"accuracy": "", "fairness-order": "", "ledger-kinds": " up", "ledger-bytes": " · up"}
    for name, end in ends.items():
        shown = set(texts(svg(name, drawn[name])))
        assert {f"{run}{end}" for run in names} <= shown, name
    # long names have a line each above the axes, which keep their height
    figure = drawn["ledger-bytes"]
    vector.place(figure)
    figure.draw_without_rendering()
    assert figure.axes[0].get_window_extent().height > 150


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["svg", "pdf", "png"])
def test_charts_become_files_that_are_the_same_every_time(
    kind: str, make_run: MakeRun, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    split(make_run("a", channel=True))
    change(split(make_run("b")), seed=1)
    ways = {f"ledger-{way}-{run}" for run in (0, 1) for way in ("up", "down")}
    parts = ("", *(f"-client-00{client}" for client in range(3)))
    kept = []
    for _ in range(2):
        assert main(["report", "a", "b", "--figures", kind]) == 0
        assert capsys.readouterr().out == "report: report.html\nfigures: report-figures\n"
        files = {file.stem: file.read_bytes() for file in Path("report-figures").iterdir()}
        listed = json.loads(files.pop("figures"))
        assert listed == sorted(f"{name}.{kind}" for name in files)
        assert {f"relation-{run}{part}" for run in (0, 1) for part in parts} <= files.keys()
        assert ways | {"accuracy", "split-0", "cost-channel", "cost-flops"} <= files.keys()
        kept.append(files)
    assert kept[0] == kept[1]
    start = {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}[kind]
    assert all(content.startswith(start) for content in kept[0].values())


# ---------------------------------------------------------------- newcomers

SUMMARY = ', "held_out_clients": [3, 7], "newcomer_rule": "global model, then <local> training"'
ROWS = """client,samples_per_class,samples,test_samples,rule,accuracy_received,accuracy,loss
3,0,0,9,"global model, then <local> training",0.25,0.25,2.0
3,5,40,9,"global model, then <local> training",0.25,0.75,1.0
7,0,0,9,"global model, then <local> training",0.75,0.75,2.0
7,5,40,9,"global model, then <local> training",0.75,0.25,
"""


@pytest.fixture
def held(make_run: MakeRun) -> Path:
    """A run that held two clients out."""
    path = make_run("held", summary=SUMMARY)
    (path / "newcomers.csv").write_text(ROWS)
    return path


def test_unseen_clients_have_a_curve_and_a_table(make_run: MakeRun, held: Path) -> None:
    runs = load([make_run("plain"), held])
    assert lines(figures.newcomer_curve(runs)["newcomers-curve"]) == {"held": [0.5, 0.5]}
    assert cells(newcomers.table(runs)) == {
        "held out": ["–", "3, 7"],
        "a newcomer gets": ["–", "global model, then <local> training"],
        "0 labelled samples a class": ["–", "50.00 %"],
        "5 labelled samples a class": ["–", "50.00 %"],
    }
    page = render(runs[1:])
    assert "4, 2 of them held out" in page and "then &lt;local&gt; training" in page
    assert 'id="newcomers-curve"' in page and 'href="#newcomers"' in page
    assert 'id="newcomers' not in render(runs[:1])


def test_a_newcomer_lends_its_name_to_no_client(held: Path) -> None:
    """Those that take part are numbered anew: number 3 is another client in each table."""
    folder = RunFolder(held)
    folder.names = names = ["Aarau", "Chur", "Davos", "Zug"]
    folder.write_split([5] * 4, [2] * 4, None)
    rows = ROWS.replace("client,", "client,name,").replace("\n3,", "\n3,Basel,")
    (held / "newcomers.csv").write_text(rows.replace("\n7,", "\n7,Uri,"))
    (run,) = runs = load([held])
    assert run.client_names == dict(enumerate(names))
    assert list(clients.table(runs).index) == names
    assert cells(newcomers.table(runs))["held out"] == ["Basel, Uri"]


def test_newcomers_of_a_run_before_it_was_extended_are_not_its_results(make_run: MakeRun) -> None:
    path = make_run("held", asked=9, summary=SUMMARY + ', "made_up_data": true')
    (path / "newcomers.csv").write_text(ROWS)
    run: RunResult
    (run,) = load([path])
    assert run.newcomers.empty and run.final.empty
    assert "final_mean_accuracy" not in run.summary
    assert run.facts["made_up_data"] and run.judge == "after"
    page = render([run])
    assert 'id="newcomers' not in page and "4, 2 of them held out" in page


def test_further_metrics_and_errors_of_regressions_stand_there_too(
    make_run: MakeRun, held: Path
) -> None:
    added = ["f1", "", "0.5", "0.25", "1.0"]
    rows = [f"{line},{cell}" for line, cell in zip(ROWS.splitlines(), added, strict=True)]
    (held / "newcomers.csv").write_text("\n".join(rows) + "\n")
    assert cells(newcomers.further(load([held]))) == {
        "macro F1, 0 labelled samples a class": ["25.00 %"],
        "macro F1, 5 labelled samples a class": ["75.00 %"],
    }
    errors = make_run("errors", config={"data": {"task": "regression"}}, summary=SUMMARY)
    (errors / "newcomers.csv").write_text(
        "client,samples_per_class,rule,mae\n3,0,own,2.5\n3,5,own,1.25\n"
    )
    figure = figures.newcomer_curve(load([errors]))["newcomers-curve"]
    assert lines(figure) == {"errors": [2.5, 1.25]}
    assert figure.axes[0].get_xlabel() == "labelled samples"
    assert list(newcomers.table(load([errors])).index[2:]) == [
        "0 labelled samples",
        "5 labelled samples",
    ]
    page = render(load([errors]))
    assert "of each class" not in page and "from few labelled samples or from none" in page


@pytest.mark.parametrize(
    "text", ["client,samples_per_class\n3,", "client,samples_per_class,accuracy\n3,x,1\n", "\xff"]
)
def test_a_damaged_table_costs_its_section_alone(held: Path, text: str) -> None:
    (held / "newcomers.csv").write_text(text, encoding="latin-1")
    runs = load([held])
    assert runs[0].newcomers.empty and 'id="newcomers-curve"' not in render(runs)
