"""A day with a GPU, without one: items keep what they have measured, end in time, and become
tables."""

from __future__ import annotations

import ast
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
Load = Callable[[str], ModuleType]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Imports a script of the benchmarks as it is when run: with its folder on the path."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for file in FOLDER.glob("*.py"):
        sys.modules.pop(file.stem, None)


def lines(folder: Path) -> list[dict[str, Any]]:
    """What was written down."""
    return [json.loads(line) for line in (folder / "day.jsonl").read_text().splitlines()]


CHILD = """
import os, subprocess, sys, time
item, out = sys.argv[1:3]
assert sys.stdin.readline() == "go\\n"
open(f"{out}/day.jsonl", "a").write('{"item": "' + item + '", "before": 1}\\n')
if item == "suite":
    left = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(1); open('{out}/left', 'w')"])
    time.sleep(60)
if item == "study":
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""


@pytest.fixture
def day(script: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program with other items, and nothing printed of them."""
    module = script("device_day")
    (tmp_path / "device_items.py").write_text(CHILD)
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    return module


@pytest.mark.slow
def test_an_item_ends_after_its_bound_or_by_its_error_and_the_next_one_runs(
    day: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(day.BOUNDS, "suite", 0.7)
    assert day.main(["--out", str(tmp_path), "--only", "suite", "study", "machine"]) == 0
    outcome = {line["item"]: line["outcome"] for line in lines(tmp_path) if "outcome" in line}
    assert outcome["suite"] == "stopped after its 1 s"
    assert (
        outcome["study"]
        == "failed (exit 1): RuntimeError: CUDA error: an illegal memory access was encountered"
    )
    assert outcome["machine"] == "ended"
    assert [line["item"] for line in lines(tmp_path) if "before" in line] == [
        "suite",
        "study",
        "machine",
    ]
    assert "illegal memory access" in (tmp_path / "log.txt").read_text()
    assert "| `study` | failed (exit 1): RuntimeError: CUDA error" in capsys.readouterr().out
    time.sleep(1)
    assert not (tmp_path / "left").exists()  # what the stopped item had started is ended, too


def test_an_item_is_begun_only_where_time_is_left(
    day: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert day.main(["--out", str(tmp_path), "--only", "study", "machine", "--minutes", "0.1"]) == 0
    assert [line["outcome"] for line in lines(tmp_path)] == ["not begun: 6 s left"] * 2
    assert "| `machine` | not begun: 6 s left |  |" in capsys.readouterr().out


def test_what_is_absent_is_named(
    day: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert day.absent() == []
    real = day.importlib.metadata.version

    def version(name: str) -> str:
        if name in ("greenlet", "pytest-xdist"):
            raise day.importlib.metadata.PackageNotFoundError(name)
        return str(real(name))

    monkeypatch.setattr(day.importlib.metadata, "version", version)
    assert day.main(["--out", str(tmp_path / "new")]) == 2
    assert (
        capsys.readouterr().err.endswith(": greenlet, pytest-xdist\n")
        and not (tmp_path / "new").exists()
    )
    assert day.main(["--table", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        day.main([])


def test_kernels_launches_and_busy_time_are_counted(script: Load) -> None:
    """Two kernels overlap by 10 of 40 microseconds, a copy runs within the first."""
    events = [
        ("cudaLaunchKernel", "CPU", 0.0, 5.0),
        ("cudaLaunchKernel", "CPU", 5.0, 9.0),
        ("cudaStreamSynchronize", "CPU", 9.0, 99.0),
        ("a kernel", "CUDA", 10.0, 30.0),
        ("b kernel", "CUDA", 20.0, 50.0),
        ("Memcpy DtoH", "CUDA", 12.0, 14.0),
        ("c kernel", "CUDA", 60.0, 70.0),
    ]
    counted = script("device_items").counted
    assert counted(events) == {
        "kernels": 3,
        "launches": 2,
        "waits": 1,
        "busy": pytest.approx(50e-6),
    }
    assert "kernels" not in counted(events[:3])


@pytest.mark.slow
def test_turns_end_with_their_time_and_by_their_clock(script: Load) -> None:
    measure, now, calls = script("measure"), [0.0], []

    def side(name: str, seconds: float) -> None:
        calls.append(name)
        now[0] += seconds

    sides = {"a": lambda: side("a", 1.0), "b": lambda: side("b", 3.0)}
    assert measure.interleaved(sides, 2, lambda: now[0]) == {"a": [1.0, 1.0], "b": [3.0, 3.0]}
    assert "".join(calls) == "ababba"
    assert measure.interleaved(sides, 5, lambda: now[0], limit=0.0) == {"a": [1.0], "b": [3.0]}


def test_lines_become_tables(script: Load) -> None:
    """The last run of an item counts, what is not begun hides nothing, and a torn line is left
    out."""
    item, base = "rounds-100-mlps", {"low": 0.1, "high": 0.9, "turns": 7}
    of_day = [
        {"item": item, "begun": "1"},
        {"item": item, "side": "loop", "seconds": 9.0, "ratio": 9.0, **base},
        {"item": item, "begun": "2"},
        {"item": item, "workload": "100 MLPs", "data": "real data", "runs": 4},
        {"item": item, "side": "together", "peak_mib": 5},
        {"item": item, "side": "vmap", "error": "no | room"},
        {"item": item, "side": "together", "seconds": 0.002, "ratio": 0.25, **base},
        {
            "item": item,
            "side": "together",
            "kernels": 4000,
            "launches": 400,
            "waits": 8,
            "busy": 0.002,
        },
        {"item": item, "ended": True, "outcome": "ended", "seconds": 31.0},
        {"item": item, "ended": True, "outcome": "not begun: 3 s left"},
        {"item": "suite", "begun": "1"},
        {"item": "suite", "test": "test_precisions[a]", "outcome": "passed", "error": ""},
        {
            "item": "suite",
            "test": "test_precisions[b]",
            "outcome": "failed",
            "error": "assert 1 == 2",
        },
        {"item": "sanitizers", "skipped": "there is no tool"},
        {"item": "study", "seeds": 10, "rounds": 4},
        {"item": "study", "side": "together", "seconds": 1.0},
        {"item": "study", "side": "loop", "seconds": 4.0},
    ]
    text = script("device_tables").tables(["\n".join(map(json.dumps, of_day)) + '\n{"item": "stu'])
    for row in (
        "| 100 MLPs (real data) | together | 0.002 | **0.25** [0.10, 0.90] | 7 | 5 |  |  |",
        "| 100 MLPs (real data) | vmap |  |  |  |  |  | no / room |",
        "| 100 MLPs | together | 1,000 | 100 | 2 | 0.5 | 75 |",  # for one of four runs
        "| 10 seeds, 4 rounds, together | 1 | **0.25** |",
        "| precisions, `channels_last` | 1 | 1 | 0 |",
        "| `test_precisions[b]` | assert 1 == 2 |",
        "Not run: there is no tool.",
        f"| `{item}` | ended | 31.0 |",
        "| `suite` | cut off |  |",
    ):
        assert row in text.splitlines()
    assert "9.00" not in text


def test_every_item_can_run_and_every_test_has_its_row(script: Load) -> None:
    day, items, tables = script("device_day"), script("device_items"), script("device_tables")
    assert {name.split("-")[0] for name in day.BOUNDS} == set(items.KINDS)
    for name in day.BOUNDS:
        if name.startswith("rounds-"):
            workload = items.workload_of(day.Day(Path(), "cuda"), name)
            assert workload.accelerator == workload.config().fabric.accelerator == "cuda"
            assert workload.clients == int(name.split("-")[1]) and workload.name.startswith(
                f"{workload.clients} "
            )
            assert (workload.config().fabric.precision == "bf16-mixed") == name.endswith("bf16")
    tree = ast.parse((Path(__file__).parent / "accelerator" / "test_device.py").read_text())
    tests = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    words = [word for of_path in tables.PATHS.values() for word in of_path]
    assert [test for test in tests if sum(word in test for word in words) != 1] == []


TOOL = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift 2; done
echo ========= COMPUTE-SANITIZER
exec "$@"
"""


UNEVEN = "on this machine a model's numbers depend on how many are trained beside it"


@pytest.mark.slow
def test_a_day_without_a_gpu(
    script: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Items of every kind, tiny, on the CPU and on noise; in the sanitizer's place is a tool that
    only runs what it is given. (All items take four times as long.)"""
    day, tool = script("device_day"), tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    monkeypatch.setenv("FL_DATA", str(tmp_path))
    monkeypatch.setattr(day.signal, "signal", lambda *_: None)
    kinds = {name.split("-")[0]: name for name in reversed(day.BOUNDS)}  # of each kind the first
    names = [
        name
        for name in day.BOUNDS
        if name in {*kinds.values(), "rounds-10-mnist-cnns", "rounds-10-resnet18-bf16"}
    ]
    words = [
        "--tiny",
        "--device",
        "cpu",
        "--minutes",
        "60",
        "--out",
        str(tmp_path / "day"),
        "--only",
        *names,
    ]
    assert day.main(words) == 0
    written = lines(tmp_path / "day")
    ends = {line["item"]: line["outcome"] for line in written if "ended" in line}
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
            uneven = {side for side, error in errors.items() if "cnns" in item and UNEVEN in error}
            assert {s for s in sides if not s.startswith("hand")} == {
                "loop",
                "vmap",
                "together",
            } - normed - uneven
            assert errors.keys() == normed | uneven and uneven <= {"together"}
            assert (
                next(line["weights_differ"] for line in of_item if "weights_differ" in line) < 1e-4
            )
        elif item == "study":
            assert sides == {"together", "hand loop", "loop", "vmap"}
        elif item.startswith("server"):
            assert [line["solver"] for line in of_item if "solver" in line] == ["step", "exact"]
        elif item in ("suite", "golden"):
            assert [line["outcome"] for line in of_item if "test" in line] == ["passed"]
        elif item == "sanitizers":
            exits = {line["run"]: line["exit"] for line in of_item if "tool" in line}
            assert exits == {"loop": 0, "vmap": 0}
    text = capsys.readouterr().out
    assert text.count("| hand loop") >= 5 and "(noise)" in text
