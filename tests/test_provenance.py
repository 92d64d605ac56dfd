"""A run folder says where the run comes from."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import yaml

import fl_lightning
from fl_lightning import provenance
from fl_lightning.cli import main

OWN = '''
from torch import nn


class Net(nn.Sequential):
    """My own."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
'''


def git(folder: Path, *words: str) -> str:
    line = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@x", *words]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()


def test_every_start_is_kept_with_code_command_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fl_own_provenance.py").write_text(OWN)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "fl_own_provenance.py")
    git(tmp_path, "commit", "-q", "-m", "mine")
    monkeypatch.setattr(sys, "argv", ["/bin/fl-train", "fit", "--name", "a b"])
    flags = "--model fl_own_provenance.Net --callbacks.checkpoint.every 1 --federation.rounds 1"
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "a"
    words = "--config kapc_digits --loggers null --callbacks null --fabric.accelerator cpu --data.fraction 0.4"
    words += f" --federation.clients 4 --federation.local_epochs 1 --name a {flags}"
    assert main(["fit", *words.split()]) == 0
    (start,) = json.loads((folder / "provenance.json").read_text())
    assert start["command"] == "fl-train fit --name 'a b'"
    assert start["git"] == {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    assert start["versions"]["fl_lightning"] == fl_lightning.__version__
    assert start["machine"]["cores"] >= 1
    assert "torch==" in (folder / "environment.txt").read_text()
    assert [path.name for path in (folder / "source").iterdir()] == ["fl_own_provenance.py"]
    assert (folder / "lock").read_text().split(", ended ")[1][:4].isdecimal()

    (tmp_path / "fl_own_provenance.py").write_text(OWN + "\n# changed\n")
    provenance._git.cache_clear()
    lock = (folder / "lock").read_bytes()
    assert main(["fit", "--name", "a", "--resume", "--federation.rounds", "2", "--seed", "1"]) == 2
    assert len(json.loads((folder / "provenance.json").read_text())) == 1  # a start that was refused is none
    assert (folder / "lock").read_bytes() == lock
    assert main(["fit", "--name", "a", "--resume", "--federation.rounds", "2"]) == 0
    starts = json.loads((folder / "provenance.json").read_text())
    assert [start["git"]["dirty"] for start in starts] == [False, True]
    assert "# changed" in (folder / "source" / "fl_own_provenance.py").read_text()


def test_where_there_is_no_repository_none_is_claimed(tmp_path: Path) -> None:
    assert provenance._git(str(tmp_path)) is None


def test_what_all_runs_of_a_process_share_is_read_once(
    fit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of a study's short runs takes as long beside its rounds as in them."""
    fit("a", "--federation.rounds 1")

    def again(*args: object, **flags: object) -> NoReturn:
        raise AssertionError("it was read anew")

    monkeypatch.setattr("sklearn.datasets.load_digits", again)
    monkeypatch.setattr(provenance, "distributions", again)
    monkeypatch.setattr(provenance.subprocess, "run", again)
    monkeypatch.setattr("lightning.fabric.utilities.registry.entry_points", again)
    if yaml.__with_libyaml__:
        monkeypatch.setattr("yaml.emitter.Emitter.emit", again)  # Python's own
    folder = fit("b", "--federation.rounds 1")
    assert (folder / "environment.txt").read_text() and (folder / "summary.json").is_file()
