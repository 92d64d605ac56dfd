"""A day with a GPU, without one: items keep what they have measured, end in time, and become
tables."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

UNEVEN = "on this machine a model's numbers depend on how many are trained beside it"
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


@pytest.mark.slow
def test_an_item_ends_after_its_bound_or_by_its_error_and_the_next_one_runs(
    script: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    day = script("device_day")

    def hang(item: Any) -> None:
        item.note(before=1)
        subprocess.Popen(["sh", "-c", f"sleep 1; touch {tmp_path}/left"])
        time.sleep(60)

    def fail(item: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    kinds = {"suite": hang, "golden": fail, "machine": lambda item: item.note(before=2)}
    monkeypatch.setattr(day, "KINDS", kinds)
    monkeypatch.setattr(day.signal, "signal", lambda *_: None)
    monkeypatch.setitem(day.BOUNDS, "suite", 0.7)
    assert day.main(["--out", str(tmp_path), "--only", "suite", "golden", "machine"]) == 0
    outcome = {line["item"]: line["outcome"] for line in lines(tmp_path) if "outcome" in line}
    assert outcome == {
        "suite": "stopped after its 1 s",
        "golden": "failed (exit 1): see log.txt",
        "machine": "ended",
    }
    assert [line["before"] for line in lines(tmp_path) if "before" in line] == [1, 2]
    assert "illegal memory access" in (tmp_path / "log.txt").read_text()
    assert "failed (exit 1): see log.txt" in capsys.readouterr().out
    time.sleep(1)
    assert not (tmp_path / "left").exists()  # what the stopped item had started is ended, too


def test_an_item_is_begun_only_where_time_is_left(
    script: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    day = script("device_day")
    (tmp_path / "day.jsonl").write_text("")
    assert day.main(["--out", str(tmp_path), "--only", "machine", "--minutes", "0.1"]) == 0
    assert capsys.readouterr().err == "    0 s  machine: not begun: 6 s left\n"
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
    counted = script("device_day").counted
    assert counted(events) == {
        "kernels": 3,
        "launches": 2,
        "waits": 1,
        "busy": pytest.approx(50e-6),
    }
    assert counted(events[:3])["kernels"] == 0


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
    """The last run of an item counts, and a torn line is left out."""
    item = "rounds-100-mlps"
    of_day = [
        {"item": item, "begun": "1"},
        {"item": item, "side": "loop", "seconds": 9.0},
        {"item": item, "begun": "2"},
        {"item": item, "workload": "100 MLPs", "data": "real data"},
        {"item": item, "side": "together", "seconds": 0.002},
        {"item": item, "side": "together", "kernels": 1000, "busy": 0.0005},
        {"item": item, "side": "vmap", "error": "no room"},
        {"item": item, "outcome": "ended", "took": 31.0},
        {"item": "suite", "begun": "1"},
        {"item": "suite", "test": "a", "outcome": "passed", "error": ""},
        {"item": "suite", "test": "b", "outcome": "failed", "error": "assert 1 == 2"},
    ]
    text = script("device_day").tables(["\n".join(map(json.dumps, of_day)) + '\n{"item": "stu'])
    head, *rows = [line for line in text.splitlines() if line.startswith("| ")]
    columns = head.strip("| ").split(" | ")
    together = dict(zip(columns, rows[2].strip("| ").split(" | "), strict=False))
    assert (
        "| together |" in rows[2] and "0.002" in rows[2] and together.get("idle, %", "75") == "75"
    )
    assert "no room" in text and "9.0" not in text and "ended" in text
    assert "| passed | failed |\n| --- | --- |\n| 1 | 1 |" in text
    assert "| b | failed | assert 1 == 2 |" in text


def test_every_item_can_run(script: Load) -> None:
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
    script: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
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
