"""The charts on runs: lines, bands over seeds, colours, names, files."""

import json
import re
from pathlib import Path

import pytest
import yaml
from lines import run_line

from fl_lightning.lab.report import clients, figures, newcomers
from fl_lightning.lab.report.page import render
from fl_lightning.lab.report.tables import incomparable
from fl_lightning.lab.report.vector import svg
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.runs import load, seed_groups, settings

from .conftest import cells, change

METHODS = ("local", "kapc", "fedavg")


@pytest.fixture
def paths(make_run):
    """Three methods, four seeds each, in the order of `runs/*/seed-*`."""
    return [
        change(make_run(f"{name}-{seed}"), seed=seed, method={"name": name})
        for name in METHODS
        for seed in range(4)
    ]


def lines(figure):
    """Of the one panel of a figure the values of each line, by its name."""
    [axes] = figure.axes
    handles, labels = axes.get_legend_handles_labels()
    held = (getattr(handle, "lines", [handle])[0] for handle in handles)
    return {
        name.strip("\u200b"): [*line.get_ydata()] for name, line in zip(labels, held, strict=True)
    }


def losses(path, *rows, more=""):
    """The run with these rows of rounds and losses alone."""
    text = [",".join(map(str, row)) for row in rows]
    (path / "metrics.csv").write_text("\n".join([f"round,train_loss{more}", *text, ""]))
    return path


def texts(drawn):
    return [text.strip("\u200b") for text in re.findall(r">([^<>]+)</text>", drawn)]


# ---------------------------------------------------------------- seeds and methods


@pytest.mark.slow
def test_runs_on_other_data_are_no_seeds_of_one_method(make_run):
    """A table of one's own is its file: where it lies may differ, which it is may not."""

    def at(root, seed, digest=""):
        path = make_run(f"{root.replace('/', '-')}-{seed}{digest}")
        if digest:
            (path / "provenance.json").write_text(json.dumps([{"data": digest}]))
        kept = yaml.safe_load((path / "config.yaml").read_text())["data"]
        return change(path, seed=seed, data=kept | {"source": "table", "root": root})

    moved = load([at("here/a.csv", 0), at("there/a.csv", 1)])
    other = load([at("here/a.csv", 2), at("b.csv", 3)])
    assert seed_groups(moved) == [[0, 1]] and settings(moved) == ["", ""]
    assert seed_groups(other) == [] and settings(other) == ["data.root=a.csv", "data.root=b.csv"]
    one, same, changed = at("a.csv", 4, "x"), at("there/a.csv", 4, "x"), at("a.csv", 4, "y")
    assert incomparable(load([one, same])) == []
    assert incomparable(load([one, changed])) == ["data.root"]
    assert "What differs: <code>data.root</code>" in render(load([one, changed]))


@pytest.mark.slow
def test_runs_over_seeds_are_a_band_without_a_warning(make_run):
    paths = [make_run("a", (0.1, 0.5, 0.8)), change(make_run("b", (0.3, 0.5)), seed=1)]
    federation = yaml.safe_load((paths[0] / "config.yaml").read_text())["federation"]
    change(paths[1], federation=federation)
    runs = load(paths)
    assert seed_groups(runs) == [[0, 1]]
    assert incomparable(runs) == []
    figure = figures.score_curves(runs)["accuracy"]
    assert lines(figure) == {"a and 1 more seed": pytest.approx([0.2, 0.5, 0.8])}
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    at_first = band[band[:, 0] == 1][:, 1]
    assert at_first.min() == pytest.approx(0.2 - 0.02**0.5)
    other = load([*paths, change(make_run("c"), seed=2, data={"source": "mnist"})])
    assert seed_groups(other) == [[0, 1]]
    assert {"data.source", "seed"} <= set(incomparable(other))
    assert seed_groups(load([paths[0], make_run("d")])) == []  # the same seed twice is no spread
    twice = load([*paths, make_run("e")])  # and not a third seed beside another
    assert seed_groups(twice) == []
    assert incomparable(twice) == ["seed"]


def test_a_seed_that_has_just_started_leaves_the_others_their_curve(make_run):
    federation = {"rounds": 4, "clients": 4}
    done = [(0.1, 0.5, 0.8, 0.9), (0.3, 0.5, 0.8), (0.2,), ()]
    paths = []
    for seed, scores in enumerate(done):
        path = change(make_run("abcd"[seed], scores, config={"federation": federation}), seed=seed)
        paths.append(losses(path, *((t, score) for t, score in enumerate(scores, 1))))
    runs = load(paths)
    assert seed_groups(runs) == [[0, 1, 2, 3]]
    means = {"a and 3 more seeds · loss": pytest.approx([0.2, 0.5, 0.8, 0.9])}
    assert lines(figures.losses(runs)["losses"]) == means


# ---------------------------------------------------------------- names and files


@pytest.mark.slow
def test_names_that_matplotlib_reads_otherwise_stand_in_the_legends(make_run):
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
    figure.draw_without_rendering()
    assert figure.axes[0].get_window_extent().height > 150


@pytest.mark.slow
def test_charts_become_files_that_are_the_same_every_time(make_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change(make_run("b"), seed=1)
    make_run("a", channel=True)
    kept = []
    for _ in range(2):
        assert run_line("report a b --figures pdf") == 0
        files = {file.name: file.read_bytes() for file in Path("report-figures").iterdir()}
        assert json.loads(files.pop("figures.json")) == sorted(files)
        kept.append(files)
    assert kept[0] == kept[1] and {"accuracy.pdf", "relation-0.pdf", "cost-channel.pdf"} <= {*files}
    assert all(content.startswith(b"%PDF") for content in files.values())


# ---------------------------------------------------------------- newcomers

SUMMARY = ', "held_out_clients": [3, 7], "newcomer_rule": "global model, then <local> training"'
ROWS = """client,samples_per_class,samples,test_samples,rule,accuracy_received,accuracy,loss
3,0,0,9,"global model, then <local> training",0.25,0.25,2.0
3,5,40,9,"global model, then <local> training",0.25,0.75,1.0
7,0,0,9,"global model, then <local> training",0.75,0.75,2.0
7,5,40,9,"global model, then <local> training",0.75,0.25,
"""


@pytest.fixture
def held(make_run):
    """A run that held two clients out."""
    path = make_run("held", summary=SUMMARY)
    (path / "newcomers.csv").write_text(ROWS)
    return path


@pytest.mark.slow
def test_unseen_clients_have_a_curve_and_a_table(make_run, held):
    runs = load([make_run("plain"), held])
    assert lines(figures.newcomer_curve(runs)["newcomers-curve"]) == {"held": [0.5, 0.5]}
    assert cells(newcomers.table(runs))["5 labelled samples a class"] == ["–", "50.00 %"]
    assert "then &lt;local&gt; training" in render(runs[1:])
    assert 'id="newcomers' not in render(runs[:1])


def test_a_newcomer_lends_its_name_to_no_client(held):
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


@pytest.mark.sampled("nothing")
@pytest.mark.parametrize(
    "text", ["client,samples_per_class\n3,", "client,samples_per_class,accuracy\n3,x,1\n", "\xff"]
)
def test_a_damaged_table_costs_its_section_alone(held, text):
    (held / "newcomers.csv").write_text(text, encoding="latin-1")
    runs = load([held])
    assert runs[0].newcomers.empty and 'id="newcomers-curve"' not in render(runs)
