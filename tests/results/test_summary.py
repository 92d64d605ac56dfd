"""What ends in `summary.json`: every part contributes, and no two the same key."""

import json

import pytest

from fl_lightning import RunFailed, fit
from fl_lightning.callbacks import Observer
from fl_lightning.results.summary import Summary


class Counts(Observer):
    """Contributes `KEY`."""

    KEY = "own_count"

    def summarize(self, run):
        return {Counts.KEY: run.rounds}


def config(name):
    return {
        "config": "kapc_exact_digits",
        "name": name,
        "loggers": None,
        "fabric.accelerator": "cpu",
        "fabric.threads": 1,
        "callbacks": {"heatmaps": None, "progress": None, "own": {"class_path": Counts}},
        "data.fraction": 0.4,
        "model.hidden": [16],
        "federation": {"clients": 4, "local_epochs": 1, "rounds": 1},
    }


def test_an_observer_contributes_and_a_key_twice_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Counts, "__module__", "own_observer")
    monkeypatch.setitem(
        __import__("sys").modules, "own_observer", __import__("sys").modules[__name__]
    )
    run = fit(config("fine"))
    assert run.summary["own_count"] == 1 and run.summary == json.loads(
        (run.folder / "summary.json").read_text()
    )
    assert isinstance(run.summary, Summary) and (run.summary.rounds, run.summary.clients) == (1, 4)
    assert (
        run.summary.upload_bytes == run.rounds["upload_bytes"].sum()
        and run.summary.wall_seconds > 0
    )
    monkeypatch.setattr(Counts, "KEY", "version")
    with pytest.raises(
        RunFailed, match=r"^summary\.json: .* and .* both contribute 'version'; rename one of them$"
    ):
        fit(config("twice"))
    assert not (tmp_path / "runs" / "twice" / "summary.json").exists()
