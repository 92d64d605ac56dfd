"""Every method gives the numbers that it gave: within 1e-9, in float64, on one thread.

Numbers that are meant to change are looked at and kept with `python tests/golden/regenerate.py --write`.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fl_lightning import catalogue, federation
from fl_lightning.callbacks import cube, relations, robust
from fl_lightning.methods.fedamp import FedAMP
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.kapc import KAPC

FOLDER = Path(__file__).parent
METHODS = list(catalogue.table("methods"))
NAMES = sorted(
    [*METHODS, "ktpfl-code", "kapc-exact", "kapc-selected", "fedavg-trimmed", "fedavg-krum", "fedavg-clipped"]
)
HINT = "if that is meant, keep it with: python tests/golden/regenerate.py --write"


@pytest.fixture
def golden(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("golden")
    sys.modules.pop("golden", None)


def test_every_run_is_kept_and_no_other(golden: ModuleType) -> None:
    assert sorted(golden.runs()) == NAMES
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == NAMES, HINT


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_are_those_that_are_kept(name: str, golden: ModuleType) -> None:
    found = list(golden.differences(golden.kept(name), golden.numbers(golden.runs()[name])))
    assert not found, "\n".join([HINT, *found[:20]])


def test_a_difference_is_found_and_shown(golden: ModuleType) -> None:
    old = {"a": [1.0, 2.0], "b": 3}
    assert list(golden.differences(old, {"a": [1.0, 2.0 * (1 + 1e-10)], "b": 3})) == []
    (line,) = golden.differences(old, {"a": [1.0, 2.0 * (1 + 1e-8)], "b": 3})
    assert line.startswith("/a/1: 2.0 -> 2.00000002 (relative change 1.0e-08)")
    assert list(golden.differences({}, old)) == ["/a: None -> [1.0, 2.0]", "/b: None -> 3"]
    assert list(golden.differences(old, {"a": [1.0], "b": 3})) == ["/a: [1.0, 2.0] -> [1.0]"]


# ---------------------------------------------------------------- a millionth more is seen

SLIGHTLY = 1 + 1e-6


def more(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose result is a millionth larger."""
    return lambda *args, **named: function(*args, **named) * SLIGHTLY


def learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federation.Federation, "learning_rate", more(federation.Federation.learning_rate))


def samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(self: Any, hearing: Any) -> torch.Tensor:
        counted = hearing.samples.clone()
        counted[0] *= SLIGHTLY
        return (counted / counted.sum())[None, None]

    monkeypatch.setattr(relations.SampleCounts, "rows", rows)


MUTATIONS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    **{f"learning rate of {m}": (m, learning_rate) for m in METHODS},
    "sample weights": ("fedavg", samples),
    "fedprox's mu": ("fedprox", lambda m: m.setattr(FedProx, "pull", more(FedProx.pull))),
    "fedamp's pull": ("fedamp", lambda m: m.setattr(FedAMP, "pull", more(FedAMP.pull))),
    "fedamp's alpha": (
        "fedamp",
        lambda m: m.setattr(relations.Attention, "_step", property(more(relations.Attention._step.fget))),  # type: ignore[attr-defined]
    ),
    "kapc's pull": ("kapc", lambda m: m.setattr(KAPC, "pull", more(KAPC.pull))),
    "kapc's step": ("kapc", lambda m: m.setattr(cube, "gradient", more(cube.gradient))),
    "kapc's rho": (
        "kapc-exact",
        lambda m: m.setattr(cube.LearnedCube, "rho", property(more(cube.LearnedCube.rho.fget))),  # type: ignore[attr-defined]
    ),
    "trimmed mean": ("fedavg-trimmed", lambda m: m.setattr(robust, "trimmed_mean", more(robust.trimmed_mean))),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_millionth_more_in_a_formula_is_seen(what: str, golden: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    name, mutate = MUTATIONS[what]
    mutate(monkeypatch)
    assert list(golden.differences(golden.kept(name), golden.numbers(golden.runs()[name])))


@pytest.mark.slow
def test_the_command_finds_nothing_to_change(tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in FOLDER.glob("*.json")}
    line = [sys.executable, str(FOLDER / "regenerate.py")]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"0 of {len(NAMES)} runs differ\n")
    assert before == {path: path.read_bytes() for path in FOLDER.glob("*.json")}
