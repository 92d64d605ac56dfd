"""A study as one file: what its table is made from, and what each cell is to come to when it is run
again.

A zip of configurations, tables, relations and summaries, with `archive.json`: versions and the kind
of machine that it was packed with, and each run was trained with, the checksum of every file, and
of every run's final weights. Equal studies give equal files, bit for bit.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib.metadata
import itertools
import json
import platform
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.configuration.config import check
from fl_lightning.foundation.files import atomic_write
from fl_lightning.foundation.named import some
from fl_lightning.lab.study.code import ACCEPTED
from fl_lightning.lab.study.folder import StudyFolder, reading, search_of
from fl_lightning.results.folder import UNREADABLE
from fl_lightning.results.owncode import ROUNDS
from fl_lightning.results.provenance import processor, source_of, write_source
from fl_lightning.storage import manifest

INDEX = "archive.json"
VERSION = 1
TABLES = ("metrics.csv", "clients.csv", "final.csv", "newcomers.csv")
"""Of a run; a run that is run again must come to the same but for seconds and memory."""
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
VARYING = ("version", "world_size", "best_checkpoint_round", "wandb")
"""Keys of `summary.json` that tell how and where a run was run; when checkpoints are saved is a
matter of the clock."""
SEARCH = ("tuned.csv", "trials.csv")
"""Of the search that chose a study's settings, in the folder that holds the study's."""
STUDY = ("study.yaml", "study.json", ACCEPTED, *SEARCH)
PACKAGES = ("fl_lightning", "torch", "torchvision", "numpy", "scikit-learn", "lightning")
KIND = ("system", "processor", "cores", "gpus")
"""What a run's `provenance.json` says of the kind of its machine."""
STAMP = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip can say: an archive does not depend on when it was made."""


def pack(folder: StudyFolder, out: Path) -> dict[str, Any]:
    """Write the finished runs of a study to `out`; returns what `archive.json` holds."""
    runs = sorted(filter(folder.finished, folder.run_names()))
    paths = [folder.path / name for name in STUDY]
    for run in runs:
        for pattern in KEPT:
            paths += (folder.path / run).glob(pattern)
    files = {path.relative_to(folder.path).as_posix(): path for path in paths if path.is_file()}
    search = search_of(folder.path)
    for path in [search / name for name in SEARCH] if search is not None else []:
        if path.is_file():
            files.setdefault(path.name, path)
    names = sorted(files)
    index = {
        "version": VERSION,
        **here(),
        "runs": {run: starts_of(folder.path / run) for run in runs},
        "weights": {run: checkpoint_digest(folder.path / run) for run in runs},
        "sources": {run: source_of(folder.path / run) for run in runs},
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
    """What `archive.json` of an archive holds, after all of the archive has been looked at.

    Raises:
        BadInput: it is no archive, is of another version, or has been changed since it was made.
    """
    key, place = "archive", str(file)
    with reading(key, place, "it cannot be read as an archive"), zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        requirement = f"it is no archive of a study: it has no {INDEX}"
        check(key, place, INDEX in names, requirement)
        text = archive.read(INDEX)
        index: dict[str, Any] = json.loads(text)
        version, digests = index["version"], index["files"]
        requirement = f"it is of version {version}, not {VERSION}"
        check(key, place, version == VERSION, requirement)
        changed = [INDEX] if archive.comment.decode() != _digest(text) else []
        changed += sorted({INDEX, *digests} ^ set(names))
        if not changed:
            changed = [name for name in digests if _digest(archive.read(name)) != digests[name]]
    requirement = f"it has been changed since it was made: {', '.join(changed[:1])}"
    check(key, place, not changed, requirement)
    return index


@contextlib.contextmanager
def unpacked(file: Path) -> Iterator[Path]:
    """The study folder in an archive, as long as the block lasts; `BadInput` as `read_index`."""
    sources = read_index(file).get("sources", {})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with zipfile.ZipFile(file) as archive:
            archive.extractall(folder)
        for run, source in sources.items():
            write_source(folder / run, source)
        yield folder


def checkpoint_digest(run: Path) -> str | None:
    """The checksum of a run's final models and of all else in its last checkpoint; None without an
    intact one."""
    folder = run / "checkpoints"
    manifests = (manifest.intact(folder, t) for t in manifest.rounds(folder))
    newest = next(filter(None, manifests), None)
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
    """Parts in which a run differs from the archived one: `weights` (whose `digest` is archived),
    or names of files; seconds, memory, `VARYING` apart."""
    differing = []
    if digest is not None and checkpoint_digest(ours) != digest:
        differing.append("weights")
    differing += [name for name in TABLES if _rows(ours / name) != _rows(archived / name)]
    files = itertools.chain(*((run / "relation").glob("*.npz") for run in (ours, archived)))
    arrays = [
        name
        for name in sorted({file.name for file in files})
        if _arrays(ours / "relation" / name) != _arrays(archived / "relation" / name)
    ]
    if arrays:
        differing.append(f"relation ({some(arrays)})")
    now, before = _comparable(ours / "summary.json"), _comparable(archived / "summary.json")
    keys = [key for key in before | now if now.get(key) != before.get(key)]
    if keys:
        differing.append(f"summary.json ({some(keys)})")
    return differing


def starts_of(run: Path) -> list[dict[str, dict[str, Any]]]:
    """`versions` and `machine` of each start of a run, equal ones once; empty where its
    `provenance.json` is not there.

    When and in which folder it was, the command, and the machine's name are left out.
    """
    distinct: list[dict[str, dict[str, Any]]] = []
    record: dict[str, dict[str, Any]] = {}
    try:
        for start in json.loads((run / "provenance.json").read_text(encoding="utf-8")):
            machine = {key: value for key, value in start["machine"].items() if key in KIND}
            record = {"versions": dict(start["versions"]), "machine": machine}
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


def here() -> dict[str, dict[str, str]]:
    """Versions of what computes, and the kind of this machine."""
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
    if not table.is_file():  # such as of newcomers, where no client was held out
        return []
    with table.open(newline="", encoding="utf-8") as opened:
        return [_unmeasured(row) for row in csv.DictReader(opened)]


def _arrays(file: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """Type, shape and bytes of each array by name; None where there is no such file, or none that
    can be read."""
    try:
        with np.load(file) as arrays:
            return {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in arrays.items()}
    except UNREADABLE:
        return None


def _comparable(summary: Path) -> dict[str, str]:
    """The keys of a `summary.json` that equal runs have alike, and their values as JSON: NaN is
    NaN."""
    try:
        content = dict(json.loads(summary.read_text(encoding="utf-8")))
    except UNREADABLE:
        return {}
    texts = {key: json.dumps(value) for key, value in content.items() if key not in VARYING}
    return _unmeasured(texts)


def _unmeasured(row: dict[str, str]) -> dict[str, str]:
    """`row` without seconds and memory."""
    measured = ("seconds", "memory", "wall_seconds")
    return {key: value for key, value in row.items() if not key.startswith(measured)}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
