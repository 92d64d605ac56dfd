import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from refusals import refuses

from fl_lightning.callbacks.attack import Attack
from fl_lightning.callbacks.heatmaps import Heatmaps
from fl_lightning.results.record import RelationView

from . import rounds


def run_of(tmp_path, rounds=4, task="regression"):
    counts = np.arange(15).reshape(5, 3)
    data = SimpleNamespace(
        task=task, class_counts=counts, client_names=[], class_names=[], holds_all=True
    )
    return SimpleNamespace(
        is_main=True,
        clients=5,
        rounds=rounds,
        folder=tmp_path,
        data=data,
        resumed_from=0,
        config=SimpleNamespace(loggers=()),
    )


def record(round, receivers):
    draws, n = np.random.default_rng(round), len(receivers)
    rows = draws.dirichlet(np.ones(n), size=(n, 3)).astype(np.float32)
    view = RelationView(rows, receivers, ["conv", "fc", "out"], receivers)
    return rounds.record(round, receivers, relation=view)


def test_pictures_of_three_clients_and_of_all(tmp_path):
    made, drawing = record(1, [0, 1, 2, 3, 4]), Heatmaps()
    drawing.on_round_end(run_of(tmp_path), made)
    names = ["client-000", "client-001", "client-002", "overview"]
    assert list(made.images) == [f"relation/{name}" for name in names]
    assert sorted(p.name for p in (tmp_path / "figures").iterdir()) == [
        f"round-0001-{name}.png" for name in names
    ]
    for name in names:
        png = np.asarray(Image.open(tmp_path / "figures" / f"round-0001-{name}.png"))
        np.testing.assert_array_equal(png, np.asarray(made.images[f"relation/{name}"]))


@pytest.mark.parametrize(
    "chosen, receivers, drawn",
    [
        (None, [1, 2, 3, 4], [1, 2, 3]),
        (None, [4], [4]),
        ([3, 0], [0, 1, 3], [3, 0]),
        ([3], [0, 1], []),
    ],
)
def test_which_clients_are_drawn(tmp_path, chosen, receivers, drawn):
    made = record(1, receivers)
    drawing = Heatmaps(clients=chosen, png=False)
    drawing.on_round_end(run_of(tmp_path), made)
    assert list(made.images) == [*(f"relation/client-{c:03d}" for c in drawn), "relation/overview"]
    assert not (tmp_path / "figures").exists()


@pytest.mark.slow
def test_unless_told_otherwise_six_rounds_are_drawn_and_the_split_once(tmp_path):
    run, drawing = run_of(tmp_path, rounds=20, task="classification"), Heatmaps()
    made = [record(round, [0, 1]) for round in range(1, 21)]
    for one in made:
        drawing.on_round_end(run, one)
    assert [one.round for one in made if "relation/overview" in one.images] == [1, 5, 9, 12, 16, 20]
    assert [one.round for one in made if "data/split" in one.images] == [1]
    assert len(list((tmp_path / "figures").iterdir())) == 6 * 3 + 1
    resumed = record(13, [0, 1])
    Heatmaps().on_round_end(run, resumed)
    assert list(resumed.images) == ["data/split"]  # for loggers that begin anew


def test_without_matplotlib_one_line_says_so_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run, drawing, made = run_of(tmp_path), Heatmaps(), record(1, [0, 1])
    run.config.loggers = {"wandb": {}}
    drawing.on_fit_start(run)
    drawing.on_round_end(run, made)
    drawing.on_fit_end(run, {})
    assert not made.images and not (tmp_path / "figures").exists()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "callbacks.heatmaps: no pictures, it needs matplotlib, which is not installed: "
    )
    assert "pip install" in line and line.endswith("; without this line: --callbacks.heatmaps null")


def test_a_disk_that_takes_no_picture_is_named_once_and_viewers_get_them(tmp_path, capsys):
    (tmp_path / "figures").write_text("a file, where the folder should be")
    run, drawing = run_of(tmp_path, task="classification"), Heatmaps(every=1)
    for t in (1, 2):
        made = record(t, [0, 1])
        drawing.on_round_end(run, made)
        assert made.images.keys() >= {"relation/overview", "relation/client-000"}
    (line,) = capsys.readouterr().err.splitlines()
    assert "callbacks.heatmaps: figures/split.png cannot be written" in line


def test_bad_arguments_are_named(tmp_path):
    with refuses(r"callbacks\.heatmaps\.every=0"):
        Heatmaps(every=0)
    with refuses(r"callbacks\.heatmaps\.clients=5.* 0 to 4"):
        Heatmaps(clients=[1, 5]).on_fit_start(run_of(tmp_path))


@pytest.mark.parametrize("clients", [0.5, "1", [0.5], {"a": 1}])
def test_clients_are_a_list_of_numbers(clients):
    with refuses(r"callbacks\.heatmaps\.clients=.* list of client numbers"):
        Heatmaps(clients=clients)
    with refuses(r"callbacks\.attack\.clients=.* list of client numbers"):
        Attack("noise", clients=clients)
