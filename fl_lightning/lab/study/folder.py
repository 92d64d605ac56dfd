"""The folder of a study: its definition, its table of cells, and its lock.

`study.yaml` and `study.json` are written before the first run begins, and each run has an ordinary
run folder. The states of runs are read from their folders, so that no state is lost with the
process that runs the study.
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
"""Version of `study.json`."""
PLACE = (
    "data.root",
    "data.public_root",
    "data.download",
    "data.resident",
    "fabric.timeout",
)
"""Keys of the base that may differ when a study is continued: they depend on the machine and change
no result."""


DAMAGE = (
    *UNREADABLE,
    AttributeError,
    AssertionError,
    csv.Error,
    yaml.YAMLError,
)
"""Errors of readers on damaged files."""


class Busy(BadInput):
    """Another process runs a study in the folder."""


class StudyFolder:
    """The folder `path` of one study; its truth value says whether a study is in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._study, self._cells = path / "study.yaml", path / "study.json"
        self._failures = path / "failures.json"

    def __bool__(self) -> bool:
        """Whether there is a study."""
        return self._cells.is_file()

    def has_begun(self) -> bool:
        """Whether a run of the study has begun."""
        return any((self.path / "runs").glob("**/config.yaml"))

    def finished(self, folder: str) -> bool:
        """Whether the run in `folder` (relative to the study's) has ended without an error: it has
        a `summary.json`."""
        return (self.path / folder / "summary.json").is_file()

    def intact_runs(self, regression: bool = True) -> dict[str, RunResult]:
        """Load the finished runs whose files are intact, by folder.

        Args:
            regression: whether runs of a regression are allowed; if not, loading one raises
                `BadInput`.

        Raises:
            BadInput: runs cannot be loaded together (`results.runs.load`).
        """
        return {
            name: run
            for name, run in self.ended_runs(regression).items()
            if run.finished and damage(run) is None
        }

    def ended_runs(self, regression: bool = True) -> dict[str, RunResult]:
        """Load all runs with a `summary.json`, by folder, including runs with damaged files.
        Argument and error are those of `intact_runs`."""
        names = list(filter(self.finished, self.run_names()))
        paths = [self.path / name for name in names]
        return dict(zip(names, load(paths, regression), strict=True))

    def run_names(self) -> list[str]:
        """The run folders that `study.json` lists, relative to the study's folder."""
        return list(dict.fromkeys(cell["folder"] for cell in self.cells()))

    def cells(self) -> list[dict[str, Any]]:
        """The cells in `study.json`; raises `BadInput` if the file cannot be read."""
        out = str(self.path)
        with explaining_damage("study", out, "its study.json cannot be read"):
            content = json.loads(self._cells.read_text(encoding="utf-8"))
            version = content["version"]
            check(
                "study",
                out,
                version == VERSION,
                f"its study.json has version {version}, not {VERSION}: use the release that "
                "wrote it",
            )
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
        """The content of `study.yaml`; raises `BadInput` if the file cannot be read."""
        with explaining_damage(
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
        """Whether the base's `data.task` is regression, as opposed to classification."""
        with contextlib.suppress(BadInput):
            return dict(flat(self.definition().get("base"))).get("data.task") == "regression"
        return False

    def failures(self) -> dict[str, str]:
        """The runs that failed when they were last tried, and the reasons."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return dict(json.loads(self._failures.read_text(encoding="utf-8")))
        return {}

    def write_failures(self, failures: Mapping[str, str]) -> None:
        """Write which runs failed, and the reasons."""
        write_whole(self._failures, json.dumps(failures, indent=2) + "\n")

    def write(
        self,
        study: Study,
        base: str,
        runs: list[StudyRun],
    ) -> None:
        """Write `study.yaml`, with the resolved `base` as YAML, and the cells of `runs` to
        `study.json`."""
        rest = {
            "methods": study.methods,
            "seeds": study.seeds,
            "forced": study.forced,
        }
        rest |= {"grid": study.grid} if study.grid else {}
        rest |= {"paper": study.paper} if study.paper else {}
        write_whole(self._study, study_yaml(base, rest))
        lines = ",\n  ".join(json.dumps(cell) for run in runs for cell in run.cells())
        write_whole(self._cells, f'{{"version": {VERSION}, "cells": [\n  {lines}\n]}}\n')

    def check(
        self,
        study: Study,
        base: Mapping[str, Any],
        runs: list[StudyRun],
    ) -> None:
        """Raise `BadInput` unless the folder is new, or holds this study, to which seeds, settings
        and methods may have been added."""
        if not self:
            files = (self._study, self._cells)
            names = {f.name for file in files for f in (file, aside_of(file))}
            check_new(self.path, {"lock", *names}, "study.json")
            return
        before = self.definition()
        old, new = dict(flat(before.get("base"))), dict(flat(base))
        for key in dict.fromkeys([*old, *new]):
            is_same = old.get(key, earlier_default(key)) == new.get(key)
            check(
                f"base.{key}",
                new.get(key),
                is_same or key in PLACE,
                f"the study in {self.path} has {old.get(key)!r}: for another base give another "
                "--out",
            )
        cells = self.cells()
        begun_labels = set()
        for cell in cells:
            if (self.path / cell["folder"] / "config.yaml").is_file():
                begun_labels.add(cell["label"])
        earlier = [entry for entry in Study.of(before).entries() if entry.label in begun_labels]
        _check_same_meaning(earlier, study.entries())
        stays = {(cell["folder"], cell["label"]) for run in runs for cell in run.cells()}
        for cell in cells:
            row = cell["folder"], cell["label"]
            check(
                "study",
                f"without {self.path / cell['folder']}",
                row in stays or not self.finished(cell["folder"]),
                "the study has trained this run: list it, or delete its folder",
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Context manager: make the folder and hold its lock. Raises `Busy` if another process
        holds it, `BadInput` if the folder cannot be written."""
        lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        try:
            make_folder(self.path)
            lock = take_lock(self.path / "lock")
        except Taken as error:
            requirement = f"a study is going on in it ({error}); wait for it, or end it"
            raise Busy("out", str(self.path), requirement) from None
        except OSError as error:
            has_no_locks = error.errno in (
                errno.ENOLCK,
                errno.ENOTSUP,
                errno.ENOSYS,
            )
            check("out", str(self.path), has_no_locks, f"it cannot be written ({error.strerror})")
            line = f"{self.path}: no locks here ({error.strerror}); start no second study in it"
            print(line, file=sys.stderr)
        with lock:
            yield


@contextlib.contextmanager
def explaining_damage(
    key: str,
    value: str,
    problem: str,
    advice: str = "",
) -> Iterator[None]:
    """Context manager: turn an error of reading a damaged file (`DAMAGE`) into `BadInput` with the
    message `KEY=VALUE: PROBLEM (REASON): ADVICE`; the reason is the error's text.

    Args:
        key: the key in the message.
        value: its value.
        problem: the file that cannot be used.
        advice: what the user should do; empty: no advice.
    """
    try:
        yield
    except DAMAGE as error:
        reason = one_line(error) or type(error).__name__
        raise BadInput(
            key, value, f"{problem} ({reason})" + (f": {advice}" if advice else "")
        ) from None


def one_line(error: object) -> str:
    """The error's text in one line, without secrets."""
    return redact(" ".join(str(error).split()))


def check_new(
    out: Path,
    names: Collection[str],
    record: str,
) -> None:
    """Raise `BadInput` if `out` is a file, or a folder with other files than `names`.

    Args:
        out: folder of a new study or search.
        names: names of files that an interrupted start may have left there.
        record: name of the file by which a begun study or search is recognised; the message says
            that it is missing.
    """
    is_folder = out.is_dir()
    check("out", str(out), is_folder or not out.exists(), "it is a file: give a folder")
    other_files = {path.name for path in out.iterdir()} - set(names) if is_folder else set()
    check(
        "out", str(out), not other_files, f"it has other files and no {record}: give a new folder"
    )


def is_search(folder: Path) -> bool:
    """Whether the folder is that of a search by `fl-train tune`, which has its study in
    `study/`."""
    return (folder / "tune.yaml").is_file()


def search_of(study: Path) -> Path | None:
    """The folder of the search by `fl-train tune` that made the study, for a study in `OUT/study`
    the folder `OUT`; None for other studies."""
    folder = study.resolve()
    is_of_search = folder.name == "study" and is_search(folder.parent)
    return folder.parent if is_of_search else None


def study_yaml(base: str, rest: Mapping[str, Any]) -> str:
    """The text of a study file.

    Args:
        base: the resolved base, as YAML.
        rest: the study's other keys.
    """
    return f"base:\n{indent(base, '  ')}{yaml.safe_dump(rest, sort_keys=False, allow_unicode=True)}"


def _check_same_meaning(before: list[ListedMethod], now: list[ListedMethod]) -> None:
    """Raise `BadInput` if a label with runs now stands for another method or other arguments: the
    folders of its runs have its name."""
    meanings = {entry.label: _meaning(entry) for entry in before}
    for entry in now:
        meaning = _meaning(entry)
        earlier = meanings.get(entry.label, meaning)
        check(
            entry.key,
            meaning,
            meaning == earlier,
            f"in this study {entry.label!r} was {earlier}: give it another `label`",
        )


def _meaning(entry: ListedMethod) -> dict[str, Any]:
    """Method, arguments and settings of a label."""
    when = {"when": dict(entry.when)} if entry.when else {}
    return {
        "name": entry.name,
        **entry.arguments,
        **entry.settings,
        **when,
    }


def earlier_default(key: str) -> Any:
    """The default of a config key, for the configs of an earlier version that lacked the key; None
    if the key has no default."""
    group, _, name = key.partition(".")
    field = Config.__dataclass_fields__.get(group)
    if field is None or field.default_factory is MISSING:
        return None
    value = getattr(field.default_factory(), name, None)
    return list(value) if isinstance(value, tuple) else value
