"""Packs a study into one file, from which its table can be made and each cell trained again.

The file is a zip of configs, tables, relations and summaries. Its `archive.json` holds the versions
and the kind of machine with which the archive was made and with which each run was trained, and
checksums of every file and of every run's final weights. Equal studies give files that are equal
bit for bit.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib.metadata
import json
import platform
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.configuration.catalogue import did_you_mean
from fl_lightning.configuration.config import check
from fl_lightning.configuration.files import Layer
from fl_lightning.configuration.resolve import resolve
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.foundation.files import atomic_write, whole_folder
from fl_lightning.foundation.named import SHOWN, some
from fl_lightning.lab.study.code import ACCEPTED
from fl_lightning.lab.study.folder import (
    StudyFolder,
    explaining_damage,
    is_search,
    search_of,
)
from fl_lightning.lab.study.launch import train
from fl_lightning.results import opening
from fl_lightning.results.folder import UNREADABLE
from fl_lightning.results.owncode import ROUNDS
from fl_lightning.results.provenance import processor, source_digest, write_source_digest
from fl_lightning.results.runs import damage
from fl_lightning.storage import manifest

SUFFIX = ".zip"
INDEX = "archive.json"
"""Name of the index in the zip."""
VERSION = 1
"""Version of the archive's format."""
TABLES = ("metrics.csv", "clients.csv", "final.csv", "newcomers.csv")
"""Tables of a run. A run that is trained again must have equal ones, except for seconds and
memory."""
KEPT = (
    "config.yaml",
    "columns.json",
    "summary.json",
    "failures.csv",
    "split.csv",
    *TABLES,
    "relation/*.npz",
    ROUNDS,
    "source/**/*.py",
)
"""Files of a run folder that are packed."""
VARYING = ("version", "world_size", "best_checkpoint_round", "wandb")
"""Keys of `summary.json` that depend on where a run was trained, or on the clock, and are not
compared."""
SEARCH = ("tuned.csv", "trials.csv")
"""Tables of the search that tuned the study; they lie in the folder that contains the study's."""
STUDY = ("study.yaml", "study.json", ACCEPTED, *SEARCH)
"""Files of the study's folder that are packed."""
PACKAGES = (
    "fl_lightning",
    "torch",
    "torchvision",
    "numpy",
    "scikit-learn",
    "lightning",
)
"""Packages whose versions are recorded."""
KIND = ("system", "processor", "cores", "gpus")
"""Keys of a run's `provenance.json` that give the kind of machine."""
STAMP = (1980, 1, 1, 0, 0, 0)
"""Time of every entry, the earliest that a zip can hold: equal content gives equal files."""


# ---------------------------------------------------------------- the command


def archive(
    place: Path,
    out: str | None,
    rerun: str | None,
    layers: list[Layer],
) -> str:
    """Packs a study, describes an archive, or trains one of its runs again.

    Args:
        place: a study's folder, which is packed; or an archive.
        out: for packing, the archive to write (None: `place` with `.zip`); with `rerun`, the folder
            of the new run (None: a temporary one).
        rerun: the run of the archive to train again and compare; None: describe the archive.
        layers: settings that override those of the run `rerun`.

    Returns:
        The text that the command prints.
    """
    if place.is_dir():
        check(
            "rerun",
            rerun,
            rerun is None,
            "it is for an archive, and this is a study's folder: pack the study first",
        )
        return _pack(StudyFolder(place), Path(out or f"{place.resolve()}{SUFFIX}"))
    if rerun is not None:
        return _rerun(place, rerun, out, layers)
    check(
        "out",
        out,
        out is None,
        "leave it out: an archive is only described; to write one, give a study's folder",
    )
    with unpacked(place) as folder:
        is_regression = StudyFolder(folder).is_regression()
    return _summary_text(read_index(place), place, is_regression)


def _pack(folder: StudyFolder, out: Path) -> str:
    """Checks that the study can be packed, packs it, and returns the text to print."""
    place = str(folder.path)
    inner = folder.path / "study"
    hint = ""
    if is_search(folder.path) and StudyFolder(inner):
        hint = f"; the study of this search is {inner}"
    check(
        "archive",
        place,
        bool(folder),
        f"it is no study (no study.json): give a study's folder{hint}",
    )
    opening.check_out("out", str(out), SUFFIX)
    check(
        "out",
        str(out),
        not out.exists(),
        "it exists: move it, or give another --out",
    )
    ended = folder.ended_runs()
    check("archive", place, bool(ended), "no run has ended: run it with fl-train study first")
    for run in ended.values():
        damaged = damage(run)
        check(
            "archive",
            str(run.folder),
            damaged is None,
            f"{damaged}; delete the folder, and the study trains it again",
        )
    return _summary_text(pack(folder, out), out, folder.is_regression())


