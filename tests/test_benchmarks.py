"""The benchmarks measure what they say: the bare loop does the engine's work, and the scripts
run."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fl_lightning.configuration.config import Component
from fl_lightning.foundation import rng
from fl_lightning.models.mlp import MLP

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Imports a script of the benchmarks as it is when run: with its folder on the path."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for file in FOLDER.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.fixture
def tiny(script):
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


def test_bare_loop_and_engine_reach_the_same_weights(script, tiny):
    assert script("speed").same_weights(tiny, rounds=3, tolerance=1e-5) < 1e-5


@pytest.mark.slow
def test_they_agree_with_batch_norm_and_a_lone_last_sample(script, tiny):
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


def test_a_bare_loop_that_does_other_work_is_found_out(script, tiny, monkeypatch):
    monkeypatch.setattr(
        script("bare"), "generator", lambda seed, *ids: rng.generator(seed + 1, *ids)
    )
    with pytest.raises(AssertionError, match="does other work"):
        script("speed").same_weights(tiny)


def test_the_interval_holds_the_median_with_95_percent(script):
    interval = script("measure").interval
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert interval([float(k) for k in range(1, 11)]) == (2.0, 9.0)  # 97.9 %; (3, 8) would be 89 %
    # the textbook's ranks for n = 30
    assert interval([float(k) for k in range(1, 31)]) == (10.0, 21.0)


@pytest.mark.parametrize("solver", ["step", "exact"])
def test_the_server_step_is_the_engines(script, solver):
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


@pytest.mark.slow
def test_ranks_and_hand_loops_are_timed(script):
    scaling = script("scaling")
    workload = scaling.cnns(2, 12)
    clock, cpu = scaling.on_ranks(workload, 2)
    assert 0 < clock < 60 and 0 < cpu < 60


# ---------------------------------------------------------------- a day with a GPU


@pytest.mark.slow
def test_a_device_day_writes_down_how_each_item_ended(script, tmp_path, monkeypatch, capsys):
    """Items of every kind, tiny, on the CPU and on noise."""
    day = script("device_day")
    monkeypatch.setattr(day.signal, "signal", lambda *_: None)
    names = ["machine", "suite", "rounds-100-mlps", "rounds-10-resnet18-bf16", "server-10"]
    words = ["--tiny", "--device", "cpu", "--minutes", "60", "--out", str(tmp_path)]
    assert day.main([*words, "--only", *names]) == 0
    lines = [json.loads(line) for line in (tmp_path / "day.jsonl").read_text().splitlines()]
    ends = {line["item"]: line["outcome"] for line in lines if "took" in line}
    assert ends == dict.fromkeys(names, "ended")
    differences = [line["weights_differ"] for line in lines if "weights_differ" in line]
    assert differences and max(differences) < 1e-4
    assert "| hand loop" in capsys.readouterr().out
