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
from fl_lightning.foundation.named import SHOWN, some
from fl_lightning.lab.study import archive as archives
from fl_lightning.lab.study.folder import StudyFolder, is_search
from fl_lightning.lab.study.launch import train
from fl_lightning.results import opening
from fl_lightning.results.runs import damage

SUFFIX = ".zip"


def archive(
    place: Path,
    out: str | None,
    rerun: str | None,
    layers: list[Layer],
) -> str:
    """Packs a study's folder; or says what an archive holds, or runs a cell of it again."""
    if place.is_dir():
        requirement = "a cell of an archive is run again: pack the study first"
        check("rerun", rerun, rerun is None, requirement)
        return _pack(StudyFolder(place), Path(out or f"{place.resolve()}{SUFFIX}"))
    if rerun is not None:
        return _run_again(place, rerun, out, layers)
    requirement = "an archive is read here; give the study's folder to write one"
    check("out", out, out is None, requirement)
    with archives.unpacked(place) as folder:
        is_regression = StudyFolder(folder).is_regression()
    return _words(archives.read_index(place), place, is_regression)


def _pack(folder: StudyFolder, out: Path) -> str:
    place = str(folder.path)
    inner = folder.path / "study"
    near = ""
    if is_search(folder.path) and StudyFolder(inner):
        near = f"; the study of this search is {inner}"
    check("archive", place, bool(folder), f"it is no study: it holds no study.json{near}")
    opening.check_out("out", str(out), SUFFIX)
    requirement = "it exists, and is not written over: move it, or give another --out"
    check("out", str(out), not out.exists(), requirement)
    ended = folder.ended()
    check("archive", place, bool(ended), "no run has ended")
    for run in ended.values():
        damaged = damage(run)
        requirement = f"{damaged}; delete the folder, and the study trains it again"
        check("archive", str(run.folder), damaged is None, requirement)
    return _words(archives.pack(folder, out), out, folder.is_regression())


def _words(
    index: dict[str, Any],
    file: Path,
    is_regression: bool,
) -> str:
    digests = index["weights"]
    without = sum(digest is None for digest in digests.values())
    bare = f", {without} of them without a checkpoint to tell their weights" if without else ""
    lines = f"archive: {len(digests)} runs{bare}, {len(index['files'])} files"
    # which speaks of accuracies alone
    table = "" if is_regression else f"the table: fl-train compare {file}; "
    again = f"a cell again: fl-train archive {file} --rerun {next(iter(digests))}"
    return f"{lines}, {_origin(index, digests)}\n{table}{again}"


def _origin(index: dict[str, Any], cells: Iterable[str]) -> str:
    """Where these runs of an archive were trained; where they do not say it, where the archive was
    made."""
    starts = [start for cell in cells for start in index.get("runs", {}).get(cell, [])]
    places = list(dict.fromkeys(_where(start) for start in starts))
    return f"trained {some(places)}" if places else f"archived {_where(index)}"


def _where(start: dict[str, Any]) -> str:
    machine, versions = start["machine"], start["versions"]
    processor = machine.get("processor") or machine.get("architecture") or "another machine"
    units = dict.fromkeys([processor, *machine.get("gpus", [])])
    cpu = f" ({machine['cpu']})" if "cpu" in machine else ""
    return f"with torch {versions.get('torch')} on {' + '.join(units)}{cpu}"


def _run_again(
    file: Path,
    cell: str,
    out: str | None,
    layers: list[Layer],
) -> str:
    """Runs `cell` as the archive has it.

    Raises:
        RunFailed: it came to something else.
        BadInput: no such archive, or no such cell.
    """
    index = archives.read_index(file)
    digests = index["weights"]
    names = list(digests)
    more = ", ..." if len(names) > SHOWN else ""
    has = f"it has {', '.join(names[:SHOWN])}{more}"
    missing = f"no such run{catalogue.did_you_mean(cell, names)}; {has}"
    check("rerun", cell, cell in digests, missing)
    is_new = out is None or not Path(out).exists()
    check("out", out, is_new, "it exists; name a new folder")
    with archives.unpacked(file) as folder, tempfile.TemporaryDirectory() as scratch:
        place = Path(out or Path(scratch) / Path(cell).name)
        saved = opening.saved_layer(folder / cell)
        assert saved is not None, "every run that was packed has one"
        with whole_folder(place):
            train(resolve([saved, {"loggers": None}, *layers]), place)
        differing = archives.differences(place, folder / cell, digests[cell])
        now = _where(archives.starts_of(place)[-1])
    if differing:
        before = f"it was {_origin(index, [cell])}, and run again {now}"
        raise RunFailed(f"{cell} differs in {', '.join(differing)}; {before}")
    parts = f"tables, relation, summary, weights {digests[cell] or 'not archived'}"
    return f"{cell}: the same bits ({parts})"
