"""Every config in configs/ is ready to run."""

import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from fl_lightning.cli import main

FOLDER = Path(__file__).resolve().parents[1] / "configs"
FILES = sorted(set(FOLDER.rglob("*.yaml")) - set((FOLDER / "studies").rglob("*.yaml")))


def _spoken(path):
    """What `--config` calls it: its name where it is listed, else its path."""
    return path.stem if path.parent == FOLDER else str(path)


@pytest.mark.sampled("ktpfl_digits")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_runs_without_data_and_without_a_network(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for proxy in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")  # where nothing listens
    start = time.monotonic()
    assert main(["fit", "--config", _spoken(path), "--smoke", "--fabric.accelerator", "cpu"]) == 0
    assert time.monotonic() - start < 60  # some 5 s on a quiet core
    name = path.stem
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == f"{name}-001"
    assert (folder / "metrics.csv").read_text().count("\n") == 2
    there = (
        "digits" in name
        or "glyphs" in name
        or ("watch" in name and find_spec("seglearn") is not None)
    )
    assert (
        f'"made_up_data": {"false" if there else "true"}' in (folder / "summary.json").read_text()
    )
    assert str(folder.relative_to(tmp_path)) in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
