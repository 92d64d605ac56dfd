"""What a run imports before its first round: nothing that it does not use there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fl_lightning import later
from fl_lightning.data import digits

NOT_NEEDED = (
    *("pandas", "plotly", "jinja2", "wandb", "tensorboard", "optuna", "dp_accounting"),
    *("scipy", "sklearn", "torchvision", "torchmetrics.functional", "torchmetrics.classification"),
)
FIRST = """
import json, sys
from fl_lightning.callbacks.base import Observer

class First(Observer):
    def on_round_start(self, run, round, cohort):
        print(json.dumps(sorted(sys.modules)))
        raise KeyboardInterrupt
"""
FIT = """
import sys
from fl_lightning.cli import main
assert main(sys.argv[1:]) == 130
import torchmetrics
from torchmetrics.functional.classification import multiclass_f1_score
from lightning.pytorch.core.module import Metric
assert issubclass(torchmetrics.MeanMetric, Metric) and torchmetrics.MeanMetric()(3.0) == 3
assert torchmetrics.__version__ and type(torchmetrics).__name__ == "module"
"""


@pytest.mark.slow
def test_until_its_first_round_a_fit_on_digits_imports_only_what_it_uses(tmp_path: Path) -> None:
    """And what Lightning has put off is there when it is asked for."""
    (tmp_path / "first.py").write_text(FIRST)
    callbacks = json.dumps({"first": {"class_path": "first.First"}})
    flags = "--config kapc_digits --loggers null --fabric.accelerator cpu --callbacks"
    line = [sys.executable, "-c", FIT, "fit", *flags.split(), callbacks]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    assert "lightning.fabric" in loaded
    assert [name for name in loaded if name in NOT_NEEDED or name.startswith(tuple(f"{n}." for n in NOT_NEEDED))] == []


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package whose parts import each other, as torchmetrics' do; `whole` is there when all of it was carried out."""
    root = tmp_path / "puttoff"
    (root / "utilities").mkdir(parents=True)
    (root / "__init__.py").write_text("from puttoff.about import *\nfrom puttoff.metric import Metric\nwhole = True\n")
    (root / "about.py").write_text("__version__ = '1'\n__all__ = ['__version__']\n")
    (root / "utilities" / "__init__.py").write_text("from puttoff.metric import Metric\n")
    (root / "utilities" / "data.py").write_text("from puttoff import _logger\n")
    (root / "metric.py").write_text("import puttoff.utilities.data\nclass Metric: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(later, "NAME", "puttoff")
    monkeypatch.setattr(later, "PARTS", {"Metric": ("utilities", "metric"), "__version__": ("about",)})
    return "puttoff"


def test_a_package_that_is_put_off_gives_its_parts_and_then_all_of_it(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(sys.modules)
    try:
        later.put_off()
        module = sys.modules[package]
        assert "whole" not in vars(module)
        from puttoff import Metric  # type: ignore[import-not-found]

        assert module.__version__ == "1"
        assert "whole" not in vars(module) and not hasattr(module, "__wrapped__")
        later.put_off()  # it is there
        assert sys.modules[package] is module
        assert module.whole and type(module) is ModuleType
        assert module.Metric is Metric and module.__version__ == "1"
        with pytest.raises(AttributeError):
            _ = module.nothing
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]


def test_a_package_that_is_not_there_is_left_to_who_imports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "NAME", "nowhere_at_all")
    later.put_off()
    assert "nowhere_at_all" not in sys.modules


def test_digits_are_those_of_scikit_learn_wherever_it_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    table = digits._table()
    monkeypatch.setattr(digits, "FILE", "elsewhere.csv.gz")
    assert np.array_equal(table, digits._table())
