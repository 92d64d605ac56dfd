"""Pictures are drawn by a process beside this one: what comes back, what goes wrong, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from fl_lightning.callbacks.pictures import Pictures, patience
from fl_lightning.drawing import process
from fl_lightning.drawing.process import draw
from fl_lightning.drawing.relation import draw_split
from fl_lightning.record import Picture

COUNTS = np.array([[4, 0], [0, 4]])
BEGIN = """
import numpy, sys
from fl_lightning.drawing import process
from fl_lightning.drawing.relation import draw_split
picture = process.draw(draw_split, numpy.eye(2), files={"split": None})["split"]
assert picture.array() is not None
print(process._this._process.pid, flush=True)
"""


def test_it_is_drawn_elsewhere_and_without_torch(tmp_path: Path) -> None:
    files = {"split": tmp_path / "figures" / "a.png"}
    np.testing.assert_array_equal(draw(draw_split, COUNTS, files=files)["split"], draw_split(COUNTS)["split"])
    assert files["split"].exists()
    loaded = draw(cast(Any, eval), "{'x': [m for m in __import__('sys').modules if m == 'torch']}", files={"x": None})
    assert loaded["x"].array() == []
    elsewhere = draw(cast(Any, eval), "{'x': __import__('os').getpid()}", files={"x": None})["x"].array()
    assert elsewhere != os.getpid()


def test_paths_are_those_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It outlives a run, and where it was started is not where the next run is."""
    draw(draw_split, COUNTS, files={"split": None})["split"].array()
    monkeypatch.chdir(tmp_path)
    draw(draw_split, COUNTS, files={"split": Path("runs/a.png")})["split"].array()
    assert (tmp_path / "runs" / "a.png").exists()


def test_what_cannot_be_drawn_is_said_once_and_the_next_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    observer = Pictures()
    made = observer.have_drawn("data", draw_split, "no counts", files={"split": None, "other": None})
    observer.on_close(cast(Any, SimpleNamespace()))
    (line,) = capsys.readouterr().err.splitlines()
    assert "pictures: some are not drawn: ValueError" in line or "AttributeError" in line
    assert made["data/split"].array() is None
    with pytest.raises(LookupError, match="no picture split"):
        np.asarray(made["data/split"])
    assert draw(draw_split, COUNTS, files={"split": None})["split"].array() is not None


def test_a_process_that_is_killed_is_named_and_started_anew() -> None:
    first = draw(cast(Any, eval), "{'x': __import__('os').getpid()}", files={"x": None})["x"].array()
    lost = draw(cast(Any, os.kill), int(cast(Any, first)), signal.SIGKILL, files={"x": None})["x"]
    assert lost.array() is None
    assert lost.failure == "the process that draws has ended (EOFError, exit code -9)"
    second = draw(cast(Any, eval), "{'x': __import__('os').getpid()}", files={"x": None})["x"].array()
    assert second not in (None, first)


def test_nobody_waits_for_ever() -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert patience() == 5  # the end of a run that is broken off
    assert patience() > 60
    endless = draw(cast(Any, time.sleep), 1.0, files={"x": None})["x"]
    assert endless.array(seconds=0.01) is None
    assert endless.failure == "they take too long"
    assert not endless.ready
    endless.wait(60)


@pytest.mark.parametrize("end", ["", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
def test_it_ends_with_the_process_that_began_it(end: str) -> None:
    done = subprocess.run([sys.executable, "-c", BEGIN + end], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == (-signal.SIGKILL if end else 0), done.stderr
    assert done.stderr == ""
    deadline = time.monotonic() + 20
    while Path(f"/proc/{done.stdout.strip()}/cmdline").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not (cmdline := Path(f"/proc/{done.stdout.strip()}/cmdline")).exists() or not cmdline.read_bytes()


def test_a_forked_process_has_one_of_its_own() -> None:
    draw(draw_split, COUNTS, files={"split": None})["split"].array()
    mine = process._this
    process._forget()
    try:
        assert isinstance(draw(draw_split, COUNTS, files={"split": None})["split"], Picture)
        assert process._this is not mine
    finally:
        assert process._this is not None
        process._this.close()
        process._this = mine
