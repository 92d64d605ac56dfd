"""Checkpoints as they lie on disk: files of tensors, and for each saved round a manifest that names
those it needs.

Files are shared by the manifests that name them; a manifest appears in one step (write aside,
fsync, rename) when all that it names is on the disk. So a run that dies at any moment still has the
whole of its last finished round. Everything is safetensors and JSON: loading runs no code, and
trusts nothing before its size, checksum, name and shape have been looked at.
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


class Damaged(Exception):
    """A checkpoint cannot be used; the text says why."""


# ---------------------------------------------------------------- writing


def write_tensors(
    folder: Path, files: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, Any]]:
    """Write tensors under names in `folder`, whole and on the disk; returns what a manifest says of
    each file.

    Raises:
        RunFailed: the disk is full, or refuses.
    """

    def sealed(name: str) -> dict[str, Any]:
        aside = aside_of(folder / name)
        with writing(folder / name):
            flush(aside)
            with aside.open("rb") as file:
                digest = hashlib.file_digest(file, xxhash.xxh3_128)
            return {"file": name, "size": aside.stat().st_size, "xxh3": digest.hexdigest()}

    for name, tensors in files.items():
        with writing(folder / name):
            make_folder((folder / name).parent)
            save_file(_apart(tensors), aside_of(folder / name))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        entries = dict(zip(files, pool.map(sealed, files), strict=True))
    for name in files:
        with writing(folder / name):
            aside_of(folder / name).replace(folder / name)
    for parent in {(folder / name).parent for name in files}:
        with writing(parent):
            flush(parent)
    return entries


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, none of which shares memory with another: safetensors takes no
    others."""
    unshared: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        shares = any(
            tensor.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
            for t in unshared.values()
        )
        unshared[name] = tensor.clone() if shares else tensor
    return unshared


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of its round; all files that it names must be on the disk."""
    text = json.dumps(manifest)
    write_whole(
        _file(folder, manifest["round"]), f'{{"xxh3": "{_digest(text)}", "manifest": {text}}}'
    )


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
            raise Damaged(f"{file.name} has changed since it was written")
        clients = manifest["clients"]
        numbers = [manifest["round"], *manifest["heard"], *(e["size"] for e in _entries(manifest))]
        numbers += [entry["turns"] for entry in clients.values()]
        named = all(
            re.fullmatch(_NAMES, e["file"]) and isinstance(e["xxh3"], str)
            for e in _entries(manifest)
        )
        named = named and all(name == str(int(name)) for name in clients)
        counted = all(
            type(number) is int and number >= 0 for number in [*numbers, *map(int, clients)]
        )
        scored = manifest["score"] is None or isinstance(manifest["score"], float)
        shaped = isinstance(manifest["blocks"], list) and isinstance(manifest["dtype"], str)
        if not (named and counted and scored and shaped and manifest["round"] == round):
            raise Damaged(f"{file.name} is no manifest of ours")
    except OSError as error:
        raise Damaged(f"{file.name} cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"{file.name} is damaged") from error
    return manifest


def intact(folder: Path, round: int) -> Manifest | None:
    """The manifest of `round`, if it can be used."""
    try:
        return read_manifest(folder, round)
    except Damaged:
        return None


def read_tensors(
    folder: Path, entry: Mapping[str, Any], expected: dict[str, Tensor], possible: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU; those in `expected` must be there, and be alike (fields
    may change shape).

    Those in `possible` must be alike where they are there.

    Copied into memory that torch has aligned: matrix products round differently on unaligned
    memory.

    Raises:
        Damaged: the file is not as it was written, or not as expected.
    """
    name = entry["file"]
    size = entry["size"]
    try:
        content = _inside(folder, name).read_bytes()
        if len(content) < size:
            raise Damaged(f"{name} is cut short, {len(content)} of {size} bytes")
        if len(content) > size or xxhash.xxh3_128_hexdigest(content) != entry["xxh3"]:
            raise Damaged(f"{name} has changed since it was written")
        tensors = {key: tensor.clone() for key, tensor in load(content).items()}
    except OSError as error:
        raise Damaged(f"{name} cannot be read ({error.strerror})") from error
    except (SafetensorError, ValueError, KeyError) as error:
        raise Damaged(f"{name} is no file of tensors") from error
    for key, like in (expected | {k: v for k, v in possible.items() if k in tensors}).items():
        alike = (
            key in tensors and tensors[key].shape == like.shape and tensors[key].dtype == like.dtype
        )
        if not alike and not (key in tensors and key.startswith("fields.")):
            raise Damaged(f"{name} has no {key} of shape {tuple(like.shape)}")
    return tensors


def _inside(folder: Path, name: str) -> Path:
    """The file `name` of `folder`, which no link may lead out of."""
    path = folder / name
    if path.exists() and not (path.is_file() and path.resolve().is_relative_to(folder.resolve())):
        raise Damaged(f"{name} is no plain file of this folder")
    return path


# ---------------------------------------------------------------- what there is


def rounds(folder: Path) -> list[int]:
    """Rounds that have a manifest, intact or not, the newest first."""
    names = (
        re.fullmatch(r"manifest-round-(\d{5,})\.json", path.name)
        for path in folder.glob("manifest-round-*.json")
    )
    return sorted((int(name[1]) for name in names if name), reverse=True)


def manifests(folder: Path) -> dict[int, Manifest]:
    """Return the intact manifests by round, the newest first."""
    by_round = {t: intact(folder, t) for t in rounds(folder)}
    return {t: manifest for t, manifest in by_round.items() if manifest is not None}


def best(saved: Iterable[Manifest]) -> int | None:
    """The round of the greatest score, the first of equals."""
    scored = [
        (m["score"], -m["round"])
        for m in saved
        if m["score"] is not None and not math.isnan(m["score"])
    ]
    return -max(scored)[1] if scored else None


def files_of(manifest: Manifest) -> list[str]:
    """All files of a checkpoint, its manifest too."""
    return [*tensor_files(manifest), _file(Path(), manifest["round"]).name]


def tensor_files(manifest: Manifest) -> list[str]:
    """The files of tensors of a checkpoint."""
    return [entry["file"] for entry in _entries(manifest)]


def _entries(manifest: Manifest) -> list[dict[str, Any]]:
    """What is said of each file that a manifest names."""
    return [manifest["initial"], manifest["server"], *manifest["clients"].values()]


def _file(folder: Path, round: int) -> Path:
    return folder / f"manifest-round-{round:05d}.json"


def _digest(manifest: str) -> str:
    return xxhash.xxh3_128_hexdigest(manifest.encode())
