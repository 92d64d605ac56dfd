"""Provenance of a run, stored in its folder: command, code, machine and versions of each start, and
own source code."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from fl_lightning.configuration.config import Config
from fl_lightning.configuration.names import SOURCES
from fl_lightning.foundation.errors import redact
from fl_lightning.foundation.files import write_whole
from fl_lightning.foundation.log import now, say
from fl_lightning.results import owncode

_PACKAGES = ("fl_lightning", "torch", "lightning", "torchmetrics", "numpy")


def record_start(
    folder: Path,
    code: Mapping[str, bytes],
    round: int,
    data: str | None = None,
    source: str | None = None,
) -> None:
    """Add a start to `provenance.json`, list the installed packages, and store own code.

    Args:
        folder: the run folder.
        code: text of each file of own code.
        round: first round that it trains.
        data: digest of the samples of this run's seed (`samples_digest`).
        source: digest of all samples of the source, the same for every seed (data/identity.py).
    """
    starts, installed = _starts(folder), _installed()
    start = {
        "started": now(),
        "command": redact(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        "directory": os.getcwd(),
        "git": _git(os.getcwd()),
        "machine": _machine(),
        "versions": {"python": platform.python_version()}
        | {k: installed[k] for k in _PACKAGES if k in installed},
        "first_round": round,
        "data": data,
        "source": source,
    }
    if names := owncode.store_version(folder, code, round):
        version = f"rounds from {round} on are of another version ({owncode.ROUNDS})"
        say(f"code: {', '.join(names)} changed: {version}")
    _write(folder, [*starts, start])
    listed = "".join(f"{name}=={version}\n" for name, version in installed.items())
    write_whole(folder / "environment.txt", listed, durable=False)


def data_digest(folder: Path) -> str | None:
    """Return the digest of the samples that the run in `folder` last trained on; None if it is not
    known."""
    return _last(folder, "data")


def source_digest(folder: Path) -> str | None:
    """Return the digest, the same for every seed, of the source that the run in `folder` last read;
    None if it is not known."""
    return _last(folder, "source")


def write_source_digest(folder: Path, digest: str | None) -> None:
    """Write a `provenance.json` that holds only a source's digest, for a run that was copied
    without its own."""
    _write(folder, [{"source": digest}])


def _last(folder: Path, key: str) -> str | None:
    last = next(reversed(_starts(folder)), None)
    digest = last.get(key) if isinstance(last, dict) else None
    return digest if isinstance(digest, str) else None


def _starts(folder: Path) -> list[dict[str, Any]]:
    try:
        starts = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return starts if isinstance(starts, list) else []


def record_end(folder: Path) -> None:
    """Record the time at which the last start has ended."""
    starts = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    starts[-1]["ended"] = now()
    _write(folder, starts)


def _write(folder: Path, starts: list[Any]) -> None:
    text = json.dumps(starts, indent=1) + "\n"
    write_whole(folder / "provenance.json", text, durable=False)


def collect_environment() -> None:
    """Collect packages, commit and machine, which all runs share; they are cached in this process
    and those forked from it."""
    _installed(), _git(os.getcwd()), _machine()


def run_name(config: Config, stem: str = "") -> str:
    """Return the default name of a run, METHOD-DATA-seedN.

    `stem`: name of the config. It replaces METHOD if it contains the method's name and the name of
    no other data set: `kapc_digits` gives `kapc_digits-seed0`, without DATA, which it contains.
    """
    method = config.method.class_path.rpartition(".")[2].lower()
    data = data_name(config)
    other_data = _words(" ".join(SOURCES)) - _words(data)
    first = method
    if _words(method) <= _words(stem) and not other_data & _words(stem):
        first = stem
    names = [first] if _words(data) <= _words(first) else [first, data]
    return "-".join([*names, f"seed{config.seed}"])


def data_name(config: Config) -> str:
    """Return the name of the data: that of the user's file or folder, or else of the source."""
    root, source = Path(config.data.root or ""), config.data.source
    has_name = root.name and (source in ("arrays", "images", "table") or root.suffix)
    return root.stem if has_name else source


def run_title(config: Config, name: str) -> str:
    """Return the run's title in viewers (TensorBoard, W&B): `METHOD-DATA-seedN (name)`, or only the
    folder's `name` if it contains method, data and seed already."""
    if _words(run_name(config, name)) <= _words(name):
        return name
    return f"{run_name(config)} ({name})"


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))


@cache
def _installed() -> dict[str, str]:
    """Return the version of every installed distribution, by name."""
    versions = {d.name: d.version for d in distributions() if d.name}
    return {name: versions[name] for name in sorted(versions, key=str.lower)}


@cache
def _git(folder: str) -> dict[str, Any] | None:
    """Return the commit of the repository that contains `folder`, and whether tracked files have
    changed since; None without one."""

    def output(*words: str) -> str:
        line = ["git", "-C", folder, *words]
        text = subprocess.check_output(
            line, stderr=subprocess.DEVNULL, text=True, errors="replace", timeout=10
        )
        return text.strip()

    try:
        changes = output("status", "--porcelain", "-uno")
        return {
            "commit": output("rev-parse", "HEAD"),
            "dirty": bool(changes),
        }
    except (OSError, subprocess.SubprocessError):
        return None


@cache
def _machine() -> dict[str, Any]:
    cards = Path("/proc/driver/nvidia/gpus").glob("*/information")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "gpus": [model for card in cards for model in _fields(card, "Model")],
    }


def processor() -> str:
    """Return the name of this machine's processor."""
    names = _fields(Path("/proc/cpuinfo"), "model name")
    return names[0] if names else platform.processor()


def _fields(file: Path, name: str) -> list[str]:
    """Return the values of a field in a file of lines `NAME: VALUE`; empty if the file cannot be
    read."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    of_name = [line for line in lines if line.startswith(name)]
    return [line.partition(":")[2].strip() for line in of_name]
