"""Checkpoints on disk: files of tensors, and for each saved round a manifest of its files.

Manifests share files; a manifest appears in one step (write aside, fsync, rename) when all of its
files are on the disk. So a run that dies at any moment still has its last finished round complete.
Everything is safetensors and JSON: loading runs no code, and checks size, checksum, name and shape
of each file first.
"""

from __future__ import annotations

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
    """A checkpoint cannot be used, and why; no `BadInput`: callers may take an older one."""


# ---------------------------------------------------------------- writing


def write_tensors(
    folder: Path, files: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, Any]]:
    """Write tensors to files in `folder`, durably; returns the manifest's entry of each file.

    Raises:
        RunFailed: the disk is full, or refuses.
    """

    def flushed(name: str) -> dict[str, Any]:
        """Flush a file that has been written aside; its entry in the manifest."""
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
    """The tensors on the CPU, none of which shares memory with another, as safetensors needs
    them."""
    storages = set()
    unshared = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        unshared[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return unshared


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of its round; all of its files must be on the disk."""
    text = json.dumps(manifest)
    content = f'{{"xxh3": "{_digest(text)}", "manifest": {text}}}'
    write_whole(_file(folder, manifest["round"]), content)


# --------------------------------------------------------- reading what may be damaged, or not ours


def read_manifest(folder: Path, round: int) -> Manifest:
    """The manifest of `round`, every value of it of the right kind.

    Raises:
        Damaged: it cannot be read, or has another format.
    """
    file = _file(folder, round)
    try:
        content = json.loads(_inside(folder, file.name).read_text(encoding="utf-8"))
        manifest: Manifest = content["manifest"]
        if content["xxh3"] != _digest(json.dumps(manifest)):
            raise DamagedCheckpoint(f"{file.name} has changed since it was written")
        if manifest["round"] != round or not _is_ours(manifest):
            raise DamagedCheckpoint(f"{file.name} is no manifest of ours")
    except OSError as error:
        raise DamagedCheckpoint(f"{file.name} cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{file.name} is damaged") from error
    return manifest


def _is_ours(manifest: Manifest) -> bool:
    """Whether every value is of the right kind. Where keys are missing or types are wrong, it may
    raise KeyError, TypeError or the like, which `read_manifest` reports as damage.

    `heard` is `ServerState.uploaded`, and `turns` is `ClientState.rounds`.
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


def intact(folder: Path, round: int) -> Manifest | None:
    """The manifest of `round`; None: it cannot be used."""
    try:
        return read_manifest(folder, round)
    except DamagedCheckpoint:
        return None


def read_tensors(
    folder: Path,
    entry: Mapping[str, Any],
    expected: dict[str, Tensor],
    possible: dict[str, Tensor],
) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU. All `expected` ones must be there; these, and `possible`
    ones that are there, must have the right shape and type. (`fields.*`, entries of a client's or
    the server's memory, may have others: hooks may have resized them.)

    They are copied into memory that torch has aligned: matrix products round differently on
    unaligned memory.

    Raises:
        Damaged: the file is not as it was written, or not as expected.
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
    """The file `name` of `folder`; no link may lead out of it."""
    path = folder / name
    if not path.exists():
        return path
    is_inside = path.resolve().is_relative_to(folder.resolve())
    if not (path.is_file() and is_inside):
        raise DamagedCheckpoint(f"{name} is no plain file of this folder")
    return path


# ---------------------------------------------------------------- what there is


def rounds(folder: Path) -> list[int]:
    """Saved rounds, with an intact manifest or not, the newest first."""
    numbers = []
    for path in folder.glob("manifest-round-*.json"):
        match = re.fullmatch(r"manifest-round-(\d{5,})\.json", path.name)
        if match:
            numbers.append(int(match[1]))
    return sorted(numbers, reverse=True)


def manifests(folder: Path) -> dict[int, Manifest]:
    """Return the intact manifests by round, the newest first."""
    by_round = {}
    for t in rounds(folder):
        manifest = intact(folder, t)
        if manifest is not None:
            by_round[t] = manifest
    return by_round


def best(saved: Iterable[Manifest]) -> int | None:
    """The round of the greatest score, the first of equals; None: no round has a score."""
    scored = []
    for manifest in saved:
        score = manifest["score"]
        if score is not None and not math.isnan(score):
            scored.append((score, -manifest["round"]))
    if scored:
        return -max(scored)[1]
    return None


def files_of(manifest: Manifest) -> list[str]:
    """All files of a checkpoint, with its manifest."""
    return [*tensor_files(manifest), _file(Path(), manifest["round"]).name]


def tensor_files(manifest: Manifest) -> list[str]:
    """The files of tensors of a checkpoint."""
    return [entry["file"] for entry in _entries(manifest)]


def _entries(manifest: Manifest) -> list[dict[str, Any]]:
    """The entries of a manifest's files."""
    return [manifest["initial"], manifest["server"], *manifest["clients"].values()]


def _file(folder: Path, round: int) -> Path:
    return folder / f"manifest-round-{round:05d}.json"


def _digest(manifest: str) -> str:
    return xxhash.xxh3_128_hexdigest(manifest.encode())
