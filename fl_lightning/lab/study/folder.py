"""A study's folder: what it was asked for, its table of cells, and who is at work in it.

`study.yaml` and `study.json` are written before the first run begins; every run has an ordinary run
folder. The state of a run is read from its folder, so that nothing is lost with the process that
runs the study.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

from fl_lightning.configuration.config import Config, check, flat
from fl_lightning.configuration.files import drop_removed_keys
from fl_lightning.foundation.errors import BadInput, redact
from fl_lightning.foundation.files import (
    Taken,
    aside_of,
    make_folder,
    take_lock,
    write_whole,
)
from fl_lightning.lab.study.grid import ListedMethod, Study, StudyRun
from fl_lightning.results.folder import UNREADABLE
from fl_lightning.results.result import RunResult
from fl_lightning.results.runs import damage, load

VERSION = 1
PLACE = (
    "data.root",
    "data.public_root",
    "data.download",
    "data.resident",
    "fabric.timeout",
)
"""Keys of the base that may change later: where a study runs, not what it computes."""


DAMAGE = (
    *UNREADABLE,
    AttributeError,
    AssertionError,
    csv.Error,
    yaml.YAMLError,
)
"""Errors of readers that meet a file that they have not written."""


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
            name: run
            for name, run in self.ended(regression).items()
            if run.finished and damage(run) is None
        }

    def ended(self, regression: bool = True) -> dict[str, RunResult]:
        """Its runs with a `summary.json`, damaged ones included, by folder; `BadInput` as
        `results.runs.load`."""
        names = list(filter(self.finished, self.run_names()))
        paths = [self.path / name for name in names]
        return dict(zip(names, load(paths, regression), strict=True))

    def run_names(self) -> list[str]:
        """The folders of its runs, relative to its own, each once."""
        return list(dict.fromkeys(cell["folder"] for cell in self.cells()))

    def cells(self) -> list[dict[str, Any]]:
        """The table of `study.json`; `BadInput` if it cannot be read."""
        out = str(self.path)
        with reading("study", out, "its study.json cannot be read"):
            content = json.loads(self._cells.read_text(encoding="utf-8"))
            version = content["version"]
            requirement = f"its study.json is of version {version}, not {VERSION}"
            check("study", out, version == VERSION, requirement)
            cells = list(content["cells"])
            kinds = {
                "folder": str,
                "label": str,
                "method": str,
                "seed": int,
                "setting": dict,
            }
            for cell in cells:
                for key, kind in kinds.items():
                    if not isinstance(cell[key], kind):
                        raise TypeError(f"a cell's {key} is no {kind.__name__}")
        return cells

    def definition(self) -> dict[str, Any]:
        """What `study.yaml` holds; `BadInput` if it cannot be read."""
        with reading(
            "study",
            str(self.path),
            "its study.yaml cannot be read",
        ):
            content = yaml.safe_load(self._study.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise TypeError("it is no mapping")
        drop_removed_keys(content.get("base"))
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

    def write(
        self,
        study: Study,
        base: str,
        runs: list[StudyRun],
    ) -> None:
        """Write `study.yaml`, with the YAML of the resolved `base`, and the table of cells."""
        rest = {
            "methods": study.methods,
            "seeds": study.seeds,
            "forced": study.forced,
        }
        rest |= {"grid": study.grid} if study.grid else {}
        rest |= {"paper": study.paper} if study.paper else {}
        write_whole(self._study, as_yaml(base, rest))
        lines = ",\n  ".join(json.dumps(cell) for run in runs for cell in run.cells())
        write_whole(self._cells, f'{{"version": {VERSION}, "cells": [\n  {lines}\n]}}\n')

    def check(
        self,
        study: Study,
        base: Mapping[str, Any],
        runs: list[StudyRun],
    ) -> None:
        """Raise `BadInput` unless the study may be run here: in a new folder, or as one that has
        grown."""
        if not self:
            files = (self._study, self._cells)
            names = {
                "lock",
                *(f.name for f in files),
                *(aside_of(f).name for f in files),
            }
            check_new(self.path, names, "study.json")
            return
        before = self.definition()
        old, new = dict(flat(before.get("base"))), dict(flat(base))
        for key in dict.fromkeys([*old, *new]):
            is_same = old.get(key, default(key)) == new.get(key)
            has = f"the study in {self.path} has {old.get(key)!r}"
            requirement = f"{has}: for another base give another --out"
            check(
                f"base.{key}",
                new.get(key),
                is_same or key in PLACE,
                requirement,
            )
        cells = self.cells()
        begun = set()
        for cell in cells:
            if (self.path / cell["folder"] / "config.yaml").is_file():
                begun.add(cell["label"])
        earlier = [entry for entry in Study.of(before).entries() if entry.label in begun]
        _check_labels(earlier, study.entries())
        stays = {(cell["folder"], cell["label"]) for run in runs for cell in run.cells()}
        requirement = "the study has trained this run; to leave it out, delete its folder first"
        for cell in cells:
            is_left = (
                cell["folder"],
                cell["label"],
            ) not in stays and self.finished(cell["folder"])
            check(
                "study",
                f"without {self.path / cell['folder']}",
                not is_left,
                requirement,
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other studies out of the folder, which is made. `Busy` if one is in it, `BadInput`
        if it refuses."""
        lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        try:
            make_folder(self.path)
            lock = take_lock(self.path / "lock")
        except Taken as error:
            requirement = f"a study is going on in it ({error}); wait for it, or end it"
            raise Busy("out", str(self.path), requirement) from None
        except OSError as error:
            knows_no_locks = error.errno in (
                errno.ENOLCK,
                errno.ENOTSUP,
                errno.ENOSYS,
            )
            requirement = f"it cannot be written ({error.strerror})"
            check("out", str(self.path), knows_no_locks, requirement)
            line = f"{self.path}: no locks here ({error.strerror}); start no second study in it"
            print(line, file=sys.stderr)
        with lock:
            yield


