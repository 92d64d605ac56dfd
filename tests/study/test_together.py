"""`fl-train study --together`: run folders as of runs alone, and what a study remembers of how its clients train."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.cli import main, together
from fl_lightning.cli.study import resolve
from fl_lightning.study.folder import StudyFolder
from fl_lightning.study.grid import Study

sys.path += [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "faults")]
from test_study import TINY, results

MORE = {**TINY, "methods": ["kapc", {"name": "fedprox", "mu": 0.5}, "fedproto"], "seeds": [0, 1]}


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a study, MORE with changes, in the folder `out`; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(words: str, out: str = "s", **changes: Any) -> tuple[int, str, str]:
        (tmp_path / "study.yaml").write_text(yaml.safe_dump(MORE | changes))
        capfd.readouterr()
        return main(["study", "study.yaml", "--out", out, *words.split()]), *capfd.readouterr()

    return run


def executors(study: Path) -> set[str]:
    files = study.glob("runs/**/config.yaml")
    return {yaml.safe_load(file.read_text())["fabric"]["executor"] for file in files}


def test_no_number_depends_on_how_many_train_together(ask: Callable[..., Any], tmp_path: Path) -> None:
    """Alone through stacked passes, three at a time in one process, and all in two processes."""
    code, _, err = ask("--workers 1 --together 1 --fabric.executor vmap", "alone")
    assert code == 0, err
    code, _, err = ask("--workers 1 --together 3", "three")
    assert code == 0, err
    assert "[6/6]" in err
    code, _, err = ask("--workers 2 --together 50", "all")
    assert code == 0, err
    alone = results(tmp_path / "alone")
    assert len(alone) == 6
    assert alone == results(tmp_path / "three") == results(tmp_path / "all")
    assert executors(tmp_path / "three") == {"vmap"}
    [(kind, name)] = json.loads((tmp_path / "three" / "executors.json").read_text()).items()
    assert (kind, name) == ("mlp {'hidden': [16]}, digits in batches of 16, sgd", "vmap")
    log = (tmp_path / "three" / "runs" / "fedproto" / "seed-0" / "log.txt").read_text()
    assert "mlp trains in the loop" in log
    assert "kapc" not in log


def test_a_run_that_diverges_ends_alone(ask: Callable[..., Any], tmp_path: Path) -> None:
    """The others end with the numbers that they have without it."""
    bad = {"name": "fedprox", "label": "bad", "mu": 0.5, "optimizer.lr": 1e30}
    assert ask("--workers 1 --together 6", "want")[0] == 0
    code, _, err = ask("--workers 1 --together 8", methods=[*MORE["methods"], bad])
    assert code == 1
    failed = [line for line in err.splitlines() if " failed: " in line]
    assert sorted(line.split(" failed: ")[0] for line in failed) == ["bad, seed 0", "bad, seed 1"]
    assert all("not finite" in line for line in failed)
    shutil.rmtree(tmp_path / "s" / "runs" / "bad")
    assert results(tmp_path / "s") == results(tmp_path / "want")


@pytest.mark.parametrize("value", ["0", "-3", "many", "1.5"])
def test_numbers_that_are_none(ask: Callable[..., Any], tmp_path: Path, value: str) -> None:
    code, _, err = ask(f"--together {value}")
    assert code == 2
    assert err.count("\n") == 1
    assert "together" in err
    assert "it must be a whole number from 1, or auto" in err
    assert not (tmp_path / "s").exists()
    code, _, err = ask("", together=-3)
    assert code == 2
    assert "together: -3" in err


def choose(tmp_path: Path, wanted: Any, **changes: Any) -> dict[str, str]:
    """What a study in the folder `s` is to keep."""
    _, runs, configs = resolve(Study.of(MORE | changes))
    _, known = together.with_executors(
        StudyFolder(tmp_path / "s"), list(zip(runs, configs, strict=True)), wanted, configs
    )
    return known


def test_auto_measures_once_and_goes_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    monkeypatch.setattr(together, "_measured", lambda config: measured.append(config) or "vmap")
    long = {"base": [*MORE["base"], {"federation.rounds": 200}]}
    assert list(choose(tmp_path, "auto").values()) == ["loop"]  # too short to be worth it
    assert not measured
    known = choose(tmp_path, "auto", **long)
    assert list(known.values()) == ["vmap"]
    assert len(measured) == 1  # one kind of run
    (tmp_path / "s").mkdir()
    together.keep(StudyFolder(tmp_path / "s"), known)
    assert choose(tmp_path, "auto", **long) == choose(tmp_path, 1, **long) == choose(tmp_path, 4, **long) == known
    assert len(measured) == 1


def test_a_study_that_was_begun_one_by_one_goes_on_so(ask: Callable[..., Any], tmp_path: Path) -> None:
    """Runs of one study round alike."""
    code, _, err = ask("--workers 1 --together 1", seeds=[0])
    assert code == 0, err
    code, _, err = ask("--workers 1 --together 4")
    assert code == 0, err
    assert executors(tmp_path / "s") == {"loop"}


def test_what_cannot_train_together_does_not(tmp_path: Path) -> None:
    """Runs of several processes, and those that train in the loop: each has a worker for itself."""
    for words, want in (({}, (1, 1)), ({"fabric.executor": "vmap"}, (8, 64)), ({"fabric.devices": 2}, (1, 1))):
        _, _, configs = resolve(Study.of({**MORE, "base": [*MORE["base"], words]}))
        assert (together.most_at_once(8, configs), together.most_at_once("auto", configs)) == want
    _, _, configs = resolve(
        Study.of({**MORE, "base": [*MORE["base"], {"fabric.executor": "vmap", "fabric.devices": 2}]})
    )
    assert together.most_at_once(8, configs) == 1


def test_what_is_measured_is_found_to_be_faster(tmp_path: Path) -> None:
    """Tiny models are; a wide one, and convolutions, on a CPU are not."""
    _, _, configs = resolve(Study.of(MORE))
    assert together._gain(configs[0]).startswith("vmap|mlp (a client: loop ")


@pytest.mark.slow
@pytest.mark.parametrize("model", [{"hidden": [200]}, {"name": "cnn"}])
def test_models_for_which_the_loop_is_faster_stay_with_it(tmp_path: Path, model: dict[str, Any]) -> None:
    changes = {"data.source": "mnist", "data.root": str(tmp_path), "model": model}
    _, _, configs = resolve(Study.of({**MORE, "base": [*MORE["base"], changes, {"federation.clients": 10}]}))
    assert together._gain(configs[0]).startswith("loop|")


@pytest.mark.slow
def test_a_killed_study_comes_to_the_same(ask: Callable[..., Any], tmp_path: Path) -> None:
    """kill -9 of the process that runs the workers, at 20 moments; the same command goes on."""
    long = {"base": [*MORE["base"], {"federation.rounds": 6, "callbacks.checkpoint.seconds": 0}]}
    code, _, err = ask("--workers 1 --together 6", "want", **long)
    assert code == 0, err
    words = ["study", "study.yaml", "--out", "s", "--workers", "1", "--together", "6"]
    for moment in range(20):
        child = os.fork()
        if not child:
            os.setsid()
            main(words)
            os._exit(0)
        time.sleep(1 + 0.2 * moment)
        os.kill(child, signal.SIGKILL)  # its workers end with it
        os.waitpid(child, 0)
    while ask("--workers 1 --together 6", **long)[0] == 2:  # the last one's workers are ending
        time.sleep(0.5)
    assert results(tmp_path / "s") == results(tmp_path / "want")
