"""Reads and writes checkpoints: files of tensors, and for each saved round a manifest of its files.

Manifests share files. A manifest is written atomically (to a temporary file, fsync, rename) after
all of its files, so a run that is killed at any moment has a complete checkpoint of an earlier
round. Files are safetensors and JSON: loading runs no code, and first checks the size, checksum,
names and shapes of each file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from fl_lightning.foundation.files import (
    AT_ONCE,
    aside_of,
    flush,
    make_folder,
    write_whole,
    writing,
)

_NAMES = (
    r"initial\.safetensors|server-round-\d+\.safetensors|rows/client-\d+-round-\d+\.safetensors"
)

Manifest = dict[str, Any]


class DamagedCheckpoint(Exception):
    """Raised if a checkpoint cannot be used; the message is the reason. It is no `BadInput`, as
    callers may use an older checkpoint instead."""


# ---------------------------------------------------------------- writing


def write_tensors(
    folder: Path, files: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, Any]]:
    """Write tensors to files in `folder` and flush them to the disk; returns the manifest's entry
    of each file.

    Raises:
        RunFailed: the disk is full or cannot be written to.
    """

    def flushed(name: str) -> dict[str, Any]:
        """Flush a temporary file to the disk; returns the file's entry in the manifest."""
        aside = aside_of(folder / name)
        with writing(folder / name):
            flush(aside)
            with aside.open("rb") as file:
                digest = hashlib.file_digest(file, xxhash.xxh3_128)
            size = aside.stat().st_size
            return {"file": name, "size": size, "xxh3": digest.hexdigest()}

    for name, tensors in files.items():
        with writing(folder / name):
            make_folder((folder / name).parent)
            save_file(_unshared(tensors), aside_of(folder / name))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        entries = dict(zip(files, pool.map(flushed, files), strict=True))
    for name in files:
        with writing(folder / name):
            aside_of(folder / name).replace(folder / name)
    for parent in {(folder / name).parent for name in files}:
        with writing(parent):
            flush(parent)
    return entries


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, without shared memory, which safetensors refuses."""
    storages = set()
    unshared = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        unshared[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return unshared


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a round's manifest, after all files that it names."""
    text = json.dumps(manifest)
    content = f'{{"xxh3": "{_digest(text)}", "manifest": {text}}}'
    write_whole(_file(folder, manifest["round"]), content)


# --------------------------------------------------- reading files that may be damaged or foreign


def read_manifest(folder: Path, round: int) -> Manifest:
    """Read and check the manifest of `round`.

    Raises:
        DamagedCheckpoint: it cannot be read, or has another format.
    """
    file = _file(folder, round)
    try:
        content = json.loads(_inside(folder, file.name).read_text(encoding="utf-8"))
        manifest: Manifest = content["manifest"]
        if content["xxh3"] != _digest(json.dumps(manifest)):
            raise DamagedCheckpoint(f"{file.name} has changed since it was written")
        if manifest["round"] != round or not _is_ours(manifest):
            raise DamagedCheckpoint(f"{file.name} is no manifest of this package")
    except OSError as error:
        raise DamagedCheckpoint(f"{file.name} cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{file.name} is damaged") from error
    return manifest


def _is_ours(manifest: Manifest) -> bool:
    """Whether every value has the right type. If a key is missing or a type is wrong, it may also
    raise KeyError, TypeError or the like, which `read_manifest` reports as damage.

    The key `heard` is `ServerState.uploaded`, and `turns` is `ClientState.rounds`.
    """
    clients = manifest["clients"]
    counts = [manifest["round"], *manifest["heard"], *map(int, clients)]
    counts += [entry["turns"] for entry in clients.values()]
    for entry in _entries(manifest):
        counts.append(entry["size"])
        if not re.fullmatch(_NAMES, entry["file"]):
            return False
        if not isinstance(entry["xxh3"], str):
            return False
    if any(type(count) is not int or count < 0 for count in counts):
        return False
    return (
        all(name == str(int(name)) for name in clients)
        and isinstance(manifest["score"], float | None)
        and isinstance(manifest["blocks"], list)
        and isinstance(manifest["dtype"], str)
    )