@contextlib.contextmanager
def reading(
    key: str,
    value: str,
    problem: str,
    advice: str = "",
) -> Iterator[None]:
    """Raise `BadInput` with `problem`, its reason and `advice`, where a file that is read inside
    is damaged."""
    try:
        yield
    except DAMAGE as error:
        reason = one_line(error) or type(error).__name__
        requirement = f"{problem} ({reason})" + (f": {advice}" if advice else "")
        raise BadInput(key, value, requirement) from None


def one_line(error: object) -> str:
    """What an error says, in one line, without secrets."""
    return redact(" ".join(str(error).split()))


def check_new(
    out: Path,
    names: Collection[str],
    record: str,
) -> None:
    """Raise `BadInput` unless the folder `out`, which has no file `record`, is absent or holds none
    but files of these `names`."""
    is_folder = out.is_dir()
    check("out", str(out), is_folder or not out.exists(), "it is no folder")
    strange = {path.name for path in out.iterdir()} - set(names) if is_folder else set()
    requirement = f"it is a folder of something else: it holds no {record}"
    check("out", str(out), not strange, requirement)


def is_search(folder: Path) -> bool:
    """Whether it is one of `fl-train tune`, whose study is in `study/`."""
    return (folder / "tune.yaml").is_file()


def search_of(study: Path) -> Path | None:
    """The search whose choices the study in this folder has (`OUT` of `OUT/study`); None: it is of
    none."""
    folder = study.resolve()
    is_of_search = folder.name == "study" and is_search(folder.parent)
    return folder.parent if is_of_search else None


def as_yaml(base: str, rest: Mapping[str, Any]) -> str:
    """A study file: its resolved `base`, as YAML, and the `rest` of its keys."""
    return f"base:\n{indent(base, '  ')}{yaml.safe_dump(rest, sort_keys=False, allow_unicode=True)}"


def _check_labels(before: list[ListedMethod], now: list[ListedMethod]) -> None:
    """Raise `BadInput` where a label of which a run has begun means something else now: its runs
    are in folders of that name."""
    meanings = {entry.label: _meaning(entry) for entry in before}
    for entry in now:
        meaning = _meaning(entry)
        earlier = meanings.get(entry.label, meaning)
        requirement = f"in this study {entry.label!r} is {earlier}: give it another `label`"
        check(entry.key, meaning, meaning == earlier, requirement)


def _meaning(entry: ListedMethod) -> dict[str, Any]:
    when = {"when": dict(entry.when)} if entry.when else {}
    return {
        "name": entry.name,
        **entry.arguments,
        **entry.settings,
        **when,
    }


def default(key: str) -> Any:
    """The value of a key in a run of an earlier version, which did not have the key yet."""
    group, _, name = key.partition(".")
    field = Config.__dataclass_fields__.get(group)
    if field is None or field.default_factory is MISSING:
        return None
    value = getattr(field.default_factory(), name, None)
    return list(value) if isinstance(value, tuple) else value
