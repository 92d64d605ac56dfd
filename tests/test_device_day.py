"""A day with a GPU, without one: items keep what they have measured, end in time, and become
tables."""

import importlib
import json
import sys
from pathlib import Path

import pytest

UNEVEN = "on this machine a model's numbers depend on how many are trained beside it"
FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Imports a script of the benchmarks as it is when run: with its folder on the path."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for file in FOLDER.glob("*.py"):
        sys.modules.pop(file.stem, None)


def lines(folder):
    """What was written down."""
    return [json.loads(line) for line in (folder / "day.jsonl").read_text().splitlines()]


def test_every_item_can_run(script):
    day = script("device_day")
    assert {name.split("-")[0] for name in day.BOUNDS} == set(day.KINDS)
    for name in day.BOUNDS:
        if name.startswith("rounds-"):
            workload = day.workload_of(day.Day(Path(), "cuda", item=name))
            assert workload.accelerator == workload.config().fabric.accelerator == "cuda"
            assert workload.clients == int(name.split("-")[1])
            assert (workload.config().fabric.precision == "bf16-mixed") == name.endswith("bf16")


@pytest.mark.slow
def test_a_day_without_a_gpu(
    script,
    tmp_path,
    monkeypatch,
    capsys,
):
    """Items of every kind, tiny, on the CPU and on noise."""
    day = script("device_day")
    monkeypatch.setattr(day.signal, "signal", lambda *_: None)
    names = [
        "machine",
        "suite",
        "rounds-100-mlps",
        "rounds-10-mnist",
        "rounds-10-resnet18-bf16",
        "server-10",
    ]
    words = ["--tiny", "--device", "cpu", "--minutes", "60", "--out", str(tmp_path)]
    assert day.main([*words, "--only", *names]) == 0
    written = lines(tmp_path)
    ends = {line["item"]: line["outcome"] for line in written if "took" in line}
    assert ends == dict.fromkeys(names, "ended")
    for item in names:
        of_item = [line for line in written if line["item"] == item]
        sides = {line["side"] for line in of_item if "seconds" in line and "side" in line}
        if item.startswith("rounds-"):
            # BatchNorm mixes the samples of a batch
            normed = {"vmap", "together"} if "resnet18" in item else set()
            errors = {line["side"]: line["error"] for line in of_item if "error" in line}
            # Some processors' convolutions round by how many are stacked: then these do not train
            # together.
            uneven = {side for side, error in errors.items() if "mnist" in item and UNEVEN in error}
            assert sides == {"hand loop", "loop", "vmap", "together"} - normed - uneven
            assert errors.keys() == normed | uneven and uneven <= {"together"}
            assert next(x["weights_differ"] for x in of_item if "weights_differ" in x) < 1e-4
        elif item.startswith("server"):
            assert [line["solver"] for line in of_item if "solver" in line] == ["step", "exact"]
        elif item == "suite":
            assert [line["outcome"] for line in of_item if "test" in line] == ["passed"]
    assert capsys.readouterr().out.count("| hand loop") >= 3
