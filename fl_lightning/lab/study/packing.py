"""A study as one file, and any cell of it run again and held against what it
came to."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fl_lightning.configuration import catalogue
from fl_lightning.configuration.config import check
from fl_lightning.configuration.files import Layer
from fl_lightning.configuration.resolve import resolve
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.foundation.files import whole_folder
from fl_lightning.lab.study import archive as archives
from fl_lightning.lab.study.folder import StudyFolder, is_search
from fl_lightning.lab.study.launch import train
from fl_lightning.results import opening as runs
from fl_lightning.results.runs import damage

SUFFIX = ".zip"


def archive(place: Path, out: str | None, rerun: str | None, layers: list[Layer]) -> str:
    """Packs a study's folder; or says what an archive holds, or runs a cell of it again."""
    if place.is_dir():
        allowed = "a cell of an archive is run again: pack the study first"
        check("rerun", rerun, rerun is None, allowed)
        return _pack(
            StudyFolder(place),
            Path(out or f"{place.resolve()}{SUFFIX}"),
        )
    if rerun is not None:
        return _run_again(place, rerun, out, layers)
    allowed = "an archive is read here; give the study's folder to write one"
    check("out", out, out is None, allowed)
    with archives.unpacked(place) as folder:
        return _words(
            archives.read_index(place),
            place,
            StudyFolder(folder).is_regression(),
        )


def _pack(folder: StudyFolder, out: Path) -> str:
    inner = folder.path / "study"
    searched = is_search(folder.path) and bool(StudyFolder(inner))
    near = f"; the study of this search is {inner}" if searched else ""
    check(
        "archive", str(folder.path), bool(folder), f"it is no study: it holds no study.json{near}"
    )
    runs.check_out("out", str(out), SUFFIX)
    allowed = "it exists, and is not written over: move it, or give another --out"
    check("out", str(out), not out.exists(), allowed)
    check(
        "archive",
        str(folder.path),
        any(folder.finished(c["folder"]) for c in folder.cells()),
        "no run has ended",
    )
    for run in folder.ended().values():
        damaged = damage(run)
        check(
            "archive",
            str(run.folder),
            damaged is None,
            f"{damaged}; delete the folder, and the study trains it again",
        )
    return _words(
        archives.pack(folder, out),
        out,
        folder.is_regression(),
    )


def _words(index: dict[str, Any], file: Path, regression: bool) -> str:
    weights = index["weights"]
    without = sum(digest is None for digest in weights.values())
    bare = f", {without} of them without a checkpoint to tell their weights" if without else ""
    # which speaks of accuracies alone
    table = "" if regression else f"the table: fl-train compare {file}; "
    return (
        f"archive: {len(weights)} runs{bare}, {len(index['files'])} files, "
        f"{_origin(index, weights)}\n"
        f"{table}a cell again: fl-train archive {file} --rerun {next(iter(weights))}"
    )


def _origin(index: dict[str, Any], cells: Iterable[str]) -> str:
    """Where these runs of an archive were trained; where they do not say it, where the archive was
    made."""
    starts = [start for cell in cells for start in index.get("runs", {}).get(cell, [])]
    places = list(dict.fromkeys(_where(start) for start in starts))
    return f"trained {archives.some(places)}" if places else f"archived {_where(index)}"


def _where(start: dict[str, Any]) -> str:
    machine, versions = start["machine"], start["versions"]
    units = [
        machine.get("processor") or machine.get("architecture") or "another machine",
        *machine.get("gpus", []),
    ]
    cpu = f" ({machine['cpu']})" if "cpu" in machine else ""
    return f"with torch {versions.get('torch')} on {' + '.join(dict.fromkeys(units))}{cpu}"


def _run_again(file: Path, cell: str, out: str | None, layers: list[Layer]) -> str:
    """Runs `cell` as the archive has it.

    Raises:
        RunFailed: it came to something else.
        BadInput: no such archive, or no such cell.
    """
    index = archives.read_index(file)
    names = list(index["weights"])
    near = catalogue.did_you_mean(cell, names)
    check(
        "rerun",
        cell,
        cell in names,
        f"no such run{near}; it has {', '.join(names[:5])}{', ...' * (len(names) > 5)}",
    )
    check("out", out, out is None or not Path(out).exists(), "it exists; name a new folder")
    with archives.unpacked(file) as folder, tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / Path(cell).name if out is None else Path(out)
        saved = runs.saved_layer(folder / cell)
        assert saved is not None, "every run that was packed has one"
        with whole_folder(place):
            train(
                resolve([saved, {"loggers": None}, *layers]),
                place,
            )
        differ = archives.differences(
            place,
            folder / cell,
            index["weights"][cell],
        )
        now = _where(archives.trained(place)[-1])
    if differ:
        raise RunFailed(
            f"{cell} differs in {', '.join(differ)}; it was {_origin(index, [cell])}, and run "
            f"again {now}"
        )
    return (
        f"{cell}: the same bits (tables, relation, summary, weights "
        f"{index['weights'][cell] or 'not archived'})"
    )
