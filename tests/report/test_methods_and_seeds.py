"""Several methods, each with several seeds, on one page: colours, the warning of what differs, and
ticks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure

from fl_lightning.lab.report import figures, render, vector
from fl_lightning.lab.report.tables import incomparable
from fl_lightning.results.result import RunResult
from fl_lightning.results.runs import load, seeds_apart, settings

MakeRun = Callable[..., Path]
METHODS = ("local", "kapc", "fedavg")


@pytest.fixture
def paths(make_run: MakeRun) -> list[Path]:
    """Three methods, four seeds each, in the order of `runs/*/seed-*`."""
    return [
        change(make_run(f"{name}-{seed}"), seed=seed, method={"name": name})
        for name in METHODS
        for seed in range(4)
    ]


def change(path: Path, **keys: Any) -> Path:
    file = path / "config.yaml"
    config = yaml.safe_load(file.read_text())
    for key, value in keys.items():
        config[key] = (
            config[key] | value if isinstance(config.get(key), dict) and key != "method" else value
        )
    file.write_text(yaml.safe_dump(config))
    return path


def used(figure: dict[str, Any]) -> dict[str, str]:
    """Colours by the name of a trace."""
    return {trace["name"]: trace["line"]["color"] for trace in figure["data"]}


def test_seeds_share_a_colour_and_methods_do_not(paths: list[Path]) -> None:
    runs = load(paths)
    colours = figures.colours(runs)
    assert colours == [figures.COLOURS[group] for group in range(3) for _ in range(4)]
    assert used(figures.fairness(runs)["fairness-order"]) == {
        run.name: colour for run, colour in zip(runs, colours, strict=True)
    }
    shuffled = load([*paths[::4], *paths[1::4]])
    assert figures.colours(shuffled) == [*figures.COLOURS[:3]] * 2
    assert f'"colours":["{colours[0]}","{colours[0]}"' in render(runs)


def test_seeds_of_bands_are_no_warning_and_rates_are_named(paths: list[Path]) -> None:
    def warned() -> list[str]:
        return incomparable(load(paths))

    assert warned() == []
    assert "What differs" not in render(load(paths))
    for path in paths[4:8]:
        change(path, optimizer={"lr": 0.1})
    for path in [*paths[:4], *paths[8:]]:
        change(path, optimizer={"lr": 0.05})
    assert warned() == ["optimizer.lr"]
    assert "What differs: <code>optimizer.lr</code>." in render(load(paths))
    # one method lacks a seed that others have
    assert incomparable(load(paths[:-1])) == ["optimizer.lr", "seed"]
    assert incomparable(load([paths[0], paths[9]])) == ["seed"]


def rounds(run: RunResult, last: int) -> RunResult:
    run._kept["metrics"] = [
        {"round": number, "train_loss": 1 / number, "mean_accuracy": 0.5}
        for number in range(1, last + 1)
    ]
    return run


def test_no_tick_lies_between_two_rounds(paths: list[Path], tmp_path: Path) -> None:
    run = load(paths[:1])[0]
    every = {"tick0": 0, "dtick": 1}
    for last, wanted in ((3, every), (200, {})):
        runs = [rounds(run, last)]
        axis = figures.training(runs)["losses"]["layout"]["xaxis"]
        assert {key: axis[key] for key in axis if key != "title"} == wanted
        assert figures.curves(runs)["ticks"] == wanted
    axes = Figure().add_subplot()
    vector._chart(axes, figures.training([rounds(run, 3)])["losses"])
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_a_legend_covers_no_bar(make_run: MakeRun) -> None:
    axes = Figure(layout="constrained").add_subplot()
    vector._chart(axes, figures.costs(load([make_run("one")]))["cost-seconds"])
    axes.figure.canvas.draw()
    legend = axes.get_legend()
    assert legend is not None
    assert legend.get_window_extent().y0 >= axes.get_window_extent().y1


@pytest.mark.parametrize(("value", "end"), [(1.0, "neither"), (1.5, "max"), (-0.5, "min")])
@pytest.mark.parametrize("weights", [True, False])
def test_scales_run_from_zero_to_one_and_say_what_lies_beyond(
    weights: bool, value: float, end: str
) -> None:
    axes = Figure().add_subplot()
    vector._heat(axes, vector._Heat(value * np.eye(2), "ab", "cd", "x", "y", "weight", weights))
    [picture] = axes.images
    assert picture.colorbar.extend == end
    assert picture.get_clim() == (0.0, 1.0)
    assert float(picture.norm(0.25)) == (0.5 if weights else 0.25)


def test_runs_on_other_data_are_no_seeds_of_one_method(make_run: MakeRun) -> None:
    """A table of one's own is its file: where it lies may differ, which it is may not."""

    def at(root: str, seed: int, digest: str = "") -> Path:
        path = make_run(f"{root.replace('/', '-')}-{seed}{digest}")
        if digest:
            (path / "provenance.json").write_text(json.dumps([{"data": digest}]))
        return change(path, seed=seed, data={"source": "table", "root": root})

    moved, other = (
        load([at("here/a.csv", 0), at("there/a.csv", 1)]),
        load([at("here/a.csv", 2), at("b.csv", 3)]),
    )
    assert seeds_apart(moved) == [[0, 1]] and settings(moved) == ["", ""]
    assert seeds_apart(other) == [] and settings(other) == ["data.root=a.csv", "data.root=b.csv"]
    one, same, changed = at("a.csv", 4, "x"), at("there/a.csv", 4, "x"), at("a.csv", 4, "y")
    assert incomparable(load([one, same])) == []
    assert incomparable(load([one, changed])) == ["data.root"]
    assert "What differs: <code>data.root</code>" in render(load([one, changed]))
