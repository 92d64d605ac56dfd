"""Where a run comes from, kept in its folder: each start with its command, code, machine and versions; own sources."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from fl_lightning.config import Config
from fl_lightning.errors import redact
from fl_lightning.files import atomic_write

_TOLD = ("fl_lightning", "torch", "lightning", "torchmetrics", "numpy")


def keep(folder: Path, config: Config) -> None:
    """Add this start to `provenance.json`, list what is installed, and copy the source of classes that are not ours."""
    file = folder / "provenance.json"
    try:
        starts = json.loads(file.read_text())
    except (OSError, ValueError):
        starts = []
    installed = _installed()
    start = {
        "started": now(),
        "command": redact(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        "directory": os.getcwd(),
        "git": _git(os.getcwd()),
        "machine": _machine(),
        "versions": {"python": platform.python_version()} | {k: installed[k] for k in _TOLD if k in installed},
    }
    _write(file, json.dumps([*(starts if isinstance(starts, list) else []), start], indent=1) + "\n")
    _write(folder / "environment.txt", "".join(f"{name}=={version}\n" for name, version in installed.items()))
    for source in own_sources(config):
        (folder / "source").mkdir(exist_ok=True)
        shutil.copyfile(source, folder / "source" / source.name)


def look() -> None:
    """Look up what all runs that this process, and those forked from it, will start have in common."""
    _installed(), _git(os.getcwd()), _machine()


def now() -> str:
    """The date and time here, to the second."""
    return datetime.now(UTC).astimezone().isoformat(timespec="seconds")


def own_sources(config: Config) -> list[Path]:
    """The files of all classes and functions that the configuration names, but for ours and those of packages."""
    components = [config.method, *(m.component for m in config.models)]
    components += [*config.callbacks.values(), *config.loggers.values()]
    paths = [component.class_path for component in components] + [config.data.partition]
    names = {path.rpartition(".")[0] for path in paths if not path.startswith("fl_lightning.")}
    modules = (sys.modules.get(name) for name in names)
    files = {Path(module.__file__) for module in modules if module is not None and module.__file__}
    known = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
    return sorted(file for file in files if not any(file.resolve().is_relative_to(folder) for folder in known))


def _write(path: Path, text: str) -> None:
    with atomic_write(path, durable=False) as aside:
        aside.write_text(text, encoding="utf-8")


@cache
def _installed() -> dict[str, str]:
    """Every installed distribution and its version, by name."""
    return dict(
        sorted({d.name: d.version for d in distributions() if d.name}.items(), key=lambda pair: pair[0].lower())
    )


@cache
def _git(folder: str) -> dict[str, Any] | None:
    """The commit of the repository that `folder` lies in, and whether files that it follows have changed since."""

    def said(*words: str) -> str:
        line = ["git", "-C", folder, *words]
        return subprocess.run(line, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": said("rev-parse", "HEAD"), "dirty": bool(said("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


@cache
def _machine() -> dict[str, Any]:
    models = (line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name"))
    cards = (_lines(file) for file in Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": next(models, platform.processor()),
        "cores": os.cpu_count(),
        "gpus": [line.partition(":")[2].strip() for held in cards for line in held if line.startswith("Model:")],
    }


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
