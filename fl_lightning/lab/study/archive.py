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
import json
import platform
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.configuration.config import check
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.files import atomic_write
from fl_lightning.lab.study.code import ACCEPTED
from fl_lightning.lab.study.folder import StudyFolder, search_of
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
    runs = sorted({cell["folder"] for cell in folder.cells() if folder.finished(cell["folder"])})
    paths = [folder.path / name for name in STUDY]
    paths += [path for run in runs for kept in KEPT for path in (folder.path / run).glob(kept)]
    files = {path.relative_to(folder.path).as_posix(): path for path in paths if path.is_file()}
    search = search_of(folder.path)
    if search is not None:
        files = {name: search / name for name in SEARCH if (search / name).is_file()} | files
    names = sorted(files)
    index = {
        "version": VERSION,
        **here(),
        "runs": {run: trained(folder.path / run) for run in runs},
        "weights": {run: weights(folder.path / run) for run in runs},
        "sources": {run: source_of(folder.path / run) for run in runs},
        "files": {name: _digest(files[name].read_bytes()) for name in names},
    }
    text = json.dumps(index, indent=1).encode()
    with (
        atomic_write(out) as aside,
        zipfile.ZipFile(
            aside,
            "w",
            zipfile.ZIP_DEFLATED,
            compresslevel=9,
        ) as archive,
    ):
        archive.comment = _digest(text).encode()
        for name in (INDEX, *names):
            entry = zipfile.ZipInfo(name, STAMP)
            entry.compress_type, entry.external_attr, entry.create_system = (
                zipfile.ZIP_DEFLATED,
                0o644 << 16,
                3,
            )
            archive.writestr(
                entry,
                text if name == INDEX else files[name].read_bytes(),
            )
    return index


def read_index(file: Path) -> dict[str, Any]:
    """What `archive.json` of an archive holds, after all of the archive has been looked at.

    Raises:
        BadInput: it is no archive, is of another version, or has been changed since it was made.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            check(
                "archive",
                str(file),
                INDEX in names,
                f"it is no archive of a study: it has no {INDEX}",
            )
            text = archive.read(INDEX)
            index: dict[str, Any] = json.loads(text)
            version = index["version"]
            check(
                "archive",
                str(file),
                version == VERSION,
                f"it is of version {version}, not {VERSION}",
            )
            changed = [INDEX] if archive.comment.decode() != _digest(text) else []
            changed += sorted({INDEX, *index["files"]} ^ set(names))
            changed = changed or [
                n for n, digest in index["files"].items() if _digest(archive.read(n)) != digest
            ]
    except UNREADABLE as error:
        raise BadInput(
            "archive",
            str(file),
            f"it cannot be read as an archive ({error})",
        ) from None
    if changed:
        raise BadInput(
            "archive",
            str(file),
            f"it has been changed since it was made: {changed[0]}",
        )
    return index


@contextlib.contextmanager
def unpacked(file: Path) -> Iterator[Path]:
    """The study folder in an archive, as long as the block lasts; `BadInput` as `read_index`."""
    sources = read_index(file).get("sources", {})
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(file) as archive:
            archive.extractall(folder)
        for run, source in sources.items():
            write_source(Path(folder) / run, source)
        yield Path(folder)


def weights(run: Path) -> str | None:
    """The checksum of a run's final models and of all else in its last checkpoint; None without an
    intact one."""
    folder = run / "checkpoints"
    newest = next(
        filter(None, (manifest.intact(folder, t) for t in manifest.rounds(folder))),
        None,
    )
    if newest is None:
        return None
    digest = hashlib.sha256()
    for name in sorted(manifest.tensor_files(newest)):
        digest.update(f"{name}\n".encode())
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def differences(ours: Path, archived: Path, digest: str | None) -> list[str]:
    """In what a run differs from the archived one: `weights`, or names of files; seconds, memory,
    `VARYING` apart."""
    differing = ["weights"] if digest is not None and weights(ours) != digest else []
    differing += [name for name in TABLES if _rows(ours / name) != _rows(archived / name)]
    names = sorted(
        {file.name for run in (ours, archived) for file in (run / "relation").glob("*.npz")}
    )
    other = [
        n for n in names if _arrays(ours / "relation" / n) != _arrays(archived / "relation" / n)
    ]
    differing += [f"relation ({some(other)})"] if other else []
    now, was = (_comparable(run / "summary.json") for run in (ours, archived))
    keys = [key for key in dict.fromkeys([*was, *now]) if now.get(key) != was.get(key)]
    return differing + ([f"summary.json ({some(keys)})"] if keys else [])


def trained(run: Path) -> list[dict[str, dict[str, Any]]]:
    """`versions` and `machine` of each start of a run, equal ones once; empty where its
    `provenance.json` is not there.

    When and in which folder it was, the command, and the machine's name are left out.
    """
    try:
        starts = json.loads((run / "provenance.json").read_text(encoding="utf-8"))
        records = [
            {
                "versions": dict(start["versions"]),
                "machine": {k: v for k, v in start["machine"].items() if k in KIND},
            }
            for start in starts
        ]
        distinct = [start for k, start in enumerate(records) if start not in records[:k]]
        last = distinct.index(records[-1])
    except (*UNREADABLE, AttributeError):
        return []
    with contextlib.suppress(OSError, ValueError):
        lines = (run / "environment.txt").read_text(encoding="utf-8").splitlines()
        installed = dict(line.split("==", 1) for line in lines)
        distinct[last]["versions"] |= {
            name: installed[name] for name in PACKAGES if name in installed
        }
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
        rows = list(csv.DictReader(opened))
    return [{k: v for k, v in row.items() if not _measured(k)} for row in rows]


def _arrays(file: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """Type, shape and bytes of each array by name; None where there is no such file, or none that
    can be read."""
    try:
        with np.load(file) as arrays:
            return {
                name: (arrays[name].dtype.str, arrays[name].shape, arrays[name].tobytes())
                for name in arrays.files
            }
    except UNREADABLE:
        return None


def _comparable(summary: Path) -> dict[str, str]:
    """The keys of a `summary.json` that equal runs have alike, and their values as JSON: NaN is
    NaN."""
    try:
        content = dict(json.loads(summary.read_text(encoding="utf-8")))
    except UNREADABLE:
        return {}
    return {
        key: json.dumps(v)
        for key, v in content.items()
        if key not in VARYING and not _measured(key)
    }


def some(names: list[str]) -> str:
    """The first few, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _measured(name: str) -> bool:
    return name.startswith(("seconds", "memory", "wall_seconds"))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
