"""What a run imports before its first round: nothing that it does not use there."""

import json
import subprocess
import sys

import numpy as np
import pytest

from fl_lightning.data import digits

NOT_NEEDED = (
    *("pandas", "wandb", "tensorboard", "optuna", "dp_accounting"),
    "sklearn",
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
"""


@pytest.mark.slow
def test_until_its_first_round_a_fit_on_digits_imports_only_what_it_uses(tmp_path):
    (tmp_path / "first.py").write_text(FIRST)
    callbacks = json.dumps({"first": {"class_path": "first.First"}})
    flags = "--config kapc_exact_digits --loggers null --fabric.accelerator cpu --callbacks"
    line = [sys.executable, "-c", FIT, "fit", *flags.split(), callbacks]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    assert "lightning.fabric" in loaded
    assert [
        name
        for name in loaded
        if name in NOT_NEEDED or name.startswith(tuple(f"{n}." for n in NOT_NEEDED))
    ] == []


def test_digits_are_those_of_scikit_learn_wherever_it_keeps_them(
    monkeypatch,
):
    table = digits._table.__wrapped__()
    monkeypatch.setattr(digits, "FILE", "elsewhere.csv.gz")
    assert np.array_equal(table, digits._table.__wrapped__())