def read_tensors(
    folder: Path,
    entry: Mapping[str, Any],
    expected: dict[str, Tensor],
    possible: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Read and check one file of tensors; returns them on the CPU.

    The tensors are copied, as matrix products round differently on the unaligned memory of the
    file.

    Args:
        entry: the file's entry in the manifest.
        expected: tensors whose names, shapes and types the file must contain.
        possible: tensors that the file may lack; if it has them, their shapes and types must be
            these. In both dicts, shapes and types of entries named `fields.*` are not compared:
            these are tensors in a client's or the server's memory, which hooks may resize.

    Raises:
        DamagedCheckpoint: the file has changed since it was written, or lacks a tensor.
    """
    name = entry["file"]
    size = entry["size"]
    try:
        content = _inside(folder, name).read_bytes()
        if len(content) < size:
            raise DamagedCheckpoint(f"{name} is cut short, {len(content)} of {size} bytes")
        if len(content) > size or xxhash.xxh3_128_hexdigest(content) != entry["xxh3"]:
            raise DamagedCheckpoint(f"{name} has changed since it was written")
        tensors = {key: tensor.clone() for key, tensor in load(content).items()}
    except OSError as error:
        raise DamagedCheckpoint(f"{name} cannot be read ({error.strerror})") from error
    except (SafetensorError, ValueError, KeyError) as error:
        raise DamagedCheckpoint(f"{name} is no file of tensors") from error
    for key, like in (expected | possible).items():
        tensor = tensors.get(key)
        if tensor is None:
            fits = key not in expected
        else:
            alike = tensor.shape == like.shape and tensor.dtype == like.dtype
            fits = alike or key.startswith("fields.")
        if not fits:
            raise DamagedCheckpoint(
                f"{name} has no {key} of shape {tuple(like.shape)}, {like.dtype}"
            )
    return tensors


def _inside(folder: Path, name: str) -> Path:
    """Return the path of the file `name` in `folder`.

    Raises:
        DamagedCheckpoint: it is a link that leads out of the folder, or no plain file.
    """
    path = folder / name
    if not path.exists():
        return path
    is_inside = path.resolve().is_relative_to(folder.resolve())
    if not (path.is_file() and is_inside):
        raise DamagedCheckpoint(f"{name} is no plain file of this folder")
    return path


# ---------------------------------------------------------------- saved rounds


def rounds(folder: Path) -> list[int]:
    """Return the rounds for which the folder has a manifest, intact or damaged, newest first."""
    numbers = []
    for path in folder.glob("manifest-round-*.json"):
        match = re.fullmatch(r"manifest-round-(\d{5,})\.json", path.name)
        if match:
            numbers.append(int(match[1]))
    return sorted(numbers, reverse=True)


def manifests(folder: Path) -> dict[int, Manifest]:
    """Read all manifests in the folder; returns the intact ones by round, newest first."""
    by_round = {}
    for t in rounds(folder):
        with contextlib.suppress(DamagedCheckpoint):
            by_round[t] = read_manifest(folder, t)
    return by_round


def best_round(saved: Iterable[Manifest]) -> int | None:
    """Return the round with the greatest score, the first of equals; None: no round has a score."""
    scored = []
    for manifest in saved:
        score = manifest["score"]
        if score is not None and not math.isnan(score):
            scored.append((score, -manifest["round"]))
    if scored:
        return -max(scored)[1]
    return None


def files_of(manifest: Manifest) -> list[str]:
    """Return the names of all files of a checkpoint, including its manifest."""
    return [*tensor_files(manifest), _file(Path(), manifest["round"]).name]


def tensor_files(manifest: Manifest) -> list[str]:
    """Return the names of a checkpoint's files of tensors."""
    return [entry["file"] for entry in _entries(manifest)]


def _entries(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the entries of all files in a manifest."""
    return [manifest["initial"], manifest["server"], *manifest["clients"].values()]


def _file(folder: Path, round: int) -> Path:
    return folder / f"manifest-round-{round:05d}.json"


def _digest(manifest: str) -> str:
    return xxhash.xxh3_128_hexdigest(manifest.encode())
