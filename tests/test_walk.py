"""The way of a method's argument from a config file to the gradient: few files, and one object of the method."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from fl_lightning.cli import main
from fl_lightning.configuration.components import Component
from fl_lightning.methods.ditto import Ditto

ROOT = Path(__file__).resolve().parents[1]
LAM = 0.1234567
MOST = 12
"""Files of ours that the value may pass."""
LOOKS = 20
"""Calls of a function that are looked into."""
CONFIG = f"""
base: kapc_digits
method: ditto
method.lam: {LAM}
federation: {{rounds: 1, clients: 3, local_epochs: 1}}
data: {{fraction: 0.1, min_samples: 2}}
callbacks: {{progress: null, heatmaps: null}}
fabric: {{accelerator: cpu, devices: 1}}
"""


def holds(value: Any, depth: int = 2) -> bool:
    """Whether a local variable is the argument: itself, as text, the proximal coefficient lam/2 or its gradient's, or a
    mapping, list or component with it."""
    if isinstance(value, float | str):
        return value in (LAM, LAM / 2, str(LAM))
    if isinstance(value, Component):
        return holds(value.init_args)
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return depth > 0 and len(inside) < 50 and any(holds(part, depth - 1) for part in inside)


def passed(config: Path) -> set[str]:
    """The files of ours with a function that has held the argument while `fl-train fit` ran, and the method's own."""
    files, names = {"fl_lightning/methods/ditto.py"}, {}
    looks: Counter[CodeType] = Counter()

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "return" or looks[code] == LOOKS:
            return
        looks[code] += 1
        if code.co_filename not in names:
            path = Path(code.co_filename)
            ours = path.is_relative_to(ROOT) and ".venv" not in path.parts and path != Path(__file__)
            names[code.co_filename] = path.relative_to(ROOT).as_posix() if ours else ""
        name = names[code.co_filename]
        if name and name not in files and any(map(holds, list(frame.f_locals.values()))):
            files.add(name)

    sys.setprofile(look)
    try:
        assert main(["fit", "--config", str(config), "--loggers", "null"]) == 0
    finally:
        sys.setprofile(None)
    return files


def test_an_argument_passes_few_files_and_its_method_is_built_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(CONFIG)
    built: list[float] = []
    check = Ditto.__post_init__
    monkeypatch.setattr(Ditto, "__post_init__", lambda self: (built.append(self.lam), check(self)))
    files = passed(tmp_path / "own.yaml")
    assert {"fl_lightning/cli/settings.py", "fl_lightning/training/module.py"} <= files  # it was followed to the end
    assert len(files) <= MOST, sorted(files)
    assert built == [LAM]
