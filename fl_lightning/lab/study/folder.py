"""A study's folder: what it was asked for, its table of cells, and who is at work in it.

`study.yaml` and `study.json` are written before the first run begins; every run has an ordinary run
folder. The state of a run is read from its folder, so that nothing is lost with the process that
runs the study.
"""

from __future__ import annotations

import contextlib
import errno
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

from fl_lightning.configuration.config import Config, check, flat
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.files import Taken, aside_of, make_folder, take_lock, write_whole
from fl_lightning.lab.study.grid import Entry, Run, Study
from fl_lightning.results.result import RunResult
from fl_lightning.results.runs import damage, load

VERSION = 1
PLACE = ("data.root", "data.public_root", "data.download", "data.resident", "fabric.timeout")
"""Keys of the base that may change later: where a study runs, not what it computes."""


class Busy(BadInput):
    """Another process is at work in the folder."""


class StudyFolder:
    """The folder `path` of one study."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._study, self._cells = path / "study.yaml", path / "study.json"
        self._failures = path / "failures.json"

    def __bool__(self) -> bool:
        """Whether there is a study."""
        return self._cells.is_file()

    def begun(self) -> bool:
        """Whether a run of the study is there, begun or finished."""
        return any((self.path / "runs").glob("**/config.yaml"))

    def finished(self, folder: str) -> bool:
        """Whether the run in `folder` (relative) has ended well."""
        return (self.path / folder / "summary.json").is_file()

    def results(self, regression: bool = True) -> dict[str, RunResult]:
        """Its runs that have ended and can be read, by folder; `BadInput` as
        `results.runs.load`."""
        return {
            n: run
            for n, run in self.ended(regression).items()
            if run.finished and damage(run) is None
        }

    def ended(self, regression: bool = True) -> dict[str, RunResult]:
        """Its runs with a `summary.json`, damaged ones included, by folder; `BadInput` as
        `results.runs.load`."""
        names = [
            name
            for name in dict.fromkeys(cell["folder"] for cell in self.cells())
            if self.finished(name)
        ]
        return dict(zip(names, load([self.path / name for name in names], regression), strict=True))

    def cells(self) -> list[dict[str, Any]]:
        """The table of `study.json`; `BadInput` if it cannot be read."""
        try:
            content = json.loads(self._cells.read_text(encoding="utf-8"))
            version = content["version"]
            check(
                "study",
                str(self.path),
                version == VERSION,
                f"its study.json is of version {version}, not {VERSION}",
            )
            listed = list(content["cells"])
            kinds = {"folder": str, "label": str, "method": str, "seed": int, "setting": dict}
            if not all(
                isinstance(cell[key], kind) for cell in listed for key, kind in kinds.items()
            ):
                raise TypeError("a cell has no folder, label, method, seed or setting")
            return listed
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise BadInput(
                "study", str(self.path), f"its study.json cannot be read ({error})"
            ) from None

    def definition(self) -> dict[str, Any]:
        """What `study.yaml` holds; `BadInput` if it cannot be read."""
        try:
            content = yaml.safe_load(self._study.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise BadInput(
                "study", str(self.path), f"its study.yaml cannot be read ({error})"
            ) from None
        check("study", str(self.path), isinstance(content, dict), "its study.yaml cannot be read")
        return content

    def is_regression(self) -> bool:
        """Whether its base says so."""
        with contextlib.suppress(BadInput):
            return dict(flat(self.definition().get("base"))).get("data.task") == "regression"
        return False

    def failures(self) -> dict[str, str]:
        """Run folders that failed when they were last run, and why."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return dict(json.loads(self._failures.read_text(encoding="utf-8")))
        return {}

    def write_failures(self, failures: Mapping[str, str]) -> None:
        """Keep which runs have failed."""
        write_whole(self._failures, json.dumps(failures, indent=2) + "\n")

    def write(self, study: Study, base: str, runs: list[Run]) -> None:
        """Write `study.yaml`, with the YAML of the resolved `base`, and the table of cells."""
        rest = {"methods": study.methods, "seeds": study.seeds, "forced": study.forced}
        rest |= {"grid": study.grid} if study.grid else {}
        rest |= {"paper": study.paper} if study.paper else {}
        write_whole(self._study, as_yaml(base, rest))
        lines = ",\n  ".join(json.dumps(cell) for run in runs for cell in run.cells())
        write_whole(self._cells, f'{{"version": {VERSION}, "cells": [\n  {lines}\n]}}\n')

    def check(self, study: Study, base: Mapping[str, Any], runs: list[Run]) -> None:
        """Raise `BadInput` unless the study may be run here: in a new folder, or as one that has
        grown."""
        out, is_folder = str(self.path), self.path.is_dir()
        check("out", out, is_folder or not self.path.exists(), "it is no folder")
        if not self:
            ours = {
                "lock",
                *(p.name for file in (self._study, self._cells) for p in (file, aside_of(file))),
            }
            strange = {path.name for path in self.path.iterdir()} - ours if is_folder else set()
            check(
                "out", out, not strange, "it is a folder of something else: it holds no study.json"
            )
            return
        before = self.definition()
        old, new = dict(flat(before.get("base"))), dict(flat(base))
        for key in dict.fromkeys([*old, *new]):
            same = old.get(key, default(key)) == new.get(key) or key in PLACE
            allowed = (
                f"the study in {self.path} has {old.get(key)!r}: for another base give another "
                f"--out"
            )
            check(f"base.{key}", new.get(key), same, allowed)
        begun = {
            cell["label"]
            for cell in self.cells()
            if (self.path / cell["folder"] / "config.yaml").is_file()
        }
        _check_labels(
            [entry for entry in Study.of(before).entries() if entry.label in begun], study.entries()
        )
        stays = {(cell["folder"], cell["label"]) for run in runs for cell in run.cells()}
        for cell in self.cells():
            fine = (cell["folder"], cell["label"]) in stays or not self.finished(cell["folder"])
            allowed = "the study has trained this run; to leave it out, delete its folder first"
            check("study", f"without {self.path / cell['folder']}", fine, allowed)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other studies out of the folder, which is made. `Busy` if one is in it, `BadInput`
        if it refuses."""
        lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        try:
            make_folder(self.path)
            lock = take_lock(self.path / "lock")
        except Taken as error:
            allowed = f"a study is going on in it ({error}); wait for it, or end it"
            raise Busy("out", str(self.path), allowed) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise BadInput(
                    "out", str(self.path), f"it cannot be written ({error.strerror})"
                ) from None
            print(
                f"{self.path}: no locks here ({error.strerror}); start no second study in it",
                file=sys.stderr,
            )
        with lock:
            yield


def is_search(folder: Path) -> bool:
    """Whether it is one of `fl-train tune`, whose study is in `study/`."""
    return (folder / "tune.yaml").is_file()


def search_of(study: Path) -> Path | None:
    """The search whose choices the study in this folder has (`OUT` of `OUT/study`); None: it is of
    none."""
    whole = study.resolve()
    return whole.parent if whole.name == "study" and is_search(whole.parent) else None


def as_yaml(base: str, rest: Mapping[str, Any]) -> str:
    """A study file: its resolved `base`, as YAML, and the `rest` of its keys."""
    return f"base:\n{indent(base, '  ')}{yaml.safe_dump(rest, sort_keys=False, allow_unicode=True)}"


def _check_labels(before: list[Entry], now: list[Entry]) -> None:
    """A label of which a run has begun means what it meant: its runs are in folders of that
    name."""
    known = {entry.label: _meaning(entry) for entry in before}
    for entry in now:
        means = _meaning(entry)
        meant = known.get(entry.label, means)
        check(
            entry.key,
            means,
            means == meant,
            f"in this study {entry.label!r} is {meant}: give it another `label`",
        )


def _meaning(entry: Entry) -> dict[str, Any]:
    when = {"when": dict(entry.when)} if entry.when else {}
    return {"name": entry.name, **entry.arguments, **entry.settings, **when}


def default(key: str) -> Any:
    """What a run has that does not say: a study of an earlier version lacks the keys that have come
    since."""
    group, _, name = key.partition(".")
    made = (
        Config.__dataclass_fields__[group].default_factory
        if group in Config.__dataclass_fields__
        else MISSING
    )
    value = None if made is MISSING else getattr(made(), name, None)
    return list(value) if isinstance(value, tuple) else value