def _summary_text(
    index: dict[str, Any],
    file: Path,
    is_regression: bool,
) -> str:
    """Returns how many runs and files an archive holds, and the commands that use it."""
    digests = index["weights"]
    missing = sum(digest is None for digest in digests.values())
    missing_text = (
        f", {missing} of them without a checkpoint to tell their weights" if missing else ""
    )
    # `compare` refuses regressions
    table = "" if is_regression else f"the table: fl-train compare {file}; "
    return (
        f"archive: {len(digests)} runs{missing_text}, {len(index['files'])} files, "
        f"{_training_environments(index, digests)}\n{table}a cell again: fl-train archive {file} "
        f"--rerun {next(iter(digests))}"
    )


def _training_environments(
    index: dict[str, Any],
    cells: Iterable[str],
) -> str:
    """Returns the environments in which runs of an archive were trained; if they are not recorded,
    the one in which the archive was made."""
    environments = index.get("runs", {})
    places = dict.fromkeys(
        _environment_text(environment)
        for cell in cells
        for environment in environments.get(cell, [])
    )
    return f"trained {some(places)}" if places else f"archived {_environment_text(index)}"


def _environment_text(environment: dict[str, Any]) -> str:
    """Returns an environment (`versions` and `machine`) in words."""
    machine, versions = environment["machine"], environment["versions"]
    processor = machine.get("processor") or machine.get("architecture") or "another machine"
    units = dict.fromkeys([processor, *machine.get("gpus", [])])
    cpu = f" ({machine['cpu']})" if "cpu" in machine else ""
    return f"with torch {versions.get('torch')} on {' + '.join(units)}{cpu}"


def _rerun(
    file: Path,
    cell: str,
    out: str | None,
    layers: list[Layer],
) -> str:
    """Trains the run `cell` of an archive again, and compares the results.

    Raises:
        RunFailed: the results differ.
        BadInput: there is no such archive or run, or `out` exists.
    """
    index = read_index(file)
    digests = index["weights"]
    names = list(digests)
    dots = ", ..." if len(names) > SHOWN else ""
    check(
        "rerun",
        cell,
        cell in digests,
        f"no such run{did_you_mean(cell, names)}; it has {', '.join(names[:SHOWN])}{dots}",
    )
    is_new = out is None or not Path(out).exists()
    check("out", out, is_new, "it exists; give a new folder")
    with unpacked(file) as folder, tempfile.TemporaryDirectory() as scratch:
        place = Path(out or Path(scratch) / Path(cell).name)
        saved = opening.saved_settings(folder / cell)
        assert saved is not None, "every run that was packed has one"
        with whole_folder(place):
            train(resolve([saved, {"loggers": None}, *layers]), place)
        differing = differences(place, folder / cell, digests[cell])
        environment = _environment_text(environments_of(place)[-1])
    if differing:
        raise RunFailed(
            f"{cell} differs in {', '.join(differing)}; "
            f"it was {_training_environments(index, [cell])}, and run again {environment}"
        )
    return (
        f"{cell}: the same bits (tables, relation, summary, weights "
        f"{digests[cell] or 'not archived'})"
    )


# ---------------------------------------------------------------- the file


def pack(folder: StudyFolder, out: Path) -> dict[str, Any]:
    """Write the finished runs of a study to the archive `out`; return its index
    (`archive.json`)."""
    runs = sorted(filter(folder.finished, folder.run_names()))
    paths = [folder.path / name for name in STUDY]
    for run in runs:
        for pattern in KEPT:
            paths += (folder.path / run).glob(pattern)
    files = {}
    for path in filter(Path.is_file, paths):
        files[path.relative_to(folder.path).as_posix()] = path
    search = search_of(folder.path)
    for path in [search / name for name in SEARCH] if search is not None else []:
        if path.is_file():
            files.setdefault(path.name, path)
    names = sorted(files)
    index = {
        "version": VERSION,
        **this_environment(),
        "runs": {run: environments_of(folder.path / run) for run in runs},
        "weights": {run: checkpoint_digest(folder.path / run) for run in runs},
        "sources": {run: source_digest(folder.path / run) for run in runs},
        "files": {name: _digest(files[name].read_bytes()) for name in names},
    }
    text = json.dumps(index, indent=1).encode()
    with atomic_write(out) as aside, zipfile.ZipFile(aside, "w") as archive:
        archive.comment = _digest(text).encode()
        for name in (INDEX, *names):
            content = text if name == INDEX else files[name].read_bytes()
            entry = zipfile.ZipInfo(name, STAMP)
            entry.external_attr = 0o644 << 16
            entry.create_system = 3
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return index


def read_index(file: Path) -> dict[str, Any]:
    """Check the whole archive and return its index (`archive.json`).

    Raises:
        BadInput: the file is no archive, has another format version, or was changed after packing.
    """
    key, place = "archive", str(file)
    with (
        explaining_damage(key, place, "it cannot be read as an archive"),
        zipfile.ZipFile(file) as archive,
    ):
        names = archive.namelist()
        check(
            key,
            place,
            INDEX in names,
            f"it is no archive of a study (no {INDEX}): make one with fl-train archive STUDY",
        )
        text = archive.read(INDEX)
        index: dict[str, Any] = json.loads(text)
        version, digests = index["version"], index["files"]
        check(
            key,
            place,
            version == VERSION,
            f"it has version {version}, not {VERSION}: use the release that wrote it",
        )
        changed = [INDEX] if archive.comment.decode() != _digest(text) else []
        changed += sorted({INDEX, *digests} ^ set(names))
        if not changed:
            changed = [name for name in digests if _digest(archive.read(name)) != digests[name]]
    check(
        key,
        place,
        not changed,
        f"it was changed after it was packed ({', '.join(changed[:1])}): get it again",
    )
    return index


