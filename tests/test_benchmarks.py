"""The benchmarks measure what they say: the bare loop does the engine's work, and the scripts
run."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning.configuration.config import Component
from fl_lightning.foundation import rng
from fl_lightning.models.mlp import MLP

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
Load = Callable[[str], ModuleType]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Imports a script of the benchmarks as it is when run: with its folder on the path."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for file in FOLDER.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.fixture
def tiny(script: Load) -> Any:
    """Five MLP clients on noise, four of which take part in a round."""
    workload = script("workloads").workloads()["100-mlps-10-a-round"]
    noise = replace(workload.data, source="arrays")
    return replace(
        workload,
        data=noise,
        clients=5,
        participation=0.8,
        train_samples=173,
        test_samples=40,
        rounds_at_once=1,
    )


def test_bare_loop_and_engine_reach_the_same_weights(script: Load, tiny: Any) -> None:
    assert script("speed").same_weights(tiny, rounds=3, tolerance=1e-5) < 1e-5


@pytest.mark.slow
def test_they_agree_with_batch_norm_and_a_lone_last_sample(script: Load, tiny: Any) -> None:
    resnet = Component("fl_lightning.models.resnet18.ResNet18")
    lone = replace(
        tiny,
        model=resnet,
        shape=(3, 8, 8),
        clients=2,
        train_samples=2 * 17,
        test_samples=2,
        local_epochs=1,
    )
    assert script("speed").same_weights(lone, tolerance=1e-5) < 1e-5


def test_a_bare_loop_that_does_other_work_is_found_out(
    script: Load, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        script("bare"), "generator", lambda seed, *ids: rng.generator(seed + 1, *ids)
    )
    with pytest.raises(AssertionError, match="does other work"):
        script("speed").same_weights(tiny)


def test_the_interval_holds_the_median_with_95_percent(script: Load) -> None:
    interval = script("measure").interval
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert interval([float(k) for k in range(1, 11)]) == (2.0, 9.0)  # 97.9 %; (3, 8) would be 89 %
    # the textbook's ranks for n = 30
    assert interval([float(k) for k in range(1, 31)]) == (10.0, 21.0)


@pytest.mark.slow
def test_the_calibration_of_worth(
    script: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A consortium with gains and one without: lines of the file, not run again, and the table."""
    worth, file = script("worth"), tmp_path / "results.jsonl"
    command = ["run", str(file), "--count", "2", "--cycles", "1", "--draws", "2"]
    worth.main(command)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["plain", "null"]
    assert {row["size"] for line in lines for row in line["silos"]} <= set(worth.SIZES)
    assert all(row["true"] <= 0 for row in lines[1]["silos"] if row["size"] >= 600)
    before = file.read_text()
    worth.main(command)
    assert file.read_text() == before
    worth.main(["table", str(file)])
    shown = capsys.readouterr().out
    assert "false `gains`" in shown and "| null |" in shown and "| 2000 |" in shown


def test_the_calibrations_students_learn(script: Load) -> None:
    """Of 2,000 rows descent and ridge alone find the teacher; the sum of silos finds the shared
    one."""
    worth = script("worth")
    world = worth.World(0)
    models = world.trained([world.draw(silo, 2000) for silo in range(len(worth.SIZES))])
    for silo, weights in enumerate(models):
        x, y, _ = world.draw(silo, 4000)
        best = np.append(world.teachers[silo], world.offsets[silo] / 2)
        most = world.score(x @ best, y)
        for label in (*worth.LOCAL, worth.LINEAR):
            assert world.score(x @ weights[label], y) > most - 0.04


@pytest.mark.slow
def test_only_one_benchmark_runs_and_the_others_rows_stay(
    script: Load,
    tiny: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    speed, out = script("speed"), tmp_path / "speed.json"
    first, second = replace(tiny, name="first"), replace(tiny, name="second")
    chosen = {
        "first": partial(speed.rounds, first),
        "default-second": partial(speed.default_rounds, second),
        "executors-first": partial(speed.executors, first),
    }
    for name in chosen:
        speed.main(chosen, ["--only", name, "--pairs", "1", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert Counter(row["benchmark"] for row in rows) == {
        "first": 3,
        "default-second": 3,
        "executors-first": 2,
    }
    assert all(float(row["s"]) > 0 and float(row["its s"]) > 0 for row in rows)
    assert capsys.readouterr().out.count("| first |") == 9  # three rows, printed three times


@pytest.mark.parametrize("solver", ["step", "exact"])
def test_the_server_step_is_the_engines(script: Load, solver: Any) -> None:
    """Each receives the mix of all by its row of the cube, which the step has learned."""
    server = script("server").Server(MLP((1, 8, 8), 10, [16]), 3, solver)
    before = server.memory["relation"].clone()
    server.step()
    cube = server.memory["relation"]
    assert cube.shape == (3, 2, 3) and (solver == "exact" or not torch.equal(cube, before))
    for s in server.segments:
        columns = slice(s.start, s.stop)
        want = cube[:, s.layer].float() @ server.models[:, columns]
        torch.testing.assert_close(server.received[:, columns], want, rtol=1e-4, atol=1e-6)


def test_rounds_are_stamped(script: Load, federation: Any, tmp_path: Path) -> None:
    measure = script("measure")
    federation(rounds=3, callbacks=[measure.Stamps(str(tmp_path / "stamps"))]).fit()
    stamps = measure.stamps(tmp_path / "stamps.0")
    assert stamps.shape == (4, 3) and (stamps[:, 2] > 100).all()
    assert (stamps[1:, :2] >= stamps[:-1, :2]).all()


@pytest.mark.slow
def test_ranks_and_hand_loops_are_timed(script: Load) -> None:
    scaling = script("scaling")
    workload = scaling.cnns(2, 12)
    clock, cpu = scaling.on_ranks(workload, 2)
    assert 0 < clock < 60 and 0 < cpu < 60


def test_runs_together_are_measured(script: Load, capsys: pytest.CaptureFixture[str]) -> None:
    together = script("together")
    together.STACKED = ("fedavg.FedAvg", "ditto.Ditto")
    together.main(["--seeds", "2", "--rounds", "1", "--pairs", "1"])
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == [
        "| 1 methods x 2 seeds",
        "| 2 methods x 1 seeds",
    ]
    for line in lines:
        stacked, loop = float(line.split(" | ")[2]), float(line.split(" | ")[4])
        assert 0 < stacked < 60 and 0 < loop < 60
