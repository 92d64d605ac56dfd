"""A slice of the fuzz run (`python tests/fuzz/fuzz.py` is the whole), and that it would see what is
not allowed."""

import importlib
import sys
from pathlib import Path

import pytest

from fl_lightning.lab import fitting


@pytest.fixture
def fuzz(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield importlib.import_module("fuzz")
    sys.modules.pop("fuzz", None)


def found(fuzz, seed, count, as_command=False):
    """The outcomes; a bug is shown with its input."""
    outcomes = []
    for case in fuzz.cases(seed, count):
        outcome = fuzz.tried(case, as_command)
        assert not outcome.startswith("BUG"), (case, outcome)
        outcomes.append(outcome)
    return outcomes


def test_a_few_inputs(fuzz):
    outcomes = found(fuzz, seed=1000, count=12)
    assert min(outcomes.count("ran"), outcomes.count("refused")) >= 1


@pytest.mark.slow
def test_three_hundred_inputs_and_three_commands(fuzz):
    outcomes = found(fuzz, seed=1001, count=300)
    assert min(outcomes.count("ran"), outcomes.count("refused")) >= 25
    assert len(found(fuzz, 1002, 3, as_command=True)) == 3


def forever(layers):
    while True:
        pass


@pytest.mark.slow
def test_what_is_not_allowed_is_seen(fuzz, monkeypatch):
    case = fuzz.Case(["--out", "OUT"])

    def outcome_of(engine):
        monkeypatch.setattr(fitting, "resolve", engine)
        outcome = fuzz.tried(case)
        return outcome

    assert "Traceback" in outcome_of(lambda layers: 1 / 0)
    assert "files outside OUT" in outcome_of(lambda layers: Path("elsewhere").touch())
    monkeypatch.setattr(fuzz, "PATIENCE", 1)
    assert "hangs" in outcome_of(forever)
    assert fuzz.outcome(2, "fl-train: error: a: 1\nand more\n", set()).startswith("BUG")
    assert fuzz.outcome(2, "fl-train: error: a: 1\n", {"OUT"}).startswith("BUG")
    assert fuzz.outcome(1, "fl-train: error: no disk\n", set()).startswith("BUG")
    assert fuzz.outcome(2, "fl-train: error: a: 1\n", {"edits.yaml"}) == "refused"