@contextlib.contextmanager
def unpacked(file: Path) -> Iterator[Path]:
    """Context manager: yield a temporary folder with the unpacked study of an archive, and delete
    the folder in the end.

    Raises:
        BadInput: the file is no archive, or is damaged (`read_index`).
    """
    sources = read_index(file).get("sources", {})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with zipfile.ZipFile(file) as archive:
            archive.extractall(folder)
        for run, source in sources.items():
            write_source_digest(folder / run, source)
        yield folder


def checkpoint_digest(run: Path) -> str | None:
    """The SHA-256 of all tensors in a run's last intact checkpoint, which include the final models;
    None if the run has no intact checkpoint."""
    folder = run / "checkpoints"
    newest = next(iter(manifest.manifests(folder).values()), None)
    if newest is None:
        return None
    digest = hashlib.sha256()
    for name in sorted(manifest.tensor_files(newest)):
        digest.update(f"{name}\n".encode())
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def differences(
    ours: Path,
    archived: Path,
    digest: str | None,
) -> list[str]:
    """The parts of a run that differ from the archived run: `weights`, and names of files.

    Not compared are seconds, memory, and the keys of `summary.json` that depend on the machine or
    the clock (`VARYING`).

    Args:
        ours: folder of the new run.
        archived: folder of the archived run.
        digest: `checkpoint_digest` of the archived run; None: weights are not compared.
    """
    differing = []
    if digest is not None and checkpoint_digest(ours) != digest:
        differing.append("weights")
    differing += [name for name in TABLES if _rows(ours / name) != _rows(archived / name)]
    files = [*ours.glob("relation/*.npz"), *archived.glob("relation/*.npz")]
    arrays = [
        name
        for name in sorted({file.name for file in files})
        if _arrays(ours / "relation" / name) != _arrays(archived / "relation" / name)
    ]
    if arrays:
        differing.append(f"relation ({some(arrays)})")
    values = _comparable_summary(ours / "summary.json")
    archived_values = _comparable_summary(archived / "summary.json")
    keys = [key for key in archived_values | values if values.get(key) != archived_values.get(key)]
    if keys:
        differing.append(f"summary.json ({some(keys)})")
    return differing


def environments_of(run: Path) -> list[dict[str, dict[str, Any]]]:
    """The distinct environments in which a run was started or resumed, each with `versions` and
    `machine`; empty without a readable `provenance.json`.

    Times, folders, commands and the machine's name are left out.
    """
    distinct: list[dict[str, dict[str, Any]]] = []
    record: dict[str, dict[str, Any]] = {}
    try:
        for environment in json.loads((run / "provenance.json").read_text(encoding="utf-8")):
            machine = {key: value for key, value in environment["machine"].items() if key in KIND}
            record = {"versions": dict(environment["versions"]), "machine": machine}
            if record not in distinct:
                distinct.append(record)
    except (*UNREADABLE, AttributeError):
        return []
    with contextlib.suppress(OSError, ValueError):
        lines = (run / "environment.txt").read_text(encoding="utf-8").splitlines()
        installed = dict(line.split("==", 1) for line in lines)
        last = distinct[distinct.index(record)]
        last["versions"] |= {name: installed[name] for name in PACKAGES if name in installed}
    return distinct


def this_environment() -> dict[str, dict[str, str]]:
    """The `versions` of Python and the numerical packages, and the kind of this `machine`."""
    import torch

    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES}
    machine = {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "processor": processor(),
        "cuda": torch.version.cuda or "none",
    }
    return {"versions": versions, "machine": machine}


def _rows(table: Path) -> list[dict[str, str]]:
    """The rows of a table without seconds and memory; none if the file does not exist."""
    if not table.is_file():  # newcomers.csv, if no client was held out
        return []
    with table.open(newline="", encoding="utf-8") as opened:
        return [_without_costs(row) for row in csv.DictReader(opened)]


def _arrays(file: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """The type, shape and bytes of each array by name; None if the file cannot be read."""
    try:
        with np.load(file) as arrays:
            return {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in arrays.items()}
    except UNREADABLE:
        return None


def _comparable_summary(summary: Path) -> dict[str, str]:
    """The content of a `summary.json` without the keys that may differ between equal runs; values
    are JSON texts, in which NaN equals NaN."""
    try:
        content = dict(json.loads(summary.read_text(encoding="utf-8")))
    except UNREADABLE:
        return {}
    texts = {key: json.dumps(value) for key, value in content.items() if key not in VARYING}
    return _without_costs(texts)


def _without_costs(row: dict[str, str]) -> dict[str, str]:
    """The row without the columns of seconds and memory."""
    measured = ("seconds", "memory", "wall_seconds")
    return {key: value for key, value in row.items() if not key.startswith(measured)}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
