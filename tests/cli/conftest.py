"""A make-believe engine, so that the command line is tested alone."""

import sys
from types import ModuleType

import pytest

from fl_lightning.configuration.config import Component


class Engine(ModuleType):
    """Stands for `fl_lightning.run`; keeps what it was called with."""

    def __init__(self):
        super().__init__("fl_lightning.run")
        self.calls = []
        self.action = lambda: None

    def fit(self, config, folder, resume=False, **more):
        self.calls.append((config, folder, resume))
        self.action()
        return {}

    def test(self, config, folder, which):
        self.calls.append((config, folder, which))
        return {"mean_accuracy": 0.75, "accuracies": [0.5, 1.0]}

    def export(
        self,
        config,
        folder,
        client,
        out,
        which,
        kind,
        *more,
    ):
        self.calls.append((config, folder, client, out, which, kind))
        return {
            "kind": "after",
            "round": 3,
            "component": Component("fl_lightning.models.mlp.MLP"),
            "arguments": {"input_shape": (1, 8, 8), "num_classes": 10},
        }


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """The engine, in an empty working directory, outside any launcher."""
    engine = Engine()
    monkeypatch.setitem(sys.modules, "fl_lightning.run", engine)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "SLURM_PROCID", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    return engine


@pytest.fixture
def refused(engine, refused):
    """As everywhere; and nothing of the engine is called."""

    def run(line):
        calls = len(engine.calls)
        answer = refused(line)
        assert len(engine.calls) == calls
        return answer

    return run
